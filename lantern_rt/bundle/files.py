"""Opening a bundle: the folder that holds a model, checked before anything in it is used.

Everything a bundle says is checked here once: `bundle.json` against the manifest, every file's place, size
and hash, the files that graphs pull in, the tables' shapes and ranges. Arrays are read without pickle.

Does not know what graphs compute or which library runs them; importing this needs neither onnx nor
onnxruntime.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zipfile
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

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


class Fact(NamedTuple):
    """One line of a bundle's description."""

    section: str
    key: str
    value: str


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
        """Input rows of the target for codes, float32 `[codebook_size, width]`, mapped from the file."""
        return self._code_embeddings

    def neighbors(self) -> Neighbors:
        """The neighbour table; an error if the bundle has none."""
        return self._neighbors

    @cached_property
    def _code_embeddings(self) -> NDArray[np.float32]:
        path = self.path("code_embeddings")
        try:
            table: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
        except (ValueError, OSError, EOFError, SyntaxError) as error:
            raise BundleError(
                f"{path}: expected a NumPy array without pickled objects, found {_brief(error)}"
            ) from error
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
        if (
            not np.isfinite(distances).all()
            or (distances[:, 0] < 0).any()
            or (distances[:, 1:] < distances[:, :-1]).any()
        ):
            raise BundleError(f"{path}: expected finite distances >= 0, nearest first; export the bundle again")
        return Neighbors(indices, distances)


def embedded_names() -> list[str]:
    """Names of the bundles that come with this package."""
    return sorted(file.parent.name for file in EMBEDDED.glob(f"*/{MANIFEST_FILE}"))


def open_bundle(path_or_name: str | Path, verify: bool = True, unread: Collection[str] = ()) -> Bundle:
    """Open a bundle folder, or an embedded bundle by name, and check it.

    A plain word is a name first and a folder second; write `./word` for the folder. `verify` reads every
    file to compare its sha256, but for roles that are `unread` because engines stand for them; sizes, places
    and graph references are always checked.
    """
    folder = _find(path_or_name)
    text = _read_manifest_text(folder)
    manifest = _parse_manifest(folder / MANIFEST_FILE, text)
    for role, entry in manifest.files.items():
        _check_file(folder, role, entry, verify and role not in unread)
    own = {entry.path for entry in manifest.files.values()}
    for entry in manifest.files.values():
        if entry.path.endswith(".onnx"):
            _check_references(folder, entry, own)
    if manifest.neighbors >= manifest.codebook_size:
        raise BundleError(
            f"{folder / MANIFEST_FILE}: field `neighbors`: found {manifest.neighbors}, "
            f"expected less than codebook_size {manifest.codebook_size}"
        )
    return Bundle(folder, manifest, hashlib.sha256(text).hexdigest())


def as_dict(bundle: Bundle) -> dict[str, Any]:
    """Everything a bundle says about itself, ready for JSON."""
    return {
        "folder": str(bundle.folder),
        "digest": bundle.digest,
        "bytes": sum(entry.bytes for entry in bundle.manifest.files.values()),
        "manifest": bundle.manifest.model_dump(mode="json"),
    }


def describe(bundle: Bundle) -> list[Fact]:
    """Everything a bundle says about itself, as lines to print: one section per part of the manifest."""
    facts = [
        Fact("bundle", "folder", str(bundle.folder)),
        Fact("bundle", "digest", bundle.digest),
        Fact("bundle", "bytes", f"{sum(entry.bytes for entry in bundle.manifest.files.values()):,}"),
    ]
    for key, value in bundle.manifest.model_dump(mode="json").items():
        if key == "files":
            for role, file in value.items():
                facts.append(Fact("files", role, f"{file['path']}  {file['bytes']:,} bytes  sha256 {file['sha256']}"))
        elif isinstance(value, dict):
            facts += [Fact(key, name, text) for name, text in _leaves(value)]
        elif value is None:
            facts.append(Fact("bundle", key, "none"))
        else:
            facts.append(Fact("bundle", key, str(value)))
    return sorted(facts, key=lambda fact: fact.section != "bundle")  # stable: the bundle's own lines first


