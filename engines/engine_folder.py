"""The folder of built engines: `engine.json`, and the files it lists, checked before any is loaded.

Engines are code for one version of one library on one kind of processor; `engine.json` records what they were built
from, by and for, and the command that builds them again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from ..bundle.files import Bundle
from ..bundle.manifest import Part
from ..checks import brief, explain, short
from ..errors import EngineError
from ..user_files import read_plain_file, reading
from .ort.providers import DEFAULT_PROVIDER
from .profiles import Profile

ENGINE_FILE, KIND = "engine.json", "engine folder"
FORMAT_VERSION = "2.0"
_LIMIT = 1 << 20  # bytes of engine.json; it has a few thousand
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class PlanFile(Part):
    """A file of the folder, by its plain name.

    blake2b: its 32-byte BLAKE2b hash. Hashing is most of what loading an engine takes, and on processors without
    instructions for SHA-256 this goes 1.8 times as fast.
    """

    path: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
    blake2b: Hash
    bytes: Annotated[int, Field(ge=0, le=2**50)]

    @classmethod
    def of(cls, path: Path) -> PlanFile:
        """The record of a file that is there."""
        return cls(path=path.name, blake2b=_hash(path), bytes=path.stat().st_size)


class BuiltGraph(Part):
    """One graph: the bundle's files it was built from, the files to load (the first one names the others)."""

    onnx_sha256: dict[str, Hash]
    files: Annotated[tuple[PlanFile, ...], Field(min_length=1)]
    profiles: tuple[Profile, ...] = ()
    seconds: float


class EngineManifest(Part):
    """The whole of `engine.json`.

    processor: what the CPU must offer; for GPU engines that of the building host. compute_capabilities: GPUs the
    engines run on. driver: at build. settings: what the builder was told. command: to build again, without `--output`.
    """

    format_version: str
    backend: str
    provider: str | None
    builder: str
    builder_version: str
    processor: str
    compute_capabilities: tuple[str, ...]
    driver: str | None
    precision: str
    settings: dict[str, str]
    bundle: str
    bundle_sha256: Hash
    command: tuple[str, ...]
    built: str
    seconds: float
    graphs: dict[str, BuiltGraph]


@dataclass(frozen=True)
class EngineFolder:
    """An engine folder whose `engine.json` has been read, by `open_engine_folder`."""

    folder: Path
    manifest: EngineManifest

    @property
    def rebuild(self) -> str:
        """The command that builds these engines again."""
        return shlex.join([*self.manifest.command, "--output", str(self.folder), "--force"])

    def other(self, found: str, expected: str, path: Path | None = None) -> EngineError:
        """The error for engines that are others than expected."""
        return EngineError(f"{path or self.folder}: found {found}, expected {expected}; rebuild with `{self.rebuild}`")

    @property
    def on_cpu(self) -> bool:
        """Whether the engines run on the CPU, in ONNX Runtime."""
        return self.manifest.backend == "onnxruntime" and self.manifest.provider in (None, DEFAULT_PROVIDER)

    def bytes_of_graphs(self) -> dict[str, int]:
        """Of every graph, by role, the bytes of its files: most are weights, stored as ONNX Runtime keeps them."""
        return {role: sum(file.bytes for file in graph.files) for role, graph in self.manifest.graphs.items()}

    def replaced(self) -> frozenset[str]:
        """The bundle's files, by role, that are not read because an engine stands for them."""
        return frozenset(role for graph in self.manifest.graphs.values() for role in graph.onnx_sha256)

    def check_bundle(self, bundle: Bundle) -> None:
        """Raises: EngineError unless these engines were built from this very bundle."""
        if (built_from := self.manifest.bundle_sha256) != bundle.digest:
            found = f"engines of bundle {self.manifest.bundle} {built_from[:12]}..."
            raise self.other(found, f"{bundle.manifest.name} {bundle.digest[:12]}...")
        sources = {role: f"{entry.sha256[:12]}..., the bundle's" for role, entry in bundle.manifest.files.items()}
        for name, graph in self.manifest.graphs.items():
            for role, sha256 in graph.onnx_sha256.items():
                if role not in sources or bundle.manifest.files[role].sha256 != sha256:
                    found = f"engine `{name}` built from {role} {sha256[:12]}..."
                    raise self.other(found, sources.get(role, "none in the bundle"))

    def check_files(self) -> None:
        """Reads every file. Raises: EngineError on one that is missing or is not the one that was built."""
        entries = [entry for graph in self.manifest.graphs.values() for entry in graph.files]
        with ThreadPoolExecutor(4) as pool:  # hashing lets other threads run
            list(pool.map(self._check_file, sorted(entries, key=lambda entry: -entry.bytes)))

    def path(self, role: str) -> Path:
        """The file to load for a role that was built."""
        return self.folder / self.manifest.graphs[role].files[0].path

    def _check_file(self, entry: PlanFile) -> None:
        path = self.folder / entry.path
        try:
            if not path.is_file() or path.is_symlink():
                raise self.other("no file", "an engine", path)
            found = _hash(path)
        except OSError as error:
            raise EngineError(f"{path}: cannot be read ({brief(error)})") from error
        if found != entry.blake2b:
            expected = f"{entry.blake2b[:12]}...; engines are code and an altered one is not run"
            raise self.other(f"hash {found[:12]}...", expected, path)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def is_engine_folder(path: str | Path) -> bool:
    """Whether a path looks like an engine folder."""
    return os.path.isfile(os.path.join(path, ENGINE_FILE))  # False for what is no path at all, too


def open_engine_folder(path: str | Path) -> EngineFolder:
    """Read and check `engine.json`; its files are checked when loaded. Raises: EngineError."""
    file = Path(path) / ENGINE_FILE
    try:
        text = read_plain_file(file, _LIMIT)
    except FileNotFoundError as error:
        cure = "an engine folder is written by `lantern-rt build-engine`"
        raise EngineError(f"{path}: no {ENGINE_FILE} in it; {cure}") from error
    except (OSError, ValueError) as error:
        raise EngineError(f"{file}: cannot be read ({brief(error)}); expected a short JSON text") from error
    with reading(file, "JSON", EngineError, "build the engines again"):
        data = json.loads(text)
    version = data.get("format_version") if isinstance(data, dict) else None
    if not isinstance(version, str) or version.partition(".")[0] != FORMAT_VERSION.partition(".")[0]:
        words, cure = data.get("command") if isinstance(data, dict) else None, "build the engines again"
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            cure = f"rebuild with `{shlex.join([*words, '--output', str(path), '--force'])}`"
        reads = f"this lantern-rt reads {FORMAT_VERSION}"
        raise EngineError(f"{file}: found engine format {short(version)}, {reads}; {cure}")
    try:
        manifest = EngineManifest.model_validate_json(text, strict=True)
    except ValidationError as error:
        field, problem = explain(error)
        raise EngineError(f"{file}: field `{field}`: {problem}; build the engines again") from error
    return EngineFolder(Path(path).resolve(), manifest)
