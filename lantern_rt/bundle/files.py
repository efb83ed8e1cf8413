"""Opening of bundles, which are folders with a model.

`bundle.json`, path, size and hash of every file, the external files of graphs, and the shapes and value ranges of
tables are checked before they are used. Arrays are read without pickle, so a hostile bundle cannot run code.
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
from functools import cached_property, partial
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from ..errors import BundleError, RequestError
from ..inputs import (
    convert_read_errors,
    describe_validation_error,
    format_error,
    format_value,
    read_regular_file,
    reraise_error_of_signal_handler,
    split_lines,
)
from ..runtime.heads import DraftHeads, draft_head_shapes
from .hub import HUB, fetch_bundle_files, list_allowed_link_targets
from .manifest import DECODERS, FORMAT_VERSION, FileEntry, Manifest, compute_sha256
from .onnx_scan import list_external_files

MANIFEST_FILE = "bundle.json"
GRAPHS = (*DECODERS, "condition", "vq_decoder", "vq_encoder")  # Roles of files that a runtime loads.
EMBEDDED = Path(__file__).resolve().parent.parent / "bundles"
_MANIFEST_LIMIT = 1 << 20  # Maximum size of a manifest in bytes; typical are a few thousand.
_HEADER_LIMIT = 1 << 16  # Maximum size of an .npy header in bytes.
_EXPORT_AGAIN = "copy or export the bundle again"
T = TypeVar("T")


@dataclass(frozen=True)
class Bundle:
    """Opened bundle. Its `digest` is the sha256 of `bundle.json`, which has the hashes of all other files."""

    folder: Path
    manifest: Manifest
    digest: str

    def path(self, file_role: str) -> Path:
        """Return the path of the file that has a role, such as `target`, or raise BundleError."""
        entry = self.manifest.files.get(file_role)
        if entry is None:
            expected = f"one of {', '.join(sorted(self.manifest.files))}"
            raise BundleError(f"no file `{file_role}`", field=f"bundle {self.folder}", expected=expected)
        return self.folder / entry.path

    def check_has_image_decoder(self) -> None:
        if not self.manifest.makes_images:
            problem = f"bundle {self.manifest.name} has no image decoder"
            raise RequestError(problem, field="image", remedy="`lantern-rt run` writes tokens for another program")

    @cached_property
    def code_embeddings(self) -> NDArray[np.float32]:
        """Input embeddings of the target for image tokens, float32 `[manifest.num_embeddings, hidden_size]`."""
        path = self.path("code_embeddings")
        tokens = self.manifest.num_embeddings
        table = _read_array(path, None, (tokens, self.manifest.target.hidden_size), ("float32", "float16"))
        if not (np.isfinite(table.min()) and np.isfinite(table.max())):
            raise _make_file_error(path, "NaN or infinity", "finite numbers")
        return table.astype(np.float32, copy=False)

    @cached_property
    def draft_heads(self) -> DraftHeads | None:
        manifest = self.manifest
        if manifest.heads is None:
            return None
        path = self.path("heads")
        shapes = draft_head_shapes(
            manifest.codebook_size, manifest.target.hidden_size, manifest.heads.rank, manifest.heads.units
        )
        arrays = {name: _read_array(path, name, shape, ("float16",)) for name, shape in shapes.items()}
        if not all(np.isfinite(array).all() for array in arrays.values()):
            raise _make_file_error(path, "NaN or infinity", "finite numbers")
        return DraftHeads(**{name: array.astype(np.float32) for name, array in arrays.items()})

    @cached_property
    def neighbor_table(self) -> NDArray[np.unsignedinteger[Any]]:
        """Table of the k nearest other codes for each code, `[codes, k]`, the nearest first."""
        codes = self.manifest.codebook_size
        k = self.manifest.neighbors
        if not k:
            raise BundleError("has no neighbour table", field=f"bundle {self.folder}")
        path = self.path("neighbors")
        indices = _read_array(path, "indices", (codes, k), ("uint8", "uint16", "uint32", "uint64"))
        self_neighbors = np.flatnonzero((indices == np.arange(codes)[:, None]).any(1))
        if indices.max() >= codes:
            raise _make_file_error(path, f"index {indices.max()}", f"0 .. {codes - 1}")
        if self_neighbors.size:
            raise _make_file_error(path, f"code {self_neighbors[0]} among its own neighbours", "other codes only")
        return indices

    @cached_property
    def example_prompts(self) -> list[str]:
        if "prompts" not in self.manifest.files:
            return []
        with _convert_parse_errors(self.path("prompts"), "a text file of prompts"):
            return split_lines(read_regular_file(self.path("prompts"), _MANIFEST_LIMIT).decode())


def list_embedded_bundle_names() -> list[str]:
    return sorted(file.parent.name for file in EMBEDDED.glob(f"*/{MANIFEST_FILE}"))


def open_bundle(
    path_or_name: str | Path,
    verify: bool = True,
    skipped_roles: Collection[str] = (),
    progress: Callable[[int, int], None] | None = None,
    digest: str | None = None,
) -> Bundle:
    """Open and check a bundle.

    Args:
        path_or_name: folder, name of an embedded bundle, or reference `hf:owner/name[@revision]` to the hub. An
            embedded bundle takes precedence over a folder of the same name; write `./name` for the folder.
        verify: whether to compare the sha256 of every file. Sizes, paths and external files of graphs are always
            checked.
        skipped_roles: roles of files whose sha256 is not compared, because TensorRT engines replace these files.
        progress: callback, called with the number of hashed bytes and the number of all bytes.
        digest: sha256 that `bundle.json` must have; None: any sha256.

    Returns:
        The opened bundle.

    Raises:
        BundleError: the bundle cannot be downloaded or read, or a check fails.
    """
    name = path_or_name.as_posix() if isinstance(path_or_name, Path) else path_or_name
    reference = name if name.startswith(HUB) else None
    folder = fetch_bundle_files(reference, [MANIFEST_FILE]) if reference else _find_bundle_folder(path_or_name)
    check_file = partial(_check_or_download_again, reference, folder)
    text, data = check_file(MANIFEST_FILE, lambda: _read_manifest(folder, digest))
    manifest = _parse_manifest(folder / MANIFEST_FILE, data)
    if reference:
        fetch_bundle_files(reference, [entry.path for entry in manifest.files.values()], folder.name)
    hashed = {role for role in manifest.files if verify and role not in skipped_roles}
    done = 0
    total = sum(manifest.files[role].bytes for role in hashed)

    def report_hashed_bytes(size: int) -> None:
        nonlocal done
        done = min(done + size, total)  # a file that is downloaded again is hashed twice
        if progress:
            progress(done, total)

    report_hashed_bytes(0)
    for role, entry in manifest.files.items():
        report = report_hashed_bytes if role in hashed else None
        check_file(entry.path, partial(_check_file, folder, role, entry, report))
    listed_files = {entry.path for entry in manifest.files.values()}
    for role, entry in manifest.files.items():
        if role in GRAPHS and not entry.path.endswith(".onnx"):
            field = f"{folder / MANIFEST_FILE}: file {role}"
            raise BundleError(
                field=field, found=f"path {format_value(entry.path)}", expected="a name that ends in .onnx"
            )
        if entry.path.endswith(".onnx"):
            _check_external_files(folder / entry.path, PurePosixPath(entry.path).parent, listed_files)
    return Bundle(folder, manifest, hashlib.sha256(text).hexdigest())


def _check_or_download_again(reference: str | None, folder: Path, path: str, check: Callable[[], T]) -> T:
    """Return the result of a check of a file. A file of the hub that fails is downloaded again, once."""
    try:
        return check()
    except BundleError as damage:
        if reference is None:
            raise
        try:
            fetch_bundle_files(reference, [path], folder.name, again=True)
        except BundleError as error:
            damage.remedy = f"download it again ({error})"
            raise damage from error
    return check()


def _find_bundle_folder(path_or_name: str | Path) -> Path:
    names = list_embedded_bundle_names()
    if isinstance(path_or_name, str) and path_or_name in names:
        return EMBEDDED / path_or_name
    folder = Path(path_or_name)
    field = f"bundle {format_value(path_or_name)}"
    try:
        if folder.is_dir():
            return folder.resolve()
        actual = "a file" if folder.exists() else "neither a folder nor an embedded bundle"
    except (OSError, ValueError, RuntimeError) as error:
        raise BundleError(f"not a usable path ({format_error(error)})", field=field) from error
    known = ", ".join(names) or "none in this installation"
    remedy = "`lantern-rt models` lists published models"
    expected = f"a bundle's folder or an embedded name: {known}"
    raise BundleError(field=field, found=actual, expected=expected, remedy=remedy)


def _read_manifest(folder: Path, digest: str | None) -> tuple[bytes, Any]:
    """Return the text of `bundle.json`, which must have the sha256 `digest` (None: any), and its JSON value."""
    path = folder / MANIFEST_FILE
    try:
        text = read_regular_file(path, _MANIFEST_LIMIT)
    except FileNotFoundError as error:
        raise BundleError(f"contains no {MANIFEST_FILE}", field=str(folder), expected="an exported bundle") from error
    except (OSError, ValueError) as error:
        raise BundleError(f"cannot be read ({format_error(error)})", field=str(path)) from error
    actual = hashlib.sha256(text).hexdigest()
    if digest is not None and digest != actual:
        raise _make_file_error(path, f"sha256 {actual[:12]}...", f"{digest[:12]}...")
    with _convert_parse_errors(path, "JSON"):
        return text, json.loads(text.decode("utf-8"), object_pairs_hook=_check_unique_keys)


def _parse_manifest(path: Path, data: Any) -> Manifest:
    version = data.get("format_version") if isinstance(data, dict) else None
    if not isinstance(version, str) or not re.fullmatch(r"[0-9]{1,4}\.[0-9]{1,4}", version):
        expected = f"a version such as {FORMAT_VERSION}"
        raise BundleError(field=f"{path}: field `format_version`", found=format_value(version), expected=expected)
    major, minor = map(int, version.split("."))
    our_major, our_minor = map(int, FORMAT_VERSION.split("."))
    if major != our_major:
        remedy = "upgrade lantern-rt, or export the bundle again"
        raise BundleError(field=str(path), found=f"bundle format {version}", expected=f"{our_major}.x", remedy=remedy)
    try:
        manifest = Manifest.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        fields = describe_validation_error(error)
        upgrade = f"the bundle has format {version}, newer than {FORMAT_VERSION}: upgrade lantern-rt"
        place = f"{path}: field `{fields.pop('field') or 'manifest'}`"
        raise BundleError(**fields, field=place, remedy=upgrade if minor > our_minor else "") from error
    if manifest.neighbors >= manifest.codebook_size:
        expected = f"less than codebook_size {manifest.codebook_size}"
        raise BundleError(field=f"{path}: field `neighbors`", found=str(manifest.neighbors), expected=expected)
    for role, entry in manifest.files.items():
        _check_file_path(path, role, entry.path)
    return manifest


def _check_file_path(manifest_path: Path, file_role: str, path: str) -> None:
    invalid = "\\" in path or ":" in path or not path.isprintable() or len(path) > 1000
    if invalid or any(part in ("", ".", "..") for part in path.split("/")):
        raise BundleError(
            field=f"{manifest_path}: file {format_value(file_role)}",
            found=f"path {format_value(path)}",
            expected="a path inside the folder, with forward slashes",
        )


def _check_file(folder: Path, file_role: str, entry: FileEntry, progress: Callable[[int], None] | None) -> None:
    """Raise BundleError unless a file is a regular file in the bundle's folder with the listed size and sha256.

    `progress` gets the number of bytes of each hashed block. None: the sha256 is not checked.
    """
    path = folder / entry.path
    try:
        real = path.resolve(strict=True)
        if not any(real.is_relative_to(root.resolve()) for root in list_allowed_link_targets(folder)):
            raise _make_file_error(path, "a link that leaves the bundle's folder", "a file in it")
        if not real.is_file():
            raise _make_file_error(path, "a folder or device", "a file")
        size = real.stat().st_size
        if size != entry.bytes:
            raise _make_file_error(path, f"{size:,} bytes", f"{entry.bytes:,}")
        sha256 = entry.sha256 if progress is None else compute_sha256(real, progress)
        if sha256 != entry.sha256:
            raise _make_file_error(path, f"sha256 {sha256[:12]}...", f"{entry.sha256[:12]}...")
    except FileNotFoundError as error:
        raise _make_file_error(path, "no file", f"the file of {format_value(file_role)}") from error
    except (OSError, RuntimeError) as error:
        reraise_error_of_signal_handler(error)
        raise BundleError(f"cannot be read ({format_error(error)})", field=str(path)) from error


def _check_external_files(path: Path, subfolder: PurePosixPath, listed_files: set[str]) -> None:
    """Raise BundleError if a graph in `subfolder` reads a file that the manifest does not list."""
    with _convert_parse_errors(path, "an ONNX graph"):
        locations = list_external_files(path)
    for location in sorted(locations):
        if str(subfolder / location) not in listed_files or "\\" in location:
            raise BundleError(
                f"the graph reads the file {format_value(location)}",
                field=str(path),
                expected=f"a file that {MANIFEST_FILE} lists",
                remedy="export the bundle again; do not use it unless you trust its source",
            )


def _read_array(path: Path, name: str | None, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> NDArray[Any]:
    """Read an array from an .npy file (memory-mapped), or the array `name` from an .npz file.

    The shape that the array must have also limits the size of a compressed array.
    """
    array: NDArray[Any]
    if name is None:
        with _convert_parse_errors(path, "a NumPy array without pickled objects"):
            array = np.asarray(np.lib.format.open_memmap(path, mode="r"))
    else:
        with _convert_parse_errors(path, f"a NumPy archive with `{name}`"), ZipFile(path) as archive:
            size = archive.getinfo(f"{name}.npy").file_size
            if size > math.prod(shape) * 8 + _HEADER_LIMIT:
                raise _make_file_error(path, f"`{name}` of {size:,} bytes unpacked", f"an array {list(shape)}")
            array = np.lib.format.read_array(BytesIO(archive.read(f"{name}.npy")), allow_pickle=False)
    if array.shape != shape or array.dtype not in map(np.dtype, dtypes):
        actual = f"{name or 'array'} {array.dtype.name} {list(array.shape)}"
        raise _make_file_error(path, actual, f"{' or '.join(dtypes)} {list(shape)}")
    return array


def _make_file_error(path: Path, actual: str, expected: str) -> BundleError:
    return BundleError(field=str(path), found=actual, expected=expected, remedy=_EXPORT_AGAIN)


def _convert_parse_errors(path: Path, expected: str) -> AbstractContextManager[None]:
    return convert_read_errors(path, expected, BundleError, _EXPORT_AGAIN)


def _check_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"has the key {format_value(Counter(name for name, _ in pairs).most_common(1)[0][0])} twice")
    return dict(pairs)
