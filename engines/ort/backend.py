"""ONNX Runtime as a backend: graphs rewritten once for this processor, saved, and loaded as they are.

ONNX Runtime rewrites a graph whenever it loads one: folds constants, fuses ops, picks layouts. Saving the result
makes loading faster and changes nothing that is computed.

Does not know the decode loop, nor what `engine.json` must say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...bundle.files import Bundle
from ...bundle.manifest import DecoderSpec, DrafterSpec
from ...bundle.onnx_scan import external_locations
from ...errors import EngineError, RequestError
from ...runtime.engine import Engine, Floats
from ..contracts import Built, Function, PlanOptions, Progress
from ..engine_folder import EngineFolder, EngineManifest
from ..host import processor
from ..profiles import BuildOptions, Profile
from .device import OrtDeviceEngine
from .engine import OrtEngine
from .session import GraphSession, Tensor, ThreadOptions, import_onnxruntime, save_optimised


class OrtGraphs:
    """Graphs in ONNX Runtime. `locate` gives a role's file, and whether it has been optimised already."""

    def __init__(self, locate: Callable[[str], tuple[Path, bool]], threads: ThreadOptions, provider: str) -> None:
        self._locate, self._threads, self._provider = locate, threads, provider

    def decoder(self, role: str, spec: DecoderSpec | DrafterSpec, code_embeddings: Floats | None) -> Engine:
        """The target or the drafter as an engine."""
        path, optimised = self._locate(role)
        engine = OrtDeviceEngine if self._provider == "cuda" else OrtEngine
        return engine(path, spec, code_embeddings, self._threads, self._provider, optimised)

    def function(self, role: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Function:
        """Another graph."""
        path, optimised = self._locate(role)
        return GraphSession(path, inputs, outputs, self._threads, self._provider, optimised)


class OrtBackend:
    """Builds and opens graphs with ONNX Runtime."""

    name = "onnxruntime"
    roles: tuple[str, ...] = ("target", "drafter", "condition", "vq_decoder")
    shaped = False

    def version(self) -> str:
        """Of the installed onnxruntime."""
        return str(import_onnxruntime().__version__)

    def compute_capabilities(self, options: BuildOptions) -> tuple[str, ...]:
        """None: a provider finds its device when it loads."""
        return ()

    def driver(self) -> str | None:
        """None: ONNX Runtime does not say."""
        return None

    def check_options(self, options: BuildOptions) -> None:
        """Shapes are free and precision is the graph's, so nothing but the provider can be chosen."""
        given = {
            "optimization-level": options.optimization_level is not None,
            "workspace": options.workspace is not None,
            "timing-cache": options.timing_cache is not None,
            "compute-capability": bool(options.compute_capabilities),
            "hardware-compatible": options.hardware_compatible,
            "weight-streaming": options.weight_streaming,
            "refit": options.refit,
        }
        if wrong := [name for name, is_given in given.items() if is_given]:
            raise RequestError(f"--{wrong[0]}: goes with backend tensorrt or tensorrt-rtx, found onnxruntime")

    def build(
        self, bundle: Bundle, role: str, profiles: Sequence[Profile], options: BuildOptions, folder: Path, say: Progress
    ) -> Built:
        """Save the optimised graph; it takes every shape, so profiles are not used."""
        began = time.perf_counter()
        say(f"optimising {role}", 0, 1)
        files = save_optimised(bundle.path(role), options.provider, folder / f"{role}.onnx")
        say(f"optimising {role}", 1, 1)
        return Built(tuple(files), time.perf_counter() - began)

    def check_host(self, manifest: EngineManifest, where: str, rebuild: str) -> None:
        """The processor must offer what the building one did: the graph was rewritten for it."""
        if manifest.processor != (here := processor()):
            raise EngineError(
                f"{where}: found engines for the processor {manifest.processor}, expected {here}; "
                f"rebuild with `{rebuild}`"
            )

    def open(self, bundle: Bundle, folder: EngineFolder, threads: ThreadOptions, options: PlanOptions) -> OrtGraphs:
        """The saved graphs."""
        refuse_plan_options(options, folder.manifest.provider or "cpu")

        def locate(role: str) -> tuple[Path, bool]:
            if role not in folder.manifest.graphs:
                return bundle.path(role), False
            path = folder.path(role)
            listed = {file.path for file in folder.manifest.graphs[role].files}
            if other := sorted(external_locations(path) - listed):
                raise EngineError(
                    f"{path}: the graph reads the file {other[0]!r}, expected one that engine.json lists; "
                    f"rebuild with `{folder.rebuild}`"
                )
            return path, True

        return OrtGraphs(locate, threads, folder.manifest.provider or "cpu")


def refuse_plan_options(options: PlanOptions, provider: str) -> None:
    """Raise EngineError on an option that only plans have."""
    for name, given in (("cuda-graphs", options.cuda_graphs), ("weight-budget", options.weight_budget is not None)):
        if given:
            raise EngineError(
                f"{name}: found ONNX Runtime with provider {provider}, expected an engine folder of tensorrt or "
                f"tensorrt-rtx; leave {name} out"
            )
