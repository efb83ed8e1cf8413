"""Text embeddings of the caller's own text encoder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import RequestError
from ..inputs import format_error
from ..output.names import make_slug
from ..text.embeddings import read_embeddings
from .base import Option, Prefix, RequestContext, Row, Subject, Words

_HELP = (
    "File of text embeddings for bundles that take them: array `embeddings [prompts, tokens, dim]`, padded on "
    "the right, and array `mask [prompts, tokens]` if padding is used."
)


def _reject_record(text: str) -> NoReturn:
    raise RequestError("records a hash of text embeddings, not the embeddings", remedy="give them with --embeddings")


class Embedding(Subject):
    option = Option("embeddings", Path, "NPZ", _HELP, read_embeddings)
    words = Words("embeddings", "embeddings", "embedding", option, restore=_reject_record)
    conditions = frozenset(["embeddings"])
    description = "text embeddings (`--embeddings FILE.npz`, in Python `embeddings=`)"
    item_name = "embeddings"
    is_text = False
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

    @classmethod
    def make_title(cls, item: Any, index: int) -> str:
        return f"embedding {index}"

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
