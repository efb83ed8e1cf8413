"""ONNX Runtime's execution providers by the names users give them, and whether one really took a graph.

ONNX Runtime falls back silently: to the CPU when a provider's libraries do not load, node by node when it lacks a
kernel. Here the provider asked for takes the whole graph, or loading stops.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stdout
from types import MappingProxyType
from typing import Any, NamedTuple

from ...errors import EngineError

# Copies, and nodes on shapes and indices, which providers leave on the CPU on purpose: a few numbers, needed there.
_SHAPE_OPS = {"Shape", "Size", "Constant", "Concat", "Gather", "Slice", "Squeeze", "Unsqueeze", "Cast"}
_ON_CPU = _SHAPE_OPS | {"MemcpyToHost", "MemcpyFromHost"}


class Provider(NamedTuple):
    """A provider: ONNX Runtime's name for it, the package that has it, its options, where its memory is.

    recording: further options with which it records passes as graphs; none: it cannot.
    """

    name: str
    execution_provider: str
    package: str
    options: dict[str, str]
    device: str = "cpu"
    recording: Mapping[str, str] = MappingProxyType({})


_ALL = (
    Provider("cpu", "CPUExecutionProvider", "onnxruntime", {}),
    # Float32 stays float32: TF32 products would not be those of another number of nodes.
    Provider(
        "cuda",
        "CUDAExecutionProvider",
        "onnxruntime-gpu[cuda,cudnn]",
        {"use_tf32": "0"},
        "cuda",
        {"enable_cuda_graph": "1"},
    ),
    Provider("openvino", "OpenVINOExecutionProvider", "onnxruntime-openvino", {}),
    Provider("coreml", "CoreMLExecutionProvider", "onnxruntime (on macOS)", {}),
    Provider("directml", "DmlExecutionProvider", "onnxruntime-directml", {}),
)
PROVIDERS = {provider.name: provider for provider in _ALL}


def find_provider(name: str, runtime: Any) -> Provider:
    """The provider of a name. Raises: EngineError unless this `runtime` (the onnxruntime module) has it."""
    if (provider := PROVIDERS.get(name)) is None:
        raise EngineError(f"provider: found {name!r}, expected one of {', '.join(PROVIDERS)}")
    if provider.execution_provider not in (available := runtime.get_available_providers()):
        found = f"onnxruntime {runtime.__version__} has no {provider.execution_provider}, found {', '.join(available)}"
        cure = f"install {provider.package} instead of the onnxruntime you have"
        raise EngineError(f"provider {name}: {found}; {cure}")
    return provider


def preload(provider: Provider, runtime: Any) -> None:
    """Load the libraries that a provider needs and does not find by itself.

    CUDA's and cuDNN's come as packages whose folders no loader searches. What is missing shows when the provider loads.
    """
    if provider.name == "cuda":
        with redirect_stdout(io.StringIO()):
            runtime.preload_dlls()


def check_taken(where: object, provider: Provider, session: Any) -> None:
    """Raises: EngineError unless `provider` runs the graph: present, and every node but shape arithmetic its own."""
    if provider.execution_provider not in (present := session.get_providers()):
        found = f"provider {provider.name} did not load, ONNX Runtime fell back to {', '.join(present)}"
        cure = f"check its driver, install {provider.package}, or ask for provider cpu"
        raise EngineError(f"{where}: {found}; {cure}")
    if provider.name == "cpu":
        return
    if not hasattr(session, "get_provider_graph_assignment_info"):
        found = f"this onnxruntime cannot say which nodes provider {provider.name} takes"
        raise EngineError(f"{where}: {found}, expected 1.24 or newer; update {provider.package}")
    left = Counter(
        node.op_type
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name != provider.execution_provider
        for node in part.get_nodes()
        if node.op_type not in _ON_CPU
    )
    if left:
        ops = ", ".join(f"{count} {op}" for op, count in left.most_common(5))
        found = f"provider {provider.name} does not take {left.total()} nodes of this graph ({ops})"
        raise EngineError(f"{where}: {found}; ask for provider cpu, or update onnxruntime")
