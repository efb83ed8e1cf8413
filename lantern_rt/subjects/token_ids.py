"""Prompts that are already tokenized, for bundles that take prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field

from ..errors import RequestError
from ..inputs import check_int, convert_read_errors, convert_to_list, format_value, read_regular_file
from .base import Option, RequestContext, Subject, Words
from .text import Text, make_token_prefix

_MAX_TOKEN_ID = 2**31 - 1
_MAX_FILE_BYTES = 1 << 24
_HELP = "File of a prompt as token ids, such as [1, 2, 3], or of a list of prompts."


def _read_file(path: Path) -> Any:
    with convert_read_errors(path, "a JSON list of token ids", RequestError, "write it as [1, 2, 3]"):
        ids = json.loads(read_regular_file(path, _MAX_FILE_BYTES))
        if not isinstance(ids, list):
            raise ValueError(format_value(ids))
        return ids


class TokenIds(Subject):
    """Token ids of a prompt, which begin and end like the bundle's template.

    For condition kind `tokens` the template contains the image size.
    """

    words = Words(
        "token_ids",
        "input_ids",
        "token_ids",
        Option("token_ids", Path, "JSON", _HELP, _read_file),
        chunk_type=Annotated[str, Field(pattern=r"^[0-9]{1,10}( [0-9]{1,10})*$")],
        restore=lambda text: [*map(int, text.split())],
    )
    conditions = Text.conditions
    description = "token ids"
    item_name = "token_ids"
    title = "tokens {index}"

    @classmethod
    def split(cls, value: Any) -> list[Any]:
        ids = convert_to_list(value)
        is_batch = bool(ids) and all(isinstance(row, list | tuple | np.ndarray) for row in ids)
        return ids if is_batch else [ids]

    @classmethod
    def make(cls, item: Any, name: str, context: RequestContext) -> Self:
        ids = [check_int(name, value, -1, 0, _MAX_TOKEN_ID) for value in item]
        condition = context.condition
        before, after = context.template_tokens
        text = ids[len(before) : len(ids) - len(after)]
        if ids != [*before, *text, *after]:
            expected = (
                f"{[*before]} before the text and {[*after]} after the text, as size {context.size.name} requires"
            )
            found = format_value(ids[: len(before)] + ids[-len(after) :])
            raise RequestError(field=name, found=found, expected=expected)
        if not text or len(ids) > condition.prefix:
            limits = f"{len(before) + 1 + len(after)} .. {condition.prefix:,}"
            raise RequestError(field=name, found=f"{len(ids):,} ids", expected=limits)
        assert context.tokenizer is not None
        if unknown := [i for i in text if not context.tokenizer.has_id(i)]:
            raise RequestError(field=name, found=f"{unknown[0]}", expected="ids of the bundle's tokenizer")
        # The condition graph of kind `words` reads ids of fixed length; other kinds read ids of any length.
        padded = text + [0] * (condition.prefix - len(text)) if condition.kind == "words" else text
        return cls(tuple(ids), make_token_prefix(context, np.array(padded, np.int64)))

    @property
    def record(self) -> str:
        assert isinstance(self.label, tuple)
        return " ".join(map(str, self.label))
