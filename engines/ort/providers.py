"""ONNX Runtime's execution providers: their options, and checks that they are installed and run a whole graph.

ONNX Runtime falls back silently: to the CPU when a provider's libraries do not load, and for single nodes when the
provider has no kernel. `check_node_assignment` raises an error instead.
The drafter and the graphs that run once per image may have another provider than the target.
"""

from __future__ import annotations

import importlib
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

from ...errors import EngineError
from ...inputs import format_error, format_value, reraise_signal_error
from ..gpu import find_gpu
from ..host import installed_distributions

AUTO = "auto"  # the provider that `detect_provider` returns
DEFAULT_PROVIDER = "cpu"  # runs every graph; other providers may leave shape arithmetic to it
# Copies, and ops on shapes and indices. Providers leave them on the CPU on purpose, as it needs their few numbers.
_SHAPE_OPS = {"Shape", "Size", "Constant", "Concat", "Gather", "Slice", "Squeeze", "Unsqueeze", "Cast", "Pow"}
_ON_CPU = _SHAPE_OPS | {"MemcpyToHost", "MemcpyFromHost"}


class Provider(NamedTuple):
    """An execution provider: names, package, options, and limitations.

    Attributes:
        name: name that users give.
        execution_provider: name in ONNX Runtime.
        package: package that contains the provider.
        options: options of sessions.
        memory_device: ONNX Runtime's name for the memory of values; decoders use the device layout unless it is `cpu`.
        supports_views: whether a value may be a view into another value's memory.
        basic_ops_only: whether graphs must avoid ops for attention, and float16 on some devices.
        is_plugin: whether the library is a module of the package and must be registered with onnxruntime.
        extra_library: library from further packages that convolutions need.
        cpu_only_graphs: graphs that run on the CPU, once per image, because the provider lacks some of their ops.
        rounds_to_bfloat16: whether matmuls round to bfloat16, which images tolerate and sampled tokens do not.
        graph_capture_options: additional options for recording passes as graphs; empty if the provider cannot record.
        max_captured_graphs: maximum number of recordings per graph.
    """

    name: str
    execution_provider: str
    package: str
    options: dict[str, str]
    memory_device: str = "cpu"
    supports_views: bool = True
    basic_ops_only: bool = False
    is_plugin: bool = False
    extra_library: str = ""
    cpu_only_graphs: tuple[str, ...] = ()
    rounds_to_bfloat16: bool = False
    graph_capture_options: Mapping[str, str] = MappingProxyType({})
    max_captured_graphs: int = 0


# `cudaStreamPerThread`, a default stream for each thread: work that a thread submits to any session runs in that order,
# so only reads wait. A thread waits for its work before it releases `get_device_lock`.
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
_SEPARATE_ROLES = ("drafter", "condition", IMAGE_DECODER)  # graphs that may have another provider


class ProviderChoice(NamedTuple):
    """Names of providers: `graph_providers` for single graphs, `main_provider` for all others."""

    main_provider: str = AUTO
    graph_providers: Mapping[str, str] = MappingProxyType({})

    def provider_for(self, role: str) -> str:
        """Return the name of the requested provider of a graph."""
        return self.graph_providers.get(role, self.main_provider)

    def __str__(self) -> str:
        """Return the names in the format that `parse` reads."""
        return ",".join([self.main_provider, *(f"{role}={name}" for role, name in self.graph_providers.items())])

    @classmethod
    def parse(cls, names: str | Sequence[str]) -> ProviderChoice:
        """Parse names of providers.

        Args:
            names: `NAME` for all graphs and `GRAPH=NAME` for a single graph, in a sequence or separated by commas.

        Raises:
            EngineError: a name is unknown or given twice, or a graph cannot have the provider.
        """
        graph_providers: dict[str, str] = {}
        for item in names.split(",") if isinstance(names, str) else names:
            role, equals, name = item.strip().rpartition("=")
            if equals and role not in _SEPARATE_ROLES:
                remedy = "all others run on one provider, NAME"
                raise _make_provider_error(
                    found=f"graph {format_value(role)}", expected=" or ".join(_SEPARATE_ROLES), remedy=remedy
                )
            if role in graph_providers:
                raise _make_provider_error(
                    found=f"{graph_providers[role]} and {name} for {role or 'all graphs'}", expected="one"
                )
            if (equals or name != AUTO) and _look_up_provider(name).rounds_to_bfloat16 and role != IMAGE_DECODER:
                remedy = f"give it to the image decoder alone, {IMAGE_DECODER}={name}"
                raise _make_provider_error(
                    f"{name} rounds to bfloat16", found=f"{name} for {role or 'all graphs'}", remedy=remedy
                )
            graph_providers[role] = name
        return cls(graph_providers.pop("", AUTO), graph_providers)


