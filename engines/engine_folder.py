"""Engine folders: the file `engine.json` and the TensorRT engines that it lists, checked before an engine is loaded.

A TensorRT engine is code for one version of TensorRT or TensorRT-RTX and for certain GPUs. `engine.json` records the
bundle, the library version and the GPUs that the engines were built for, and the command that rebuilds the engines.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from ..bundle.files import Bundle
from ..errors import EngineError
from ..inputs import convert_read_errors, describe_validation_error, format_error, format_value, read_regular_file
from ..methods import FrozenModel
from .profiles import BACKENDS, ShapeProfile

ENGINE_FILE = "engine.json"
FORMAT_VERSION = "5.0"
_MAX_JSON_BYTES = 1 << 20  # maximum size of engine.json, far above the usual few thousand bytes
_BUILD_AGAIN = "build the engines again"
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# Pattern of `EngineManifest.command`, with arguments separated by NUL. Error messages recommend the command, so a
# malicious engine.json must not choose the program to run or the path that it writes to.
_COMMAND_PATTERN = (
    r"lantern-rt\0build-engine\0[^\0-][^\0]*(\0--(backend|max-rows|max-nodes|compute-capability)\0\w[\w-]*)*"
)


class BuiltEngine(FrozenModel):
    """TensorRT engine of one graph."""

    # File name of the engine in the engine folder.
    path: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
    # 32-byte BLAKE2b hash of the engine, in hexadecimal digits. Hashing takes most of the loading time. BLAKE2b is 1.8
    # times as fast as SHA-256 on processors without instructions for SHA-256.
    blake2b: Hash
    bytes: Annotated[int, Field(ge=0, le=2**50)]  # size of the engine in bytes
    onnx: Hash  # BLAKE2b hash of `<role>.onnx` in the same folder, the graph that the engine was built from
    profiles: Annotated[tuple[ShapeProfile, ...], Field(min_length=1)]  # ranges of shapes that the engine accepts
    seconds: float  # build time in seconds


class EngineManifest(FrozenModel):
    """Contents of `engine.json`."""

    format_version: str  # version of the format of engine folders, `FORMAT_VERSION`
    # Library that runs the engines, `tensorrt` or `tensorrt-rtx`.
    backend: Annotated[str, Field(pattern=f"^({'|'.join(BACKENDS)})$")]
    builder_version: str  # version of the library that built the engines
    compute_capabilities: tuple[str, ...]  # compute capabilities of the GPUs that can run the engines, such as `SM89`
    # Name of the only GPU model that can run the engines; None: any GPU with a listed compute capability.
    gpu: str | None
    precision: str
    bundle: str
    bundle_sha256: Hash
    command: tuple[str, ...]  # arguments of the command that rebuilds the folder, without `--output`
    built: str  # time of the build, in ISO 8601
    graphs: dict[str, BuiltEngine]  # engines by role of the graph, such as `target`


@dataclass(frozen=True)
class EngineFolder:
    """Engine folder whose `engine.json` has been read by `open_engine_folder`."""

    folder: Path
    manifest: EngineManifest

    @property
    def rebuild_command(self) -> str:
        """Shell command that builds the engines again and replaces this folder."""
        return shlex.join([*self.manifest.command, "--output", str(self.folder), "--force"])

    def make_mismatch_error(self, actual: str, expected: str, path: Path | None = None) -> EngineError:
        remedy = f"rebuild with `{self.rebuild_command}`"
        return EngineError(field=str(path or self.folder), found=actual, expected=expected, remedy=remedy)

    def list_replaced_files(self) -> frozenset[str]:
        """Return the roles of the bundle's files that are not needed, as TensorRT engines replace them."""
        return frozenset(name for role in self.manifest.graphs for name in (role, f"{role}.data"))

    def check_compatibility(self, bundle: Bundle, library_version: str) -> None:
        """Raise EngineError if bundle or library differ from those of the build, or a file is missing or altered."""
        manifest = self.manifest
        if manifest.bundle_sha256 != bundle.digest:
            built_from = f"engines of bundle {manifest.bundle} {manifest.bundle_sha256[:12]}..."
            raise self.make_mismatch_error(built_from, f"{bundle.manifest.name} {bundle.digest[:12]}...")
        if manifest.builder_version != library_version:
            built_by = f"engines built by {manifest.backend} {manifest.builder_version}"
            raise self.make_mismatch_error(built_by, f"the installed version, {library_version}")
        self.check_files()

    def check_files(self) -> None:
        """Raise EngineError if an engine file is missing, or differs from its hash in `engine.json`."""
        with ThreadPoolExecutor(4) as pool:  # threads help, as hashing releases the global interpreter lock
            # The largest file comes first, as it takes longest.
            list(
                pool.map(self._check_engine_file, sorted(self.manifest.graphs.values(), key=lambda entry: -entry.bytes))
            )

    def engine_path(self, role: str) -> Path:
        return self.folder / self.manifest.graphs[role].path

    def _check_engine_file(self, engine: BuiltEngine) -> None:
        path = self.folder / engine.path
        try:
            if not path.is_file() or path.is_symlink():
                raise self.make_mismatch_error("no file", "a TensorRT engine", path)
            actual = compute_blake2b(path)
        except OSError as error:
            raise EngineError(f"cannot be read ({format_error(error)})", field=str(path)) from error
        if actual != engine.blake2b:
            expected = f"{engine.blake2b[:12]}...: engines are code, and altered code is not run"
            raise self.make_mismatch_error(f"hash {actual[:12]}...", expected, path)


def compute_blake2b(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def is_engine_folder(path: str | Path) -> bool:
    # `os.path.isfile` returns False for text that cannot be a path, where `Path.is_file` may raise.
    return os.path.isfile(os.path.join(path, ENGINE_FILE))


def open_engine_folder(path: str | Path) -> EngineFolder:
    """Read and check the `engine.json` of an engine folder, but not the engines, or raise EngineError."""
    file = Path(path) / ENGINE_FILE
    try:
        text = read_regular_file(file, _MAX_JSON_BYTES)
    except FileNotFoundError as error:
        remedy = "an engine folder is written by `lantern-rt build-engine`"
        raise EngineError(f"no {ENGINE_FILE} in this folder", field=str(path), remedy=remedy) from error
    except (OSError, ValueError) as error:
        raise EngineError(
            f"cannot be read ({format_error(error)})", field=str(file), expected="a short JSON text"
        ) from error
    with convert_read_errors(file, "JSON", EngineError, _BUILD_AGAIN):
        data = json.loads(text)
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        actual = f"engine format {format_value(version)}"
        raise EngineError(field=str(file), found=actual, expected=FORMAT_VERSION, remedy=_BUILD_AGAIN)
    try:
        manifest = EngineManifest.model_validate_json(text, strict=True)
    except ValidationError as error:
        fields = describe_validation_error(error)
        field = f"{file}: field `{fields.pop('field')}`"
        raise EngineError(**fields, field=field, remedy=_BUILD_AGAIN) from error
    if not re.fullmatch(_COMMAND_PATTERN, "\0".join(manifest.command)):
        expected = "lantern-rt build-engine, a bundle and options"
        raise EngineError(
            field=f"{file}: field `command`", found="another command", expected=expected, remedy=_BUILD_AGAIN
        )
    return EngineFolder(Path(path).resolve(), manifest)
