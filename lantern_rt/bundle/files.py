"""Opening a bundle: the folder that holds a model, checked before anything in it is used.

Everything a bundle says is checked here once: `bundle.json` against the manifest, every file's place, size
and hash, the files that graphs pull in, the tables' shapes and ranges. Arrays are read without pickle.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from ..checks import brief, explain, short
from ..errors import BundleError
from .manifest import FORMAT_VERSION, FileEntry, Manifest, file_sha256
from .migration import from_format_1
from .onnx_scan import NotOnnx, external_locations

MANIFEST_FILE = "bundle.json"
EMBEDDED = Path(__file__).resolve().parent.parent / "bundles"
_MANIFEST_LIMIT = 1 << 20  # bytes; a manifest has a few thousand
_HEADER_LIMIT = 1 << 16  # bytes of an .npy header, generously


class Neighbors(NamedTuple):
    """Each code's nearest codes: `indices [codes, k]`, nearest first and itself left out, and `distances`."""

    indices: NDArray[np.unsignedinteger[Any]]
    distances: NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. `digest` is the sha256 of its `bundle.json`, which covers every other file's hash."""

    folder: Path
    manifest: Manifest
    digest: str

    def path(self, role: str) -> Path:
        """The file of a role (`target`, `vq_decoder`, ...)."""
        entry = self.manifest.files.get(role)
        if entry is None:
            known = ", ".join(sorted(self.manifest.files))
            raise BundleError(f"bundle {self.folder}: no file `{role}`, expected one of {known}")
        return self.folder / entry.path

    def code_embeddings(self) -> NDArray[np.float32]:
        """Input rows of the target for codes, float32 `[codebook_size, hidden_size]`, mapped from the file."""
        return self._code_embeddings

    def neighbors(self) -> Neighbors:
        """The neighbour table; an error if the bundle has none."""
        return self._neighbors

    @cached_property
    def _code_embeddings(self) -> NDArray[np.float32]:
        path = self.path("code_embeddings")
        with _expecting(path, "a NumPy array without pickled objects", ValueError, OSError, EOFError, SyntaxError):
            table: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
        expected = (self.manifest.codebook_size, self.manifest.target.hidden_size)
        _check_array(path, "the array", table, expected, (np.float32,))
        if not (np.isfinite(table.min()) and np.isfinite(table.max())):
            raise BundleError(f"{path}: found NaN or infinity, expected finite numbers; export the bundle again")
        return np.asarray(table)

    @cached_property
    def _neighbors(self) -> Neighbors:
        codes, k = self.manifest.codebook_size, self.manifest.neighbors
        if not k:
            raise BundleError(f"bundle {self.folder}: has no neighbour table; relaxed acceptance needs one")
        path = self.path("neighbors")
        indices = _read_npz_array(path, "indices", (codes, k), (np.uint8, np.uint16, np.uint32, np.uint64))
        distances = _read_npz_array(path, "distances", (codes, k), (np.float16, np.float32))
        if indices.max() >= codes:
            raise BundleError(
                f"{path}: found index {indices.max()}, expected 0 .. {codes - 1}; export the bundle again"
            )
        if (own := np.flatnonzero((indices == np.arange(codes)[:, None]).any(1))).size:
            raise BundleError(f"{path}: found code {own[0]} among its own neighbours, expected it left out")
        ascending = (distances[:, 0] >= 0).all() and (distances[:, 1:] >= distances[:, :-1]).all()
        if not (ascending and np.isfinite(distances).all()):
            raise BundleError(f"{path}: expected finite distances >= 0, nearest first; export the bundle again")
        return Neighbors(indices, distances)


def embedded_names() -> list[str]:
    """Names of the bundles that come with this package."""
    return sorted(file.parent.name for file in EMBEDDED.glob(f"*/{MANIFEST_FILE}"))


