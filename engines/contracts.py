"""What a backend is, and the backends by name.

A backend turns a bundle's graphs into files that one library runs fast (`build`), says whether this host can
run such files (`check_host`), and makes them callable (`open`). The decode loop sees none of it: it gets
engines of `runtime/engine.py`.

Does not know any backend's library; a backend's module is imported when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..bundle.files import Bundle
from ..bundle.manifest import DecoderSpec, DrafterSpec
from ..checks import whole
from ..errors import RequestError
from ..runtime.engine import Engine, Floats
from .ort.session import Array, Tensor, ThreadOptions

if TYPE_CHECKING:
    from .engine_folder import EngineFolder, EngineManifest
    from .profiles import BuildOptions, Profile

# What is being done, and how far it has come: steps done, steps in all.
Progress = Callable[[str, int, int], None]


class Function(Protocol):
    """A graph that is one call: the condition graph, the image decoder."""

    def run(self, feeds: Mapping[str, Array]) -> Sequence[Array]:
        """The outputs, in the order in which they were declared."""
        ...


class Graphs(Protocol):
    """A bundle's graphs, made runnable."""

    def decoder(self, role: str, spec: DecoderSpec | DrafterSpec, code_embeddings: Floats | None) -> Engine:
        """The target (with its table of code embeddings) or the drafter (without) as an engine."""
        ...

    def function(self, role: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Function:
        """Another graph, checked to have these inputs and outputs."""
        ...


@dataclass(frozen=True)
class PlanOptions:
    """What a user may say about running TensorRT's plans.

    cuda_graphs: record passes that recur, and launch each as a whole. weight_budget: bytes of the target's weights that
    stay on the device, if the plan was built with weight streaming; None is all.
    """

    cuda_graphs: bool = False
    weight_budget: int | None = None

    def __post_init__(self) -> None:
        if self.weight_budget is None:
            return
        whole("weight-budget", self.weight_budget, 0, 0, 1 << 50)
        if self.cuda_graphs:
            raise RequestError(
                "weight-budget: found with cuda-graphs, but a pass that streams weights is no CUDA graph; leave one out"
            )


@dataclass(frozen=True)
class Built:
    """Files written for one graph, the one to load first, and the seconds it took."""

    files: tuple[Path, ...]
    seconds: float


class Backend(Protocol):
    """One library that runs graphs."""

    name: str
    roles: tuple[str, ...]  # the graphs it builds; ONNX Runtime runs the others from the bundle
    shaped: bool  # whether engines are made for ranges of shapes

    def version(self) -> str:
        """The installed library's version; EngineError with the command that installs it."""
        ...

    def check_options(self, options: BuildOptions) -> None:
        """Raise RequestError on an option that this backend does not have or take."""
        ...

    def build(
        self, bundle: Bundle, role: str, profiles: Sequence[Profile], options: BuildOptions, folder: Path, say: Progress
    ) -> Built:
        """Write what runs the graph of a role into `folder`."""
        ...

    def compute_capabilities(self, options: BuildOptions) -> tuple[str, ...]:
        """The GPUs that engines built with these options run on; none for CPU engines."""
        ...

    def driver(self) -> str | None:
        """The version of the device driver here, None without one."""
        ...

    def check_host(self, manifest: EngineManifest, where: str, rebuild: str) -> None:
        """Raise EngineError if engines with this record do not run on this host."""
        ...

    def open(self, bundle: Bundle, folder: EngineFolder, threads: ThreadOptions, options: PlanOptions) -> Graphs:
        """The built graphs, and the bundle's own for roles that were not built."""
        ...


BACKENDS = ("onnxruntime", "tensorrt", "tensorrt-rtx")


def find_backend(name: str) -> Backend:
    """The backend of a name; RequestError if there is none. Its library need not be installed."""
    if name == "onnxruntime":
        from .ort.backend import OrtBackend

        return OrtBackend()
    if name in BACKENDS:
        from .trt.backend import TensorRTBackend

        return TensorRTBackend(name)
    raise RequestError(f"backend: found {name!r}, expected one of {', '.join(BACKENDS)}")
