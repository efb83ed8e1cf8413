"""ONNX Runtime as a backend: graphs rewritten once for this processor, saved, and loaded as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...bundle.files import Bundle
from ...bundle.manifest import DecoderSpec, DrafterSpec
from ...bundle.onnx_scan import external_locations
from ...checks import short
from ...errors import EngineError
from ...runtime.engine import Engine, Floats
from ...user_files import reading
from ..contracts import Function, Progress, Tensor
from ..engine_folder import EngineFolder
from ..host import import_onnxruntime, processor
from ..profiles import BuildOptions, Profile
from .device import Device
from .engine import OrtDeviceEngine, OrtEngine
from .providers import DEFAULT_PROVIDER, PROVIDERS, Providers, find_provider
from .session import GraphSession, check_convolutions, save_optimised


class OrtGraphs:
    """A bundle's graphs in ONNX Runtime; those that an engine folder has are loaded from there.

    expand_weights: the target's, if integers, become float32. A drafter's are left: it decides about speed only.
    """

    def __init__(
        self, bundle: Bundle, folder: EngineFolder | None, threads: int, asked: Providers, expand_weights: bool = False
    ) -> None:
        self._bundle, self._folder, self._threads = bundle, folder, threads
        self._expand_weights = expand_weights
        self._asked, self._provider = asked, find_provider(asked.main, import_onnxruntime())
        for provider in {asked.main, *asked.own.values()}:
            if find_provider(provider, import_onnxruntime()).library:
                check_convolutions(provider)
        self._device = Device(asked.main) if self._provider.resident else None

    def decoder(self, role: str, spec: DecoderSpec | DrafterSpec, code_embeddings: Floats | None) -> Engine:
        """The target (with its table of code embeddings) or the drafter (without) as an engine."""
        if self._device is not None:
            return OrtDeviceEngine(self._bundle.path(role), spec, code_embeddings, self._threads, self._device)
        (path, optimised), expand_weights = self._locate(role), self._expand_weights and role == "target"
        return OrtEngine(path, spec, code_embeddings, self._threads, self._provider.name, optimised, expand_weights)

    def function(
        self, role: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], threads: int | None = None
    ) -> Function:
        """Another graph (condition, image decoder), checked to have these inputs and outputs; threads: of its own."""
        path, optimised = self._locate(role)
        provider = self._asked.of(role)
        if role in PROVIDERS[provider].leaves:
            provider = DEFAULT_PROVIDER
        return GraphSession(path, inputs, outputs, threads or self._threads, provider, optimised).run_checked

    def _locate(self, role: str) -> tuple[Path, bool]:
        """The file of a role, and whether it has been optimised already."""
        folder = self._folder
        if folder is None or role not in folder.manifest.graphs:
            return self._bundle.path(role), False
        path, listed = folder.path(role), {file.path for file in folder.manifest.graphs[role].files}
        with reading(path, "an ONNX graph", EngineError, f"rebuild with `{folder.rebuild}`"):
            elsewhere = sorted(external_locations(path, prepacked=True) - listed)
        if elsewhere:
            raise folder.other(f"a graph that reads the file {short(elsewhere[0])}", "one that engine.json lists", path)
        return path, True


class OrtBackend:
    """Builds and opens graphs with ONNX Runtime; shapes are free, and precision is the graph's."""

    roles: tuple[str, ...] = ("target", "drafter", "condition", "vq_decoder")  # the graphs it builds
    shaped = False  # whether engines are made for ranges of shapes

    def __init__(self, name: str = "onnxruntime") -> None:
        self.name = name

    def version(self) -> str:
        """The installed library's version. Raises: EngineError with the command that installs it."""
        return str(import_onnxruntime().__version__)

    def compute_capabilities(self, options: BuildOptions) -> tuple[str, ...]:
        """The GPUs that engines built with these options run on: none in particular."""
        return ()

    def driver(self) -> str | None:
        """The version of the device driver here, for `engine.json`: ONNX Runtime does not say."""
        return None

    def build(
        self, bundle: Bundle, role: str, profiles: Sequence[Profile], options: BuildOptions, folder: Path, say: Progress
    ) -> list[Path]:
        """Write the optimised graph of a role into `folder`; returns the files, the one to load first.

        None for decoders of providers that run them in the device layout, which is made when a bundle is loaded.
        """
        if find_provider(options.provider, import_onnxruntime()).resident and role in ("target", "drafter"):
            return []
        say(f"optimising {role}", 0, 1)
        files = save_optimised(bundle.path(role), options.provider, folder / f"{role}.onnx")
        say(f"optimising {role}", 1, 1)
        return files

    def check_host(self, folder: EngineFolder) -> None:
        """Raises: EngineError unless the processor offers what the building one did: graphs were rewritten for it."""
        if (built_for := folder.manifest.processor) != (here := processor()):
            raise folder.other(f"engines for the processor {built_for}", here)

    def open(self, bundle: Bundle, folder: EngineFolder, threads: int) -> OrtGraphs:
        """The built graphs, and the bundle's own for roles that were not built."""
        return OrtGraphs(bundle, folder, threads, Providers(folder.manifest.provider or DEFAULT_PROVIDER))