def open_bundle(path_or_name: str | Path, verify: bool = True, unread: Collection[str] = ()) -> Bundle:
    """Open a bundle folder, or an embedded bundle by name, and check it.

    A plain word is a name first and a folder second; write `./word` for the folder. `verify` reads every
    file to compare its sha256, but for roles that are `unread` because engines stand for them; sizes, places
    and graph references are always checked. Raises: BundleError.
    """
    folder = _find(path_or_name)
    text = _read_manifest_text(folder)
    manifest = _parse_manifest(folder / MANIFEST_FILE, text)
    own = {entry.path for entry in manifest.files.values()}
    for role, entry in manifest.files.items():
        _check_place(folder, role, entry.path)
        _check_content(folder / entry.path, entry, verify and role not in unread)
    for entry in manifest.files.values():
        if entry.path.endswith(".onnx"):
            _check_references(folder, entry, own)
    if manifest.neighbors >= manifest.codebook_size:
        raise BundleError(
            f"{folder / MANIFEST_FILE}: field `neighbors`: found {manifest.neighbors}, "
            f"expected less than codebook_size {manifest.codebook_size}"
        )
    return Bundle(folder, manifest, hashlib.sha256(text).hexdigest())


def _find(path_or_name: str | Path) -> Path:
    names = embedded_names()
    if isinstance(path_or_name, str) and path_or_name in names:
        return EMBEDDED / path_or_name
    folder, named = Path(path_or_name), f"bundle {short(path_or_name)}"
    try:
        if folder.is_dir():
            return folder.resolve()
        found = "found a file" if folder.exists() else "found neither a folder nor an embedded bundle"
    except (OSError, ValueError, RuntimeError) as error:
        raise BundleError(f"{named}: not a usable path ({brief(error)})") from error
    known = ", ".join(names) or "none in this installation"
    raise BundleError(f"{named}: {found}; give a bundle's folder or an embedded name: {known}")


def _read_manifest_text(folder: Path) -> bytes:
    path = folder / MANIFEST_FILE
    try:
        with path.open("rb") as file:
            text = file.read(_MANIFEST_LIMIT + 1)
    except FileNotFoundError as error:
        raise BundleError(
            f"{folder}: no {MANIFEST_FILE} in it; a bundle is a folder written by `lantern-rt export`"
        ) from error
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({brief(error)})") from error
    if len(text) > _MANIFEST_LIMIT:
        raise BundleError(f"{path}: found more than {_MANIFEST_LIMIT:,} bytes, expected a short JSON text")
    return text


def _parse_manifest(path: Path, text: bytes) -> Manifest:
    with _expecting(path, "JSON", ValueError, RecursionError):
        data = json.loads(text.decode("utf-8"), parse_constant=_finite, parse_float=_finite, object_pairs_hook=_unique)
    version = data.get("format_version") if isinstance(data, dict) else None
    if not isinstance(version, str) or not re.fullmatch(r"[0-9]{1,4}\.[0-9]{1,4}", version):
        raise BundleError(
            f"{path}: field `format_version`: found {short(version)}, expected a version such as {FORMAT_VERSION}"
        )
    if version.startswith("1."):
        data, version = from_format_1(data, FORMAT_VERSION), FORMAT_VERSION
    (major, minor), (our_major, our_minor) = (map(int, text.split(".")) for text in (version, FORMAT_VERSION))
    if major != our_major:
        raise BundleError(
            f"{path}: found bundle format {version}, this lantern-rt reads 1.x and {our_major}.x; "
            "upgrade lantern-rt, or export the bundle again"
        )
    try:
        return Manifest.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        newer = f"; the bundle is of format {version}, newer than {FORMAT_VERSION}: upgrade lantern-rt"
        field, problem = explain(error)
        field = field or "manifest"
        raise BundleError(f"{path}: field `{field}`: {problem}{newer if minor > our_minor else ''}") from error


