"""Execution providers of ONNX Runtime: their options, and checks that a provider is installed and runs a whole graph.

ONNX Runtime silently uses the CPU when the libraries of a provider do not load, and for nodes for which the provider
has no kernel. `check_node_assignment` raises an error instead. The drafter and the graphs that run once per image may
have another provider than the target.
"""

from __future__ import annotations

import importlib
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ...errors import EngineError
from ...inputs import format_error, format_value, reraise_error_of_signal_handler
from ..gpu import find_gpu
from ..host import list_installed_packages

AUTO = "auto"  # the provider that `detect_provider` returns
DEFAULT_PROVIDER = "cpu"  # runs every graph; other providers may leave shape arithmetic to it
# Operators on shapes and indices, and copies. Providers leave them on the CPU on purpose: the results are a
# few numbers, which the CPU needs.
_SHAPE_OPS = {"Shape", "Size", "Constant", "Concat", "Gather", "Slice", "Squeeze", "Unsqueeze", "Cast", "Pow"}
_ON_CPU = _SHAPE_OPS | {"MemcpyToHost", "MemcpyFromHost"}


class Provider(NamedTuple):
    """Execution provider of ONNX Runtime: names, package, options and limitations."""

    name: str  # name of the provider in this project, such as `cuda`
    execution_provider: str  # name of the provider in ONNX Runtime, such as `CUDAExecutionProvider`
    package: str  # package that contains the provider
    options: dict[str, str]
    # Name of the provider's memory in ONNX Runtime. Decoders use the device layout unless it is `cpu`.
    memory_device: str = "cpu"
    supports_views: bool = True  # whether a tensor may be a view into the memory of another tensor
    basic_ops_only: bool = False  # whether graphs must avoid the operators for attention, and float16 on some devices
    is_plugin: bool = False  # whether the provider is a separate library, which must be registered with onnxruntime
    extra_library: str = ""  # name of a library that convolutions need and that another package contains; "": none
    # Roles of graphs that run on the CPU because the provider lacks some of their operators.
    cpu_only_graphs: tuple[str, ...] = ()
    # Whether matmuls round to bfloat16. This is accurate enough for the VQ decoder, but not for decoders, as other
    # tokens would be sampled.
    rounds_to_bfloat16: bool = False
    # Additional options for recording passes as graphs; empty if the provider cannot record.
    graph_capture_options: Mapping[str, str] = MappingProxyType({})
    max_captured_graphs: int = 0  # maximum number of recorded passes per session


