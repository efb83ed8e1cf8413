"""The folder of built plans: `engine.json`, and the files it lists, checked before any is loaded.

Plans are code for one version of one library and some GPUs; `engine.json` records what they were built from, by and
for, and the command that builds them again.
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
from ..inputs import error_fields, format_error, format_value, read_plain_file, reading
from ..methods import FrozenModel
from .profiles import BACKENDS, Profile

ENGINE_FILE = "engine.json"
FORMAT_VERSION = "5.0"
_MAX_JSON_BYTES = 1 << 20  # bytes of engine.json; it has a few thousand
_AGAIN = "build the engines again"
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# The words of a command that errors may advise: what it runs and where it writes are not for a file to choose.
_COMMAND = r"lantern-rt\0build-engine\0[^\0-][^\0]*(\0--(backend|max-rows|max-nodes|compute-capability)\0\w[\w-]*)*"


class BuiltGraph(FrozenModel):
    """One plan, by its plain file name, and the shapes it takes.

    onnx: the hash of the graph that it was built from, `<role>.onnx` beside it.
    blake2b: the plan's own 32-byte BLAKE2b hash. Hashing is most of what loading a plan takes, and on processors
    without instructions for SHA-256 this goes 1.8 times as fast.
    """

    path: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
    blake2b: Hash
    bytes: Annotated[int, Field(ge=0, le=2**50)]
    onnx: Hash
    profiles: Annotated[tuple[Profile, ...], Field(min_length=1)]
    seconds: float


class EngineManifest(FrozenModel):
    """The whole of `engine.json`.

    compute_capabilities: GPUs that the plans run on. gpu: the name of the only one, where the library builds for one.
    command: what builds them again, without `--output`. graphs: plans by role; none where only graphs were written.
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
    graphs: dict[str, BuiltGraph]


@dataclass(frozen=True)
class EngineFolder:
    """An engine folder whose `engine.json` has been read, by `open_engine_folder`."""

    folder: Path
    manifest: EngineManifest

    @property
    def rebuild_command(self) -> str:
        """The command that builds these plans again."""
        return shlex.join([*self.manifest.command, "--output", str(self.folder), "--force"])

    def mismatch_error(self, found: str, expected: str, path: Path | None = None) -> EngineError:
        """The error for plans that are others than expected."""
        remedy = f"rebuild with `{self.rebuild_command}`"
        return EngineError(field=str(path or self.folder), found=found, expected=expected, remedy=remedy)

    def replaced_files(self) -> frozenset[str]:
        """The bundle's files, by role, that are not read because a plan stands for them."""
        return frozenset(name for role in self.manifest.graphs for name in (role, f"{role}.data"))

    def check(self, bundle: Bundle, version: str) -> None:
        """Read every file.

        Raises:
            EngineError: the plans were built from another bundle, by another version, or are not those built.
        """
        manifest = self.manifest
        if manifest.bundle_sha256 != bundle.digest:
            built_from = f"engines of bundle {manifest.bundle} {manifest.bundle_sha256[:12]}..."
            raise self.mismatch_error(built_from, f"{bundle.manifest.name} {bundle.digest[:12]}...")
        if manifest.builder_version != version:
            built_by = f"engines built by {manifest.backend} {manifest.builder_version}"
            raise self.mismatch_error(built_by, f"{version}, the one installed")
        self.check_files()

    def check_files(self) -> None:
        """Read every file. Raises: EngineError on one that is missing or is not the one that was built."""
        with ThreadPoolExecutor(4) as pool:  # hashing lets other threads run
            list(pool.map(self._check_file, sorted(self.manifest.graphs.values(), key=lambda entry: -entry.bytes)))

    def path(self, role: str) -> Path:
        """The plan of a role."""
        return self.folder / self.manifest.graphs[role].path

    def _check_file(self, entry: BuiltGraph) -> None:
        path = self.folder / entry.path
        try:
            if not path.is_file() or path.is_symlink():
                raise self.mismatch_error("no file", "a plan", path)
            found = file_blake2b(path)
        except OSError as error:
            raise EngineError(f"cannot be read ({format_error(error)})", field=str(path)) from error
        if found != entry.blake2b:
            expected = f"{entry.blake2b[:12]}...: engines are code and an altered one is not run"
            raise self.mismatch_error(f"hash {found[:12]}...", expected, path)


def file_blake2b(path: Path) -> str:
    """The hash of a file as `engine.json` has it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def is_engine_folder(path: str | Path) -> bool:
    """Whether a path looks like an engine folder."""
    return os.path.isfile(os.path.join(path, ENGINE_FILE))  # False for what is no path at all, too


def open_engine_folder(path: str | Path) -> EngineFolder:
    """Read and check `engine.json`; its files are checked when loaded. Raises: EngineError."""
    file = Path(path) / ENGINE_FILE
    try:
        text = read_plain_file(file, _MAX_JSON_BYTES)
    except FileNotFoundError as error:
        remedy = "an engine folder is written by `lantern-rt build-engine`"
        raise EngineError(f"no {ENGINE_FILE} in it", field=str(path), remedy=remedy) from error
    except (OSError, ValueError) as error:
        raise EngineError(
            f"cannot be read ({format_error(error)})", field=str(file), expected="a short JSON text"
        ) from error
    with reading(file, "JSON", EngineError, _AGAIN):
        data = json.loads(text)
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        found = f"engine format {format_value(version)}"
        raise EngineError(field=str(file), found=found, expected=FORMAT_VERSION, remedy=_AGAIN)
    try:
        manifest = EngineManifest.model_validate_json(text, strict=True)
    except ValidationError as error:
        fields = error_fields(error)
        field = f"{file}: field `{fields.pop('field')}`"
        raise EngineError(**fields, field=field, remedy=_AGAIN) from error
    if not re.fullmatch(_COMMAND, "\0".join(manifest.command)):
        expected = "lantern-rt build-engine, a bundle and options"
        raise EngineError(field=f"{file}: field `command`", found="another one", expected=expected, remedy=_AGAIN)
    return EngineFolder(Path(path).resolve(), manifest)
