"""Engine folders: `engine.json` and the TensorRT engines that it lists, checked before an engine is loaded.

TensorRT engines are code for one version of one library and some GPUs. `engine.json` records the bundle, the library
and the GPUs that they were built for, and the command that rebuilds them.
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
_MAX_JSON_BYTES = 1 << 20  # maximum size of engine.json, which has a few thousand bytes
_BUILD_AGAIN = "build the engines again"
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# Form of the command that errors recommend: a hostile file must not choose the program or where it writes.
_COMMAND_PATTERN = (
    r"lantern-rt\0build-engine\0[^\0-][^\0]*(\0--(backend|max-rows|max-nodes|compute-capability)\0\w[\w-]*)*"
)


class BuiltEngine(FrozenModel):
    """TensorRT engine of one graph.

    Attributes:
        path: file name of the engine in the engine folder.
        blake2b: 32-byte BLAKE2b hash of the engine, in hexadecimal digits. Hashing takes most of the time of loading,
            and BLAKE2b is 1.8 times as fast as SHA-256 on processors without instructions for SHA-256.
        bytes: size of the engine.
        onnx: BLAKE2b hash of the graph that it was built from, `<role>.onnx` in the same folder.
        profiles: ranges of shapes that the engine accepts.
        seconds: build time.
    """

    path: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
    blake2b: Hash
    bytes: Annotated[int, Field(ge=0, le=2**50)]
    onnx: Hash
    profiles: Annotated[tuple[ShapeProfile, ...], Field(min_length=1)]
    seconds: float


class EngineManifest(FrozenModel):
    """Contents of `engine.json`.

    Attributes:
        compute_capabilities: compute capabilities of the GPUs that can run the engines, such as `SM89`.
        gpu: name of the only GPU model that can run the engines; None: any GPU of those compute capabilities.
        precision: type that the target computes in.
        bundle: name of the bundle.
        bundle_sha256: digest of the bundle.
        command: command that rebuilds the folder, without `--output`.
        built: time of the build, in ISO 8601.
        graphs: engines by role of the graph; empty after a dry run.
    """

    format_version: str
    backend: Annotated[str, Field(pattern=f"^({'|'.join(BACKENDS)})$")]
    builder_version: str
    compute_capabilities: tuple[str, ...]
    gpu: str | None
    precision: str
    bundle: str
    bundle_sha256: Hash
    command: tuple[str, ...]
    built: str
    graphs: dict[str, BuiltEngine]


@dataclass(frozen=True)
class EngineFolder:
    """Engine folder whose `engine.json` has been read by `open_engine_folder`."""

    folder: Path
    manifest: EngineManifest

    @property
    def rebuild_command(self) -> str:
        """Command that rebuilds this folder."""
        return shlex.join([*self.manifest.command, "--output", str(self.folder), "--force"])

    def make_mismatch_error(self, actual: str, expected: str, path: Path | None = None) -> EngineError:
        """Return the error for engines that do not fit this host or bundle.

        Args:
            actual: property of the engines.
            expected: property that the host or bundle requires.
            path: file at fault; None: the folder.
        """
        remedy = f"rebuild with `{self.rebuild_command}`"
        return EngineError(field=str(path or self.folder), found=actual, expected=expected, remedy=remedy)

    def list_replaced_files(self) -> frozenset[str]:
        """Return the roles of the bundle's files that engines replace and that are therefore not read."""
        return frozenset(name for role in self.manifest.graphs for name in (role, f"{role}.data"))

    def check_compatibility(self, bundle: Bundle, library_version: str) -> None:
        """Check that the engines fit a bundle and library, and were not altered.

        Args:
            bundle: bundle to generate images with.
            library_version: installed version of the library that runs the engines.

        Raises:
            EngineError: another bundle or version built the engines, or a file is missing or altered.
        """
        manifest = self.manifest
        if manifest.bundle_sha256 != bundle.digest:
            built_from = f"engines of bundle {manifest.bundle} {manifest.bundle_sha256[:12]}..."
            raise self.make_mismatch_error(built_from, f"{bundle.manifest.name} {bundle.digest[:12]}...")
        if manifest.builder_version != library_version:
            built_by = f"engines built by {manifest.backend} {manifest.builder_version}"
            raise self.make_mismatch_error(built_by, f"the installed version, {library_version}")
        self.check_files()

    def check_files(self) -> None:
        """Compare the files with their hashes. Raises: EngineError: a file is missing or altered."""
        with ThreadPoolExecutor(4) as pool:  # hashing releases the interpreter lock
            list(
                pool.map(self._check_engine_file, sorted(self.manifest.graphs.values(), key=lambda entry: -entry.bytes))
            )

    def engine_path(self, role: str) -> Path:
        """Return the path of the engine of a graph."""
        return self.folder / self.manifest.graphs[role].path

    def _check_engine_file(self, engine: BuiltEngine) -> None:
        path = self.folder / engine.path
        try:
            if not path.is_file() or path.is_symlink():
                raise self.make_mismatch_error("no file", "a TensorRT engine", path)
            actual = file_blake2b(path)
        except OSError as error:
            raise EngineError(f"cannot be read ({format_error(error)})", field=str(path)) from error
        if actual != engine.blake2b:
            expected = f"{engine.blake2b[:12]}...: engines are code, and altered code is not run"
            raise self.make_mismatch_error(f"hash {actual[:12]}...", expected, path)


def file_blake2b(path: Path) -> str:
    """Return the BLAKE2b hash of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def is_engine_folder(path: str | Path) -> bool:
    """Return whether a path is a folder with an `engine.json`."""
    return os.path.isfile(os.path.join(path, ENGINE_FILE))  # False, too, for text that cannot be a path


def open_engine_folder(path: str | Path) -> EngineFolder:
    """Open an engine folder without reading its engines, which `EngineFolder.check_compatibility` does.

    Raises:
        EngineError: `engine.json` is missing, unreadable or invalid.
    """
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
