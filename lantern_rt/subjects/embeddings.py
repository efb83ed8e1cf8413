"""Text embeddings of the caller's own text encoder, from Python or an .npz file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Self
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from ..errors import RequestError
from ..inputs import convert_read_errors, format_error, open_regular_file
from ..output.names import make_slug
from .base import Option, Prefix, RequestContext, Row, Subject, Words

BYTES_LIMIT = 1 << 30  # maximum decompressed size of an array in a file
_REMEDY = "write it with numpy.savez(FILE, embeddings=states, mask=mask)"
_HELP = (
    "File of text embeddings for bundles that take them: array `embeddings [prompts, tokens, dim]`, padded on "
    "the right, and array `mask [prompts, tokens]` if padding is used."
)


def _reject_record(text: str) -> NoReturn:
    raise RequestError("records a hash of text embeddings, not the embeddings", remedy="give them with --embeddings")


def read_embeddings(path: Path) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Read embeddings `[prompts, tokens, dim]`, padded on the right, and their mask `[prompts, tokens]`."""
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


class Embedding(Subject):
    option = Option("embeddings", Path, "NPZ", _HELP, read_embeddings)
    words = Words("embeddings", "embeddings", "embedding", option, restore=_reject_record)
    conditions = frozenset(["embeddings"])
    description = "text embeddings (`--embeddings FILE.npz`, in Python `embeddings=`)"
    item_name = "embeddings"
    title = "embedding {index}"
    remedy = "export it with --text-encoder to give prompts"

    @classmethod
    def read(cls, value: Any, context: RequestContext) -> list[Self]:
        width = context.condition.caption_dim or 0
        prefix = context.condition.prefix
        rows, mask = value if isinstance(value, tuple) else (value, None)
        try:
            with np.errstate(over="ignore"):  # infinite values raise an error below
                values = _convert_to_numpy(rows).astype(np.float32, casting="same_kind")
            marks = np.ones(values.shape[:-1], np.bool_) if mask is None else _convert_to_numpy(mask).astype(np.bool_)
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # PyTorch raises RuntimeError
            raise _make_error(format_error(error), "an array of numbers and a mask") from error
        if values.ndim == 2:
            values = values[None]  # [prompts, tokens, dim]
            marks = marks[None]  # [prompts, tokens]
        fits = values.ndim == 3 and values.shape[0] > 0 and 1 <= values.shape[1] <= prefix and values.shape[2] == width
        if not fits or marks.shape != values.shape[:2]:
            expected = f"[prompts, tokens, {width}] with mask [prompts, tokens], where tokens is 1 .. {prefix}"
            raise _make_error(f"{list(values.shape)} with mask {list(marks.shape)}", expected)
        lengths = marks.sum(1)[:, None]  # number of tokens, [prompts, 1]
        if (lengths == 0).any() or not np.array_equal(marks, np.arange(marks.shape[1]) < lengths):
            raise _make_error("a mask with gaps", "at least one 1, then zeros (right-padded)")
        if not np.isfinite(values[marks]).all():
            raise _make_error("NaN or infinity", "finite numbers")
        return [cls.make(item, cls.item_name, context) for item in zip(values, marks, strict=True)]

    @classmethod
    def make(cls, item: Any, name: str, context: RequestContext) -> Self:
        """Move the padding of embeddings `[tokens, dim]` with mask `[tokens]` from the right to the left."""
        values, mask = item
        # The bundle format requires zeros as padding. The caller's padding may have any values, even NaN.
        prefix = context.condition.prefix
        left_padded = np.zeros((prefix, values.shape[1]), np.float32)
        is_real_token = np.arange(prefix) >= prefix - mask.sum()
        left_padded[is_real_token] = values[mask]
        inputs = {"caption_embeds": left_padded[None], "caption_mask": is_real_token[None].astype(np.int64)}
        return cls(None, Prefix(Row(inputs, 0, is_real_token), Row(inputs, 1, is_real_token)))

    @classmethod
    def join(cls, items: Sequence[Any]) -> Any:
        return tuple(map(np.stack, zip(*items, strict=True)))  # [prompts, tokens, dim], [prompts, tokens]

    def make_file_stem(self, index: int, option: Any) -> str:
        return f"{make_slug(Path(option).stem)}-{index}"

    @property
    def record(self) -> str:
        """SHA-256 hash of the embeddings and the mask, because they are too large for a text chunk."""
        return hashlib.sha256(b"".join(value.tobytes() for value in self.prefix.cond.inputs.values())).hexdigest()


def _make_error(found: str, expected: str) -> RequestError:
    return RequestError(field="embeddings", found=found, expected=expected)


def _convert_to_numpy(values: Any) -> NDArray[Any]:
    if hasattr(values, "detach"):  # a PyTorch tensor; NumPy rejects tensors that need gradients, and bfloat16
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values
    return np.asarray(values)
