"""ONNX Runtime's execution providers by the names users give them, and whether one really took a graph.

ONNX Runtime falls back silently: to the CPU when a provider's libraries do not load, node by node when it lacks a
kernel. Here the provider asked for takes the whole graph, or loading stops.
The drafter, and the graphs that run once an image, may have a provider of their own.
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
from ...inputs import format_error, format_value
from ..gpu import find_gpu
from ..host import installed

AUTO = "auto"  # the first GPU's, where a package for it is installed and it is found; else the CPU's
DEFAULT_PROVIDER = "cpu"  # ONNX Runtime's own kernels: they run every graph, and others may fall back to them
# Copies, and nodes on shapes and indices, which providers leave on the CPU on purpose: a few numbers, needed there.
_SHAPE_OPS = {"Shape", "Size", "Constant", "Concat", "Gather", "Slice", "Squeeze", "Unsqueeze", "Cast", "Pow"}
_ON_CPU = _SHAPE_OPS | {"MemcpyToHost", "MemcpyFromHost"}


class Provider(NamedTuple):
    """An execution provider: its names, its package, its options, and how it differs from other providers.

    Attributes:
        name: name that users give.
        execution_provider: ONNX Runtime's name.
        package: package that contains it.
        options: options of its sessions.
        memory: ONNX Runtime's name of the memory of its values; decoders use the device layout unless it is `cpu`.
        has_addresses: whether a value may be a view into another value's memory.
        basic_ops: whether it lacks the op Attention, and float16 on some devices.
        plugin: whether its library is a module of its package, to be registered with onnxruntime.
        library: library from further packages without which it has no convolutions.
        cpu_roles: graphs that run on the CPU, once per image, because the provider lacks some of their ops.
        rounds_to_bfloat16: whether it rounds to bfloat16, which images tolerate and sampled tokens do not.
        recording: additional options for recording passes as graphs; empty if it cannot record.
        max_recordings: maximum number of recordings per graph.
    """

    name: str
    execution_provider: str
    package: str
    options: dict[str, str]
    memory: str = "cpu"
    has_addresses: bool = True
    basic_ops: bool = False
    plugin: bool = False
    library: str = ""
    cpu_roles: tuple[str, ...] = ()
    rounds_to_bfloat16: bool = False
    recording: Mapping[str, str] = MappingProxyType({})
    max_recordings: int = 0


# Each thread's own default stream (`cudaStreamPerThread`): what a thread asks of any session is done in that order, so
# that only reading waits. Whoever holds the `turn` leaves nothing undone to the next thread.
CUDA_STREAM = 2
_ALL = (
    Provider(DEFAULT_PROVIDER, "CPUExecutionProvider", "onnxruntime", {}),
    Provider(
        "cuda",
        "CUDAExecutionProvider",
        "onnxruntime-gpu[cuda,cudnn]",
        {
            "use_tf32": "0",  # float32 stays float32: TF32 products would not be those of another number of nodes
            "arena_extend_strategy": "kSameAsRequested",  # else what is taken doubles every time
            "cudnn_conv_algo_search": "HEURISTIC",  # else the first picture waits until every algorithm has been timed
            "user_compute_stream": str(CUDA_STREAM),
        },
        memory="cuda",
        library="cuDNN",
        recording={"enable_cuda_graph": "1"},
        max_recordings=512,  # ONNX Runtime keeps them until the process ends
    ),
    Provider(
        "webgpu",
        "WebGpuExecutionProvider",
        "onnxruntime-ep-webgpu",
        {},
        memory="gpu",
        has_addresses=False,
        basic_ops=True,
        plugin=True,
        cpu_roles=("condition",),
        recording={"enableGraphCapture": "1"},
        max_recordings=1 << 31,
    ),
    Provider(
        "openvino",
        "OpenVINOExecutionProvider",
        "onnxruntime-ep-openvino",
        {"load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'},  # else bfloat16, where the CPU has it
        plugin=True,
    ),
    Provider(
        "openvino-bf16",
        "OpenVINOExecutionProvider",
        "onnxruntime-ep-openvino",
        {"load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "bf16"}}'},  # float32 where the CPU has no bfloat16
        plugin=True,
        rounds_to_bfloat16=True,
    ),
)
PROVIDERS = {provider.name: provider for provider in _ALL}
DEVICE_LOCKS = {name: threading.RLock() for name in PROVIDERS}
IMAGE_DECODER = "vq_decoder"
_SEPARATE_ROLES = ("drafter", "condition", IMAGE_DECODER)  # graphs that may run elsewhere than the target


class Providers(NamedTuple):
    """Names of providers: `by_graph` for single graphs, `main` for all others."""

    main: str = AUTO
    by_graph: Mapping[str, str] = MappingProxyType({})

    def of(self, role: str) -> str:
        """The provider that a user wants a graph to run on."""
        return self.by_graph.get(role, self.main)

    def __str__(self) -> str:
        """As `parse` takes it."""
        return ",".join([self.main, *(f"{role}={name}" for role, name in self.by_graph.items())])

    @classmethod
    def parse(cls, names: str | Sequence[str]) -> Providers:
        """Providers from `NAME` for all graphs and `GRAPH=NAME` for one, joined by commas or one by one.

        Raises: EngineError: a name is unknown or given twice, or a graph cannot have the provider.
        """
        by_graph: dict[str, str] = {}
        for one in names.split(",") if isinstance(names, str) else names:
            role, named, name = one.strip().rpartition("=")
            if named and role not in _SEPARATE_ROLES:
                remedy = "all others run on one provider, NAME"
                raise _provider_error(
                    found=f"graph {format_value(role)}", expected=" or ".join(_SEPARATE_ROLES), remedy=remedy
                )
            if role in by_graph:
                raise _provider_error(found=f"{by_graph[role]} and {name} for {role or 'all graphs'}", expected="one")
            if (named or name != AUTO) and _known_provider(name).rounds_to_bfloat16 and role != IMAGE_DECODER:
                remedy = f"give it to the image decoder alone, {IMAGE_DECODER}={name}"
                raise _provider_error(
                    f"{name} rounds to bfloat16", found=f"it for {role or 'all graphs'}", remedy=remedy
                )
            by_graph[role] = name
        return cls(by_graph.pop("", AUTO), by_graph)


ON_CPU = Providers(DEFAULT_PROVIDER)


def _provider_error(problem: str = "", **fields: str) -> EngineError:
    return EngineError(problem, field="provider", **fields)


_registered: set[tuple[Any, str]] = set()  # onnxruntime modules, each with a plugin's module registered in it
_lock = threading.Lock()


def find_provider(name: str, runtime: Any) -> Provider:
    """The provider of a name. Raises: EngineError unless this `runtime` (the onnxruntime module) has it."""
    provider = _known_provider(name)
    if provider.plugin and not plugin_devices(provider, runtime):
        problem = "ONNX Runtime finds no device that it runs on"
        raise EngineError(problem, field=f"provider {name}", remedy="install its driver")
    if not provider.plugin and provider.execution_provider not in runtime.get_available_providers():
        raise EngineError(
            field=f"provider {name}",
            found=f"onnxruntime {runtime.__version__} with {', '.join(runtime.get_available_providers())}",
            expected=provider.execution_provider,
            remedy=f"install {provider.package} instead of the onnxruntime you have",
        )
    return provider


def detect_provider(runtime: Any) -> str:
    """The provider of the first GPU that is found and has its package, else the CPU's. Raises: as `plugin_devices`."""
    for provider in _ALL:
        here = provider.memory != "cpu" and installed(provider.package.partition("[")[0])
        if here and (plugin_devices(provider, runtime) if provider.plugin else find_gpu()):
            return provider.name
    return DEFAULT_PROVIDER


