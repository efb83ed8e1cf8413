"""Opening a bundle: the folder that holds a model, checked before anything in it is used.

Everything a bundle says is checked here once: `bundle.json` against the manifest, every file's place, size
and hash, the files that graphs pull in, the tables' shapes and ranges. Arrays are read without pickle.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from ..errors import BundleError
from ..inputs import error_fields, format_error, format_value, read_plain_file, reading
from ..runtime.heads import Heads, head_shapes
from .hub import HUB, fetch_bundle
from .manifest import FORMAT_VERSION, FileEntry, Manifest, file_sha256
from .onnx_scan import external_locations

MANIFEST_FILE = "bundle.json"
GRAPHS = ("target", "drafter", "condition", "vq_decoder", "vq_encoder")  # roles of files that a runtime loads
EMBEDDED = Path(__file__).resolve().parent.parent / "bundles"
_MANIFEST_LIMIT = 1 << 20  # bytes; a manifest has a few thousand
_HEADER_LIMIT = 1 << 16  # bytes of an .npy header, generously
_AGAIN = "copy or export the bundle again"


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
            expected = f"one of {', '.join(sorted(self.manifest.files))}"
            raise BundleError(f"no file `{role}`", field=f"bundle {self.folder}", expected=expected)
        return self.folder / entry.path

    @cached_property
    def code_embeddings(self) -> NDArray[np.float32]:
        """Input rows of the target for codes and the end of a row, float32 `[tokens, hidden_size]`, mapped."""
        path = self.path("code_embeddings")
        tokens = max(self.manifest.codebook_size, (self.manifest.row_end or 0) + 1)
        table = _read_array(path, None, (tokens, self.manifest.target.hidden_size), ("float32", "float16"))
        if not (np.isfinite(table.min()) and np.isfinite(table.max())):
            raise _refusal(path, "NaN or infinity", "finite numbers")
        return table.astype(np.float32, copy=False)

    @cached_property
    def heads(self) -> Heads | None:
        """What windows draft with, None where the bundle has none.

        Raises:
            BundleError: they are damaged.
        """
        manifest = self.manifest
        if manifest.heads is None:
            return None
        path, sizes = self.path("heads"), (manifest.heads.rank, manifest.heads.units)
        shapes = head_shapes(manifest.codebook_size, manifest.target.hidden_size, *sizes)
        arrays = {name: _read_array(path, name, shape, ("float16",)) for name, shape in shapes.items()}
        if not all(np.isfinite(array).all() for array in arrays.values()):
            raise _refusal(path, "NaN or infinity", "finite numbers")
        return Heads(**{name: array.astype(np.float32) for name, array in arrays.items()})

    @cached_property
    def neighbors(self) -> NDArray[np.unsignedinteger[Any]]:
        """Each code's nearest codes, `[codes, k]`, nearest first and itself left out.

        Raises:
            BundleError: the bundle has no table, or a damaged one.
        """
        codes, k = self.manifest.codebook_size, self.manifest.neighbors
        if not k:
            raise BundleError("has no neighbour table", field=f"bundle {self.folder}")
        path = self.path("neighbors")
        indices = _read_array(path, "indices", (codes, k), ("uint8", "uint16", "uint32", "uint64"))
        own = np.flatnonzero((indices == np.arange(codes)[:, None]).any(1))
        if indices.max() >= codes:
            raise _refusal(path, f"index {indices.max()}", f"0 .. {codes - 1}")
        if own.size:
            raise _refusal(path, f"code {own[0]} among its own neighbours", "it left out")
        return indices

    @cached_property
    def examples(self) -> list[str]:
        """Prompts that the bundle's maker chose to show what it draws; none where there is no file of them."""
        if "prompts" not in self.manifest.files:
            return []
        with _expecting(self.path("prompts"), "a text file of prompts"):
            return read_plain_file(self.path("prompts"), _MANIFEST_LIMIT).decode().splitlines()


def embedded_names() -> list[str]:
    """Names of the bundles that come with this package."""
    return sorted(file.parent.name for file in EMBEDDED.glob(f"*/{MANIFEST_FILE}"))


