"""ONNX Runtime's execution providers by the names users give them, and whether one really took a graph.

ONNX Runtime falls back silently: to the CPU when a provider's libraries do not load, node by node when it
lacks a kernel. Here the provider asked for takes the whole graph, or loading stops and says what it left.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from ...errors import EngineError

# Nodes on shapes and indices, which providers leave on the CPU on purpose: a few numbers, needed on the host.
_SHAPE_OPS = {"Shape", "Size", "Constant", "Concat", "Gather", "Slice", "Squeeze", "Unsqueeze", "Cast"}
_COPIES = {"MemcpyToHost", "MemcpyFromHost"}
_CPU = "CPUExecutionProvider"


class Provider(NamedTuple):
    """A provider: ONNX Runtime's name for it, the package that has it, and its options."""

    name: str
    execution_provider: str
    package: str
    options: dict[str, str]


_ALL = (
    Provider("cpu", _CPU, "onnxruntime", {}),
    # Float32 stays float32: TF32 products would not be those of another number of nodes.
    Provider("cuda", "CUDAExecutionProvider", "onnxruntime-gpu", {"use_tf32": "0"}),
    Provider("openvino", "OpenVINOExecutionProvider", "onnxruntime-openvino", {}),
    Provider("coreml", "CoreMLExecutionProvider", "onnxruntime (on macOS)", {}),
    Provider("directml", "DmlExecutionProvider", "onnxruntime-directml", {}),
)
PROVIDERS = {provider.name: provider for provider in _ALL}


def find_provider(name: str, runtime: Any) -> Provider:
    """The provider of a name. Raises: EngineError unless this `runtime` (the onnxruntime module) has it."""
    if name not in PROVIDERS:
        raise EngineError(f"provider: found {name!r}, expected one of {', '.join(PROVIDERS)}")
    provider = PROVIDERS[name]
    available = runtime.get_available_providers()
    if provider.execution_provider not in available:
        raise EngineError(
            f"provider {name}: onnxruntime {runtime.__version__} has no {provider.execution_provider}, "
            f"found {', '.join(available)}; install {provider.package} instead of the onnxruntime you have"
        )
    return provider


def check_taken(where: object, provider: Provider, session: Any) -> None:
    """Raises: EngineError unless `provider` runs the graph: present, and every node but shape arithmetic its own."""
    if provider.execution_provider not in (present := session.get_providers()):
        raise EngineError(
            f"{where}: provider {provider.name} did not load, ONNX Runtime fell back to {', '.join(present)}; "
            f"check its driver and libraries, or ask for provider cpu"
        )
    if provider.name == "cpu":
        return
    if not hasattr(session, "get_provider_graph_assignment_info"):
        raise EngineError(
            f"{where}: this onnxruntime cannot say which nodes provider {provider.name} takes, expected 1.24 or newer; "
            f"update {provider.package}"
        )
    left = Counter(
        node.op_type
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name != provider.execution_provider
        for node in part.get_nodes()
        if node.op_type not in _SHAPE_OPS | _COPIES
    )
    if left:
        ops = ", ".join(f"{count} {op}" for op, count in left.most_common(5))
        raise EngineError(
            f"{where}: provider {provider.name} does not take {left.total()} nodes of this graph ({ops}); "
            f"ask for provider cpu, or update onnxruntime"
        )
