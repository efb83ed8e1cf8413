"""Text embeddings from a file: an .npz with `embeddings` and, if some are padded, `mask`."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from ..errors import RequestError
from ..inputs import open_plain_file, reading

BYTES_LIMIT = 1 << 30  # of an array, unpacked
_CURE = "write it with numpy.savez(FILE, embeddings=states, mask=mask)"


def read_embeddings(path: Path) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Embeddings `[prompts, tokens, dim]`, right-padded, and mask `[prompts, tokens]`; all ones where there is none.

    What a bundle takes, and whether the numbers are finite, is checked with the request.
    Raises: RequestError: the file holds anything else.
    """
    with reading(path, "an .npz of `embeddings` and `mask`", RequestError, _CURE), open_plain_file(path) as file:
        with ZipFile(file) as archive:
            if large := next((one for one in archive.infolist() if one.file_size > BYTES_LIMIT), None):
                raise ValueError(f"{large.filename} of {large.file_size:,} bytes, expected at most {BYTES_LIMIT:,}")
        file.seek(0)
        arrays = dict(np.load(file, allow_pickle=False))
    if "embeddings" not in arrays or arrays.keys() - {"embeddings", "mask"}:
        names = ", ".join(sorted(arrays)) or "nothing"
        expected = "embeddings, and mask if need be"
        raise RequestError(field=str(path), found=f"arrays {names}", expected=expected, remedy=_CURE)
    values = arrays["embeddings"]
    mask = arrays.get("mask", np.ones(values.shape[:-1], np.bool_))
    _check(path, "embeddings", values, values.dtype in (np.float16, np.float32, np.float64), "floats", 3)
    _check(path, "mask", mask, mask.dtype.kind in "biu" and not (mask > 1).any() and not (mask < 0).any(), "0 and 1", 2)
    if mask.shape != values.shape[:2]:
        found = f"mask {list(mask.shape)} for embeddings {list(values.shape)}"
        expected = f"mask {list(values.shape[:2])}"
        raise RequestError(field=str(path), found=found, expected=expected, remedy=_CURE)
    with np.errstate(over="ignore"):  # infinity is refused with the request
        return values.astype(np.float32), mask.astype(np.bool_)


def _check(path: Path, name: str, array: NDArray[Any], right: bool, kind: str, axes: int) -> None:
    if not right or array.ndim != axes or not array.size:
        shape = ["prompts", "tokens", "dim"][:axes]
        found = f"{name} {array.dtype} {list(array.shape)}"
        raise RequestError(field=str(path), found=found, expected=f"{kind} [{', '.join(shape)}]", remedy=_CURE)