ON_CPU = ProviderChoice(DEFAULT_PROVIDER)


def _make_provider_error(problem: str = "", **fields: str) -> EngineError:
    return EngineError(problem, field="provider", **fields)


_registered: set[tuple[Any, str]] = set()  # pairs of an onnxruntime module and the name of a registered plugin's module
_lock = threading.Lock()


def find_provider(name: str, runtime: Any) -> Provider:
    """Return a provider by its name.

    Args:
        name: name that users give.
        runtime: the onnxruntime module.

    Raises:
        EngineError: the name is unknown, or `runtime` does not have the provider or a device for it, or has CUDA as
            well, whose memory ONNX Runtime then takes for that of every other GPU provider.
    """
    provider = _look_up_provider(name)
    if provider.is_plugin and provider.memory_device != "cpu" and _has_cuda(runtime):
        raise EngineError(
            field=f"provider {name}",
            found="onnxruntime-gpu",
            expected="onnxruntime",
            remedy="use provider cuda, or install onnxruntime in place of onnxruntime-gpu",
        )
    if provider.is_plugin and not find_plugin_devices(provider, runtime):
        problem = "ONNX Runtime finds no device that it runs on"
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
    """Return the name of the first GPU provider whose package is installed and that finds a GPU, otherwise `cpu`.

    Raises: EngineError: the library of an installed plugin does not load.
    """
    for provider in _ALL:
        is_installed = provider.memory_device != "cpu" and installed_distributions(provider.package.partition("[")[0])
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
    """Return the devices of a plugin after registering it, if necessary.

    Raises: EngineError: the plugin is not installed, or its library does not load.
    """
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
            reraise_signal_error(error)
            problem = f"onnxruntime {runtime.__version__} cannot load its library ({format_error(error, 200)})"
            remedy = f"check the device's driver, or update onnxruntime and {provider.package}"
            raise EngineError(problem, field=field, remedy=remedy) from error
    return [device for device in runtime.get_ep_devices() if device.ep_name == provider.execution_provider]


def get_device_lock(provider: str) -> AbstractContextManager[object]:
    """Return the lock that a thread holds while it uses a provider's device; providers in host memory need none.

    The lock is necessary because any other allocation fails while CUDA records a pass.
    """
    return nullcontext() if PROVIDERS[provider].memory_device == "cpu" else DEVICE_LOCKS[provider]


def check_node_assignment(graph_label: object, provider: Provider, session: Any) -> None:
    """Check that a provider runs all nodes of a session's graph except shape arithmetic.

    Args:
        graph_label: graph file or description, for the error.
        session: the session, with recorded assignments of nodes.

    Raises:
        EngineError: the provider did not load, or ONNX Runtime assigned nodes to another provider.
    """
    remedy = f"use provider {DEFAULT_PROVIDER}, or check its driver (`lantern-rt doctor`) and update {provider.package}"
    if provider.execution_provider not in session.get_providers():
        problem = f"provider {provider.name} did not load"
        raise EngineError(problem, field=str(graph_label), found=", ".join(session.get_providers()), remedy=remedy)
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
        raise EngineError(problem, field=str(graph_label), remedy=remedy)
