"""Reader of text embeddings, from an .npz file with an array `embeddings` and an optional padding mask `mask`."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from ..errors import RequestError
from ..inputs import convert_read_errors, open_regular_file

BYTES_LIMIT = 1 << 30  # Maximum decompressed size of an array.
_REMEDY = "write it with numpy.savez(FILE, embeddings=states, mask=mask)"


def read_embeddings(path: Path) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Read a file of text embeddings. The request checks later whether they are finite and fit the bundle.

    Returns:
        Embeddings `[prompts, tokens, dim]`, padded on the right, and the mask `[prompts, tokens]`, which is True for
        real tokens, or everywhere if the file has no mask.
    """
    with (
        convert_read_errors(path, "an .npz of `embeddings` and `mask`", RequestError, _REMEDY),
        open_regular_file(path) as file,
    ):
        with ZipFile(file) as archive:
            if large := next((info for info in archive.infolist() if info.file_size > BYTES_LIMIT), None):
                raise ValueError(f"{large.filename} has {large.file_size:,} bytes, more than {BYTES_LIMIT:,}")
        file.seek(0)
        arrays = dict(np.load(file, allow_pickle=False))
    if "embeddings" not in arrays or arrays.keys() - {"embeddings", "mask"}:
        names = ", ".join(sorted(arrays)) or "nothing"
        expected = "embeddings, and optionally mask"
        raise RequestError(field=str(path), found=f"arrays {names}", expected=expected, remedy=_REMEDY)
    values = arrays["embeddings"]
    mask = arrays.get("mask", np.ones(values.shape[:-1], np.bool_))
    _check_array(path, "embeddings", values, values.dtype in (np.float16, np.float32, np.float64), "floats", 3)
    _check_array(
        path, "mask", mask, mask.dtype.kind in "biu" and not (mask > 1).any() and not (mask < 0).any(), "0 and 1", 2
    )
    if mask.shape != values.shape[:2]:
        actual = f"mask {list(mask.shape)} for embeddings {list(values.shape)}"
        expected = f"mask {list(values.shape[:2])}"
        raise RequestError(field=str(path), found=actual, expected=expected, remedy=_REMEDY)
    with np.errstate(over="ignore"):  # The check of the request rejects infinity.
        return values.astype(np.float32), mask.astype(np.bool_)


def _check_array(
    path: Path, name: str, array: NDArray[Any], is_valid: bool, expected_values: str, num_axes: int
) -> None:
    if not is_valid or array.ndim != num_axes or not array.size:
        shape = ["prompts", "tokens", "dim"][:num_axes]
        actual = f"{name} {array.dtype} {list(array.shape)}"
        raise RequestError(
            field=str(path), found=actual, expected=f"{expected_values} [{', '.join(shape)}]", remedy=_REMEDY
        )