def open_bundle(
    path_or_name: str | Path,
    verify: bool = True,
    skipped_roles: Collection[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Bundle:
    """Open a bundle folder, an embedded bundle by name, or one of the hub by `hf:owner/name[@revision]`, and check it.

    A plain word is a name first and a folder second; write `./word` for the folder. `verify` reads every
    file to compare its sha256, but for roles that are `skipped_roles` because engines stand for them; sizes, places
    and graph references are always checked. `progress` is told how many bytes are compared, of how many.
    Raises: BundleError.
    """
    name = path_or_name.as_posix() if isinstance(path_or_name, Path) else path_or_name
    fetched = name.startswith(HUB)
    folder = fetch_bundle(name, MANIFEST_FILE, _listed) if fetched else _find(path_or_name)
    home = folder.parents[1] if fetched else folder  # the hub's cache keeps files beside the folder, which has links
    text = _read_manifest_text(folder)
    manifest = _parse_manifest(folder / MANIFEST_FILE, text)
    hashed = {role for role in manifest.files if verify and role not in skipped_roles}
    done, total = 0, sum(manifest.files[role].bytes for role in hashed)

    def count(size: int) -> None:
        nonlocal done
        done += size
        if progress:
            progress(done, total)

    count(0)
    for role, entry in manifest.files.items():
        _check_file(folder, home, role, entry, count if role in hashed else None)
    own = {entry.path for entry in manifest.files.values()}
    for role, entry in manifest.files.items():
        if role in GRAPHS and not entry.path.endswith(".onnx"):
            field = f"{folder / MANIFEST_FILE}: file {role}"
            raise BundleError(
                field=field, found=f"path {format_value(entry.path)}", expected="a name that ends in .onnx"
            )
        if entry.path.endswith(".onnx"):
            _check_references(folder / entry.path, PurePosixPath(entry.path).parent, own)
    return Bundle(folder, manifest, hashlib.sha256(text).hexdigest())


def _find(path_or_name: str | Path) -> Path:
    names = embedded_names()
    if isinstance(path_or_name, str) and path_or_name in names:
        return EMBEDDED / path_or_name
    folder, named = Path(path_or_name), f"bundle {format_value(path_or_name)}"
    try:
        if folder.is_dir():
            return folder.resolve()
        found = "a file" if folder.exists() else "neither a folder nor an embedded bundle"
    except (OSError, ValueError, RuntimeError) as error:
        raise BundleError(f"not a usable path ({format_error(error)})", field=named) from error
    known = ", ".join(names) or "none in this installation"
    raise BundleError(field=named, found=found, expected=f"a bundle's folder or an embedded name: {known}")


def _listed(folder: Path) -> list[str]:
    manifest = _parse_manifest(folder / MANIFEST_FILE, _read_manifest_text(folder))
    for role, entry in manifest.files.items():
        _check_name(folder, role, entry.path)
    return [entry.path for entry in manifest.files.values()]


def _read_manifest_text(folder: Path) -> bytes:
    path = folder / MANIFEST_FILE
    try:
        return read_plain_file(path, _MANIFEST_LIMIT)
    except FileNotFoundError as error:
        raise BundleError(f"no {MANIFEST_FILE} in it", field=str(folder), expected="an exported bundle") from error
    except (OSError, ValueError) as error:
        raise BundleError(f"cannot be read ({format_error(error)})", field=str(path)) from error


def _parse_manifest(path: Path, text: bytes) -> Manifest:
    with _expecting(path, "JSON"):
        data = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    version = data.get("format_version") if isinstance(data, dict) else None
    if not isinstance(version, str) or not re.fullmatch(r"[0-9]{1,4}\.[0-9]{1,4}", version):
        expected = f"a version such as {FORMAT_VERSION}"
        raise BundleError(field=f"{path}: field `format_version`", found=format_value(version), expected=expected)
    major, minor = map(int, version.split("."))
    our_major, our_minor = map(int, FORMAT_VERSION.split("."))
    if major != our_major:
        remedy = "upgrade lantern-rt, or export the bundle again"
        raise BundleError(field=str(path), found=f"bundle format {version}", expected=f"{our_major}.x", remedy=remedy)
    if minor < 3 and isinstance(data.get("decoding"), dict):
        data["decoding"].pop("method", None)  # a default before qualities were methods
    try:
        manifest = Manifest.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        fields = error_fields(error)
        newer = f"the bundle is of format {version}, newer than {FORMAT_VERSION}: upgrade lantern-rt"
        place = f"{path}: field `{fields.pop('field') or 'manifest'}`"
        raise BundleError(**fields, field=place, remedy=newer if minor > our_minor else "") from error
    if manifest.neighbors >= manifest.codebook_size:
        expected = f"less than codebook_size {manifest.codebook_size}"
        raise BundleError(field=f"{path}: field `neighbors`", found=str(manifest.neighbors), expected=expected)
    return manifest


def _check_name(folder: Path, role: str, name: str) -> None:
    odd = "\\" in name or ":" in name or not name.isprintable() or len(name) > 1000
    if odd or any(part in ("", ".", "..") for part in name.split("/")):
        raise BundleError(
            field=f"{folder / MANIFEST_FILE}: file {format_value(role)}",
            found=f"path {format_value(name)}",
            expected="a path inside the folder, with forward slashes",
        )


def _check_file(folder: Path, home: Path, role: str, entry: FileEntry, progress: Callable[[int], None] | None) -> None:
    """Refuse what is not a plain file of the folder, or not the file that was exported.

    home: where links of the folder may lead. progress: told of the bytes that are hashed; None: none are.
    """
    _check_name(folder, role, entry.path)
    path = folder / entry.path
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(home.resolve()):
            raise _refusal(path, "a link that leaves the bundle's folder", "a file in it")
        if not real.is_file():
            raise _refusal(path, "a folder or device", "a file")
        size = real.stat().st_size
        if size != entry.bytes:
            raise _refusal(path, f"{size:,} bytes", f"{entry.bytes:,}")
        sha256 = entry.sha256 if progress is None else file_sha256(real, progress)
        if sha256 != entry.sha256:
            raise _refusal(path, f"sha256 {sha256[:12]}...", f"{entry.sha256[:12]}...")
    except FileNotFoundError as error:
        raise _refusal(path, "no file", f"{format_value(role)} there") from error
    except (OSError, RuntimeError) as error:
        raise BundleError(f"cannot be read ({format_error(error)})", field=str(path)) from error


def _check_references(path: Path, home: PurePosixPath, own: set[str]) -> None:
    """Refuse a graph, in the subfolder `home`, that reads a file which is not among the bundle's `own`."""
    with _expecting(path, "an ONNX graph"):
        locations = external_locations(path)
    for location in sorted(locations):
        if str(home / location) not in own or "\\" in location:
            raise BundleError(
                f"the graph reads the file {format_value(location)}",
                field=str(path),
                expected=f"one that {MANIFEST_FILE} lists",
                remedy="do not use this bundle unless you trust its source, export it again",
            )


def _read_array(path: Path, name: str | None, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> NDArray[Any]:
    """An .npy, mapped, or the array `name` of an .npz, refused unread if it unpacks to more than its shape."""
    array: NDArray[Any]
    if name is None:
        with _expecting(path, "a NumPy array without pickled objects"):
            array = np.asarray(np.lib.format.open_memmap(path, mode="r"))
    else:
        with _expecting(path, f"a NumPy archive with `{name}`"), ZipFile(path) as archive:
            size = archive.getinfo(f"{name}.npy").file_size
            if size > math.prod(shape) * 8 + _HEADER_LIMIT:
                raise _refusal(path, f"`{name}` of {size:,} bytes unpacked", f"an array {list(shape)}")
            array = np.lib.format.read_array(BytesIO(archive.read(f"{name}.npy")), allow_pickle=False)
    if array.shape != shape or array.dtype not in map(np.dtype, dtypes):
        found = f"{name or 'array'} {array.dtype.name} {list(array.shape)}"
        raise _refusal(path, found, f"{' or '.join(dtypes)} {list(shape)}")
    return array


def _refusal(path: Path, found: str, expected: str) -> BundleError:
    return BundleError(field=str(path), found=found, expected=expected, remedy=_AGAIN)


def _expecting(path: Path, what: str) -> AbstractContextManager[None]:
    return reading(path, what, BundleError, _AGAIN)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"the key {format_value(Counter(name for name, _ in pairs).most_common(1)[0][0])} twice")
    return dict(pairs)