def _known_provider(name: str) -> Provider:
    if (provider := PROVIDERS.get(name)) is None:
        raise _provider_error(found=format_value(name), expected=f"one of {', '.join([AUTO, *PROVIDERS])}")
    return provider


def plugin_devices(provider: Provider, runtime: Any) -> list[Any]:
    """The devices of a plugin, registered before. Raises: EngineError: it is not installed, or does not load."""
    field, module = f"provider {provider.name}", provider.package.replace("-", "_")
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
            problem = f"onnxruntime {runtime.__version__} cannot load its library ({format_error(error, 200)})"
            remedy = f"check the device's driver, or update onnxruntime and {provider.package}"
            raise EngineError(problem, field=field, remedy=remedy) from error
    return [one for one in runtime.get_ep_devices() if one.ep_name == provider.execution_provider]


def device_lock(provider: str) -> AbstractContextManager[object]:
    """Wait until this thread may use a provider's device; nobody waits where values are the host's.

    While CUDA records a pass, it fails whatever else takes memory.
    """
    return nullcontext() if PROVIDERS[provider].memory == "cpu" else DEVICE_LOCKS[provider]


def check_assignment(where: object, provider: Provider, session: Any) -> None:
    """Raises: EngineError unless `provider` runs the graph: present, and every node but shape arithmetic its own."""
    remedy = f"use provider {DEFAULT_PROVIDER}, or check its driver (`lantern-rt doctor`) and update {provider.package}"
    if provider.execution_provider not in session.get_providers():
        problem = f"provider {provider.name} did not load"
        raise EngineError(problem, field=str(where), found=", ".join(session.get_providers()), remedy=remedy)
    if provider.name == DEFAULT_PROVIDER:
        return
    left = Counter(
        node.op_type
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name != provider.execution_provider
        for node in part.get_nodes()
        if node.op_type not in _ON_CPU
    )
    if left:
        ops = ", ".join(f"{count} {op}" for op, count in left.most_common(5))
        problem = f"provider {provider.name} does not take {left.total()} nodes of this graph ({ops})"
        raise EngineError(problem, field=str(where), remedy=remedy)