# `cudaStreamPerThread`: each thread has a default stream. The work that a thread submits to any session runs in the
# order of submission, so only reads have to wait. A thread waits for its work before it releases `get_device_lock`.
CUDA_STREAM = 2
_ALL = (
    Provider(DEFAULT_PROVIDER, "CPUExecutionProvider", "onnxruntime", {}),
    Provider(
        "cuda",
        "CUDAExecutionProvider",
        "onnxruntime-gpu[cuda,cudnn]",
        {
            "use_tf32": "0",  # results of TF32 would depend on the number of nodes in a pass
            "arena_extend_strategy": "kSameAsRequested",  # the default doubles the memory at every extension
            "cudnn_conv_algo_search": "HEURISTIC",  # the default times every algorithm during the first image
            "user_compute_stream": str(CUDA_STREAM),
        },
        memory_device="cuda",
        extra_library="cuDNN",
        graph_capture_options={"enable_cuda_graph": "1"},
        max_captured_graphs=512,  # ONNX Runtime keeps them until the process ends
    ),
    Provider(
        "webgpu",
        "WebGpuExecutionProvider",
        "onnxruntime-ep-webgpu",
        {},
        memory_device="gpu",
        supports_views=False,
        basic_ops_only=True,
        is_plugin=True,
        cpu_only_graphs=("condition",),
        graph_capture_options={"enableGraphCapture": "1"},
        max_captured_graphs=1 << 31,
    ),
    Provider(
        "openvino",
        "OpenVINOExecutionProvider",
        "onnxruntime-ep-openvino",
        {"load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'},  # the default is bfloat16 on CPUs that have it
        is_plugin=True,
    ),
    Provider(
        "openvino-bf16",
        "OpenVINOExecutionProvider",
        "onnxruntime-ep-openvino",
        {"load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "bf16"}}'},  # CPUs without bfloat16 compute in float32
        is_plugin=True,
        rounds_to_bfloat16=True,
    ),
)
PROVIDERS = {provider.name: provider for provider in _ALL}
DEVICE_LOCKS = {name: threading.RLock() for name in PROVIDERS}
IMAGE_DECODER = "vq_decoder"
_SEPARATE_ROLES = ("drafter", "condition", IMAGE_DECODER)  # graphs that may have another provider than the target


class ProviderChoice(NamedTuple):
    """Choice of an execution provider for each graph of a bundle."""

    main_provider: str = AUTO  # name of the provider of all graphs that are not in `graph_providers`
    graph_providers: Mapping[str, str] = MappingProxyType({})  # names of providers by role of the graph

    def get_provider(self, role: str) -> str:
        return self.graph_providers.get(role, self.main_provider)

    def __str__(self) -> str:
        """Format the choice as text that `parse` reads, such as `cuda,vq_decoder=cpu`."""
        return ",".join([self.main_provider, *(f"{role}={name}" for role, name in self.graph_providers.items())])

    @classmethod
    def parse(cls, names: str | Sequence[str]) -> ProviderChoice:
        """Parse names of providers, in a sequence or separated by commas.

        An item is `NAME` for all graphs, or `GRAPH=NAME` for a single graph, such as `vq_decoder=cpu`.

        Raises:
            EngineError: a provider or graph is unknown, a graph has two providers, or a graph cannot have the provider.
        """
        graph_providers: dict[str, str] = {}
        for item in names.split(",") if isinstance(names, str) else names:
            role, equals, name = item.strip().rpartition("=")
            if equals and role not in _SEPARATE_ROLES:
                remedy = "all other graphs run on one provider, given as NAME"
                raise _make_provider_error(
                    found=f"graph {format_value(role)}", expected=" or ".join(_SEPARATE_ROLES), remedy=remedy
                )
            if role in graph_providers:
                raise _make_provider_error(
                    found=f"{graph_providers[role]} and {name} for {role or 'all graphs'}", expected="one provider"
                )
            if (equals or name != AUTO) and _look_up_provider(name).rounds_to_bfloat16 and role != IMAGE_DECODER:
                remedy = f"give it to the image decoder alone, {IMAGE_DECODER}={name}"
                raise _make_provider_error(
                    f"{name} rounds to bfloat16", found=f"{name} for {role or 'all graphs'}", remedy=remedy
                )
            graph_providers[role] = name
        return cls(graph_providers.pop("", AUTO), graph_providers)  # the key "" stands for all graphs


ON_CPU = ProviderChoice(DEFAULT_PROVIDER)  # all graphs on the CPU


def _make_provider_error(problem: str = "", **fields: str) -> EngineError:
    return EngineError(problem, field="provider", **fields)


# Registered plugins: the onnxruntime module, and the name of the module that contains the plugin.
_registered: set[tuple[Any, str]] = set()
_lock = threading.Lock()


def find_available_provider(name: str, runtime: Any) -> Provider:
    """Return a provider by name, or raise EngineError if ONNX Runtime, whose module is `runtime`, cannot use it."""
    provider = _look_up_provider(name)
    # If ONNX Runtime includes CUDA, it takes the memory of every other GPU provider for CUDA memory.
    if provider.is_plugin and provider.memory_device != "cpu" and _has_cuda(runtime):
        raise EngineError(
            field=f"provider {name}",
            found="onnxruntime-gpu",
            expected="onnxruntime",
            remedy="use provider cuda, or install onnxruntime in place of onnxruntime-gpu",
        )
    if provider.is_plugin and not find_plugin_devices(provider, runtime):
        problem = "ONNX Runtime finds no device for this provider"
        raise EngineError(problem, field=f"provider {name}", remedy="install its driver")
    if not provider.is_plugin and provider.execution_provider not in runtime.get_available_providers():
        raise EngineError(
            field=f"provider {name}",
            found=f"onnxruntime {runtime.__version__} with {', '.join(runtime.get_available_providers())}",
            expected=provider.execution_provider,
            remedy=f"install {provider.package} instead of the onnxruntime you have",
        )
    return provider


def detect_provider(runtime: Any) -> str:
    """Return the name of the first GPU provider that is installed and finds a GPU, otherwise `cpu`."""
    for provider in _ALL:
        is_installed = provider.memory_device != "cpu" and list_installed_packages(provider.package.partition("[")[0])
        if not is_installed or (provider.is_plugin and _has_cuda(runtime)):
            continue
        if find_plugin_devices(provider, runtime) if provider.is_plugin else find_gpu():
            return provider.name
    return DEFAULT_PROVIDER


def _has_cuda(runtime: Any) -> bool:
    return PROVIDERS["cuda"].execution_provider in runtime.get_available_providers()


def _look_up_provider(name: str) -> Provider:
    if (provider := PROVIDERS.get(name)) is None:
        raise _make_provider_error(found=format_value(name), expected=f"one of {', '.join([AUTO, *PROVIDERS])}")
    return provider


def find_plugin_devices(provider: Provider, runtime: Any) -> list[Any]:
    """Register a plugin with onnxruntime if necessary, and return its devices, or raise EngineError."""
    field = f"provider {provider.name}"
    module = provider.package.replace("-", "_")
    with _lock:
        try:
            if (runtime, module) not in _registered:
                path = importlib.import_module(module).get_library_path()
                runtime.register_execution_provider_library(provider.execution_provider, path)
                _registered.add((runtime, module))
        except ModuleNotFoundError as error:
            remedy = f"run `pip install {provider.package}`"
            raise EngineError(f"no module {module}", field=field, remedy=remedy) from error
        except Exception as error:
            reraise_error_of_signal_handler(error)
            problem = f"onnxruntime {runtime.__version__} cannot load its library ({format_error(error, 200)})"
            remedy = f"check the device's driver, or update onnxruntime and {provider.package}"
            raise EngineError(problem, field=field, remedy=remedy) from error
    return [device for device in runtime.get_ep_devices() if device.ep_name == provider.execution_provider]


def get_device_lock(provider: str) -> AbstractContextManager[object]:
    """Return the lock that a thread must hold while it uses the device of a provider.

    Allocations by other threads fail while CUDA records a pass. Providers in the memory of the host need no lock.
    """
    return nullcontext() if PROVIDERS[provider].memory_device == "cpu" else DEVICE_LOCKS[provider]


def check_node_assignment(path: Path, provider: Provider, session: Any) -> None:
    """Raise EngineError if nodes of a graph run on another provider, except operators on shapes and indices."""
    remedy = f"use provider {DEFAULT_PROVIDER}, or check its driver (`lantern-rt doctor`) and update {provider.package}"
    if provider.execution_provider not in session.get_providers():
        problem = f"provider {provider.name} did not load"
        raise EngineError(problem, field=str(path), found=", ".join(session.get_providers()), remedy=remedy)
    if provider.name == DEFAULT_PROVIDER:
        return
    unsupported = Counter(
        node.op_type
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name != provider.execution_provider
        for node in part.get_nodes()
        if node.op_type not in _ON_CPU
    )
    if unsupported:
        ops = ", ".join(f"{count} {op}" for op, count in unsupported.most_common(5))
        problem = f"provider {provider.name} does not support {unsupported.total()} nodes of this graph ({ops})"
        raise EngineError(problem, field=str(path), remedy=remedy)