def _leaves(part: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """The set values of nested parts as dotted names and text."""
    lines: list[tuple[str, str]] = []
    for key, value in part.items():
        if isinstance(value, list):
            value = {str(i): item for i, item in enumerate(value)}
        if isinstance(value, dict):
            lines += _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            lines.append((f"{prefix}{key}", str(value)))
    return lines


def _find(path_or_name: str | Path) -> Path:
    names = embedded_names()
    if isinstance(path_or_name, str) and path_or_name in names:
        return EMBEDDED / path_or_name
    folder = Path(path_or_name)
    try:
        if folder.is_dir():
            return folder.resolve()
        exists = folder.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise BundleError(f"bundle {_quote(path_or_name)}: not a usable path ({_brief(error)})") from error
    known = ", ".join(names) if names else "none in this installation"
    found = "found a file" if exists else "found neither a folder nor an embedded bundle"
    raise BundleError(f"bundle {_quote(path_or_name)}: {found}; give a bundle's folder or an embedded name: {known}")


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
        raise BundleError(f"{path}: cannot be read ({_brief(error)})") from error
    if len(text) > _MANIFEST_LIMIT:
        raise BundleError(
            f"{path}: found more than {_MANIFEST_LIMIT:,} bytes, expected a short JSON text; no bundle manifest"
        )
    return text


def _parse_manifest(path: Path, text: bytes) -> Manifest:
    try:
        data = json.loads(
            text.decode("utf-8"),
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_unique_keys,
        )
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: expected JSON, found {_brief(error)}; export the bundle again") from error
    version = data.get("format_version") if isinstance(data, dict) else None
    major = FORMAT_VERSION.partition(".")[0]
    if not isinstance(version, str) or not re.fullmatch(r"[0-9]{1,4}\.[0-9]{1,4}", version):
        raise BundleError(
            f"{path}: field `format_version`: found {_quote(version)}, expected a version such as {FORMAT_VERSION}"
        )
    if version.startswith("1."):
        data, version = from_format_1(data, FORMAT_VERSION), FORMAT_VERSION
    if version.partition(".")[0] != major:
        raise BundleError(
            f"{path}: found bundle format {version}, this lantern-rt reads 1.x and {major}.x; "
            "upgrade lantern-rt, or export the bundle again"
        )
    try:
        return Manifest.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise BundleError(f"{path}: {_explain(error)}{_newer(version)}") from error


def _newer(version: str) -> str:
    newer = int(version.partition(".")[2]) > int(FORMAT_VERSION.partition(".")[2])
    return f"; the bundle is of format {version}, newer than {FORMAT_VERSION}: upgrade lantern-rt" if newer else ""


def _explain(error: ValidationError) -> str:
    """A pydantic error as one line: which field, found, expected."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = " ".join(".".join(str(part) for part in first["loc"]).split())[:80] or "manifest"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "missing":
        return f"field `{field}`: found nothing, expected a value{more}"
    if first["type"] == "extra_forbidden":
        return f"field `{field}`: unknown, expected it left out{more}"
    expected = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"field `{field}`: {expected}{more}"
    expected = expected.removeprefix("Input should be ").removeprefix("a valid ")
    return f"field `{field}`: found {_quote(first['input'])}, expected {expected}{more}"


def _check_file(folder: Path, role: str, entry: FileEntry, verify: bool) -> None:
    _check_place(folder, role, entry.path)
    path = folder / entry.path
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            raise BundleError(
                f"{path}: found {size:,} bytes, expected {entry.bytes:,}; "
                "the file is incomplete or altered, copy the bundle again"
            )
        if verify and (found := file_sha256(path)) != entry.sha256:
            raise BundleError(
                f"{path}: found sha256 {found[:12]}..., expected {entry.sha256[:12]}...; "
                "the file was altered, copy the bundle again"
            )
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({_brief(error)})") from error


def _check_place(folder: Path, role: str, name: str) -> None:
    """Refuse a file that is not a plain file inside the folder."""
    where = f"{folder / MANIFEST_FILE}: file {_quote(role)}: found path {_quote(name)}, expected"
    parts = name.split("/")
    if "\\" in name or ":" in name or not name.isprintable() or len(name) > 1000:
        raise BundleError(f"{where} a relative path with forward slashes")
    if PurePosixPath(name).is_absolute() or any(part in ("", ".", "..") for part in parts):
        raise BundleError(f"{where} a path inside the bundle's folder")
    try:
        real = (folder / name).resolve(strict=True)
    except FileNotFoundError as error:
        raise BundleError(
            f"{folder / name}: found no file, expected {_quote(role)} there; copy the whole bundle again"
        ) from error
    except (OSError, RuntimeError) as error:
        raise BundleError(f"{folder / name}: cannot be read ({_brief(error)})") from error
    if not real.is_relative_to(folder.resolve()):
        raise BundleError(f"{folder / name}: found a link that leaves the bundle's folder, expected a file in it")
    if not real.is_file():
        raise BundleError(f"{folder / name}: found a folder or device, expected a file")


def _check_references(folder: Path, entry: FileEntry, own: set[str]) -> None:
    """Refuse a graph that reads a file which the manifest does not list."""
    path = folder / entry.path
    try:
        locations = external_locations(path)
    except (NotOnnx, OSError) as error:
        raise BundleError(f"{path}: expected an ONNX graph, found {_brief(error)}; export the bundle again") from error
    home = PurePosixPath(entry.path).parent
    for location in sorted(locations):
        if str(home / location) not in own or "\\" in location:
            raise BundleError(
                f"{path}: the graph reads the file {_quote(location)}, expected one that {MANIFEST_FILE} lists; "
                "do not use this bundle unless you trust its source, export it again"
            )


def _read_npz_array(path: Path, name: str, shape: tuple[int, ...], types: tuple[type, ...]) -> NDArray[Any]:
    """One array of an .npz, refused before reading if it unpacks to more than its shape allows."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = archive.getinfo(f"{name}.npy").file_size
            if size > math.prod(shape) * 8 + _HEADER_LIMIT:
                raise BundleError(f"{path}: `{name}` unpacks to {size:,} bytes, expected an array {list(shape)}")
            with archive.open(f"{name}.npy") as file:
                array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    except (
        zipfile.BadZipFile,
        zlib.error,
        KeyError,
        ValueError,
        EOFError,
        OSError,
        NotImplementedError,
        RuntimeError,
    ) as error:
        raise BundleError(f"{path}: expected a NumPy archive with `{name}`, found {_brief(error)}") from error
    _check_array(path, f"`{name}`", array, shape, types)
    return array


def _check_array(path: Path, name: str, array: NDArray[Any], shape: tuple[int, ...], types: tuple[type, ...]) -> None:
    if array.shape != shape or array.dtype not in [np.dtype(kind) for kind in types]:
        expected = " or ".join(np.dtype(kind).name for kind in types)
        raise BundleError(
            f"{path}: {name}: found {array.dtype.name} {list(array.shape)}, "
            f"expected {expected} {list(shape)}; export the bundle again"
        )


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} where a finite number belongs")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} where a finite number belongs")
    return number


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {_quote(twice)} twice")
    return result


def _brief(error: BaseException) -> str:
    """An exception as a few words on one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join((text or type(error).__name__).split())[:160]


def _quote(value: object) -> str:
    text = repr(str(value) if isinstance(value, Path) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