def _check_place(folder: Path, role: str, name: str) -> None:
    """Refuse a file that is not a plain file inside the folder."""
    path, where = folder / name, f"{folder / MANIFEST_FILE}: file {short(role)}: found path {short(name)}, expected"
    if "\\" in name or ":" in name or not name.isprintable() or len(name) > 1000:
        raise BundleError(f"{where} a relative path with forward slashes")
    if PurePosixPath(name).is_absolute() or any(part in ("", ".", "..") for part in name.split("/")):
        raise BundleError(f"{where} a path inside the bundle's folder")
    try:
        real = path.resolve(strict=True)
    except FileNotFoundError as error:
        raise BundleError(f"{path}: found no file, expected {short(role)} there; copy the bundle again") from error
    except (OSError, RuntimeError) as error:
        raise BundleError(f"{path}: cannot be read ({brief(error)})") from error
    if not real.is_relative_to(folder.resolve()):
        raise BundleError(f"{path}: found a link that leaves the bundle's folder, expected a file in it")
    if not real.is_file():
        raise BundleError(f"{path}: found a folder or device, expected a file")


def _check_content(path: Path, entry: FileEntry, verify: bool) -> None:
    try:
        size = path.stat().st_size
        sha256 = file_sha256(path) if verify and size == entry.bytes else entry.sha256
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({brief(error)})") from error
    if size != entry.bytes:
        found = f"{size:,} bytes, expected {entry.bytes:,}; the file is incomplete or altered"
        raise BundleError(f"{path}: found {found}, copy the bundle again")
    if sha256 != entry.sha256:
        found = f"sha256 {sha256[:12]}..., expected {entry.sha256[:12]}...; the file was altered"
        raise BundleError(f"{path}: found {found}, copy the bundle again")


def _check_references(folder: Path, entry: FileEntry, own: set[str]) -> None:
    """Refuse a graph that reads a file which the manifest does not list."""
    path = folder / entry.path
    with _expecting(path, "an ONNX graph", NotOnnx, OSError):
        locations = external_locations(path)
    home = PurePosixPath(entry.path).parent
    for location in sorted(locations):
        if str(home / location) not in own or "\\" in location:
            raise BundleError(
                f"{path}: the graph reads the file {short(location)}, expected one that {MANIFEST_FILE} lists; "
                "do not use this bundle unless you trust its source, export it again"
            )


def _read_npz_array(path: Path, name: str, shape: tuple[int, ...], types: tuple[type, ...]) -> NDArray[Any]:
    """One array of an .npz, refused before reading if it unpacks to more than its shape allows."""
    with (
        _expecting(
            path, f"a NumPy archive with `{name}`",
            zipfile.BadZipFile, zlib.error, KeyError, ValueError, EOFError, OSError, NotImplementedError, RuntimeError,
        ),
        zipfile.ZipFile(path) as archive,
    ):  # fmt: skip
        size = archive.getinfo(f"{name}.npy").file_size
        if size > math.prod(shape) * 8 + _HEADER_LIMIT:
            raise BundleError(f"{path}: `{name}` unpacks to {size:,} bytes, expected an array {list(shape)}")
        with archive.open(f"{name}.npy") as file:
            array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    _check_array(path, f"`{name}`", array, shape, types)
    return array


def _check_array(path: Path, name: str, array: NDArray[Any], shape: tuple[int, ...], types: tuple[type, ...]) -> None:
    if array.shape != shape or array.dtype not in [np.dtype(kind) for kind in types]:
        expected = " or ".join(np.dtype(kind).name for kind in types)
        raise BundleError(
            f"{path}: {name}: found {array.dtype.name} {list(array.shape)}, "
            f"expected {expected} {list(shape)}; export the bundle again"
        )


@contextmanager
def _expecting(path: Path, what: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn these errors of reading a file into what was expected of it."""
    try:
        yield
    except errors as error:
        raise BundleError(f"{path}: expected {what}, found {brief(error)}; export the bundle again") from error


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} where a finite number belongs")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"the key {short(Counter(name for name, _ in pairs).most_common(1)[0][0])} twice")
    return dict(pairs)
