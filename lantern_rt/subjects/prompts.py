"""Prompts in plain text or as token ids, the prefix of tokens that they become, and class ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field

from ..errors import RequestError
from ..inputs import check_int, convert_read_errors, convert_to_list, format_value, read_regular_file
from ..runtime.engine import Ints
from .base import Option, Prefix, RequestContext, Row, Subject, Words

# The model's tokens limit a prompt. Usual text has 3 to 5 characters per token, so a far longer text is not tokenized.
_CHARACTERS_PER_TOKEN = 16
_MIN_CHARACTERS = 2000  # allowed for every model: some models drop the last tokens of a long prompt
_MAX_TOKEN_ID = 2**31 - 1
_MAX_FILE_BYTES = 1 << 24
_CLASS_HELP = "Class id, for class-conditional bundles; may be given several times."
_TOKENS_HELP = "File of a prompt as token ids, such as [1, 2, 3], or of a list of prompts."


class Text(Subject):
    option = Option("prompt", list[str], "TEXT", "Prompt, as an alternative to arguments; may be given several times.")
    words = Words("prompts", "prompt", "prompt", option, json_type=str)
    conditions = frozenset(["words", "text", "tokens"])
    description = "a prompt"
    item_name = "prompt"
    title = "{item}"

    @classmethod
    def make(cls, item: Any, name: str, context: RequestContext) -> Self:
        return cls(item, make_text_prefix(item, name, context))


def _read_token_ids(path: Path) -> Any:
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
        Option("token_ids", Path, "JSON", _TOKENS_HELP, _read_token_ids),
        chunk_type=Annotated[str, Field(pattern=r"^[0-9]{1,10}( [0-9]{1,10})*$")],
        restore=lambda text: [*map(int, text.split())],
    )
    conditions = Text.conditions
    description = "token ids"
    item_name = "token_ids"
    title = "tokens {index}"
    label: tuple[int, ...]

    @classmethod
    def name_items(cls, value: Any) -> list[tuple[str, Any]]:
        ids = convert_to_list(value)
        is_batch = bool(ids) and all(isinstance(row, list | tuple | np.ndarray) for row in ids)
        return super().name_items(ids if is_batch else [ids])

    @classmethod
    def make(cls, item: Any, name: str, context: RequestContext) -> Self:
        ids = [check_int(name, value, -1, 0, _MAX_TOKEN_ID) for value in item]
        condition = context.condition
        before, after = context.template_tokens
        text = ids[len(before) : len(ids) - len(after)]
        if ids != [*before, *text, *after]:
            template = f"{[*before]} before the text and {[*after]} after the text"
            expected = f"{template}, as size {context.size.name} requires"
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
        return " ".join(map(str, self.label))


class ClassId(Subject):
    option = Option("class_id", list[int], "ID", _CLASS_HELP)
    words = Words("class_ids", "class_id", "class_id", option, json_type=int, chunk_type=int)
    conditions = frozenset(["class"])
    description = "class ids"
    item_name = "class id"
    title = "class {item}"

    @classmethod
    def make(cls, item: Any, name: str, context: RequestContext) -> Self:
        class_id = check_int(name, item, 0, 0, (context.condition.classes or 1) - 1)
        inputs = {"class_ids": np.array([class_id], np.int64)}
        is_real_token = np.ones(context.condition.prefix, np.bool_)
        first = [context.condition.find_first_position(row) for row in (class_id, None)]
        rows = (Row(inputs, i, is_real_token, first_position=position) for i, position in enumerate(first))
        return cls(class_id, Prefix(*rows))


def make_text_prefix(prompt: Any, name: str, context: RequestContext, template: str | None = None) -> Prefix:
    """Check and tokenize a prompt. `name`: field of errors. `template`: None for the bundle's."""
    assert context.tokenizer is not None
    layout = context.condition.layout
    before, after = context.template_tokens
    try:
        _check_text(prompt, context.condition.prefix)
        text = prompt if layout is None else layout.fill(prompt, context.size.name, template)
        ids = context.tokenizer.encode(text, context.condition.prefix - len(before) - len(after))
    except RequestError as error:
        error.field = name
        error.suggestions = tuple(context.tokenizer.find_nearest_examples(str(prompt)[:_MIN_CHARACTERS]))
        similar = f"similar valid prompts: {', '.join(map(repr, error.suggestions))}" if error.suggestions else ""
        error.remedy = "; ".join(filter(None, [error.remedy, similar]))
        raise
    return make_token_prefix(context, ids)


def _check_text(prompt: Any, max_tokens: int) -> None:
    if not isinstance(prompt, str):
        raise RequestError(found=format_value(prompt), expected="text or a list of texts")
    max_characters = max(_MIN_CHARACTERS, _CHARACTERS_PER_TOKEN * max_tokens)
    if len(prompt) > max_characters:
        raise RequestError(found=f"{len(prompt):,} characters", expected=f"at most {max_characters:,}")
    if not prompt.strip():
        raise RequestError(found="empty text", expected="a few words")
    # Python decodes bytes of command-line arguments that are not UTF-8 to surrogates.
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise RequestError(found=format_value(prompt), expected="text in UTF-8", remedy="type it again")


def make_token_prefix(context: RequestContext, ids: Ints) -> Prefix:
    """Build the prefix from the ids of a prompt, int64 `[n]`, without the ids that the template adds."""
    condition = context.condition
    layout = condition.layout
    if condition.padding is not None:
        return _make_padded_prefix(ids, condition.prefix, condition.padding)
    if layout is None:
        # The prefix is left-padded: its last positions are real.
        is_real_token = np.arange(condition.prefix) >= condition.prefix - len(ids)
        mask = {"token_mask": np.ones((1, len(ids)), np.int64)} if condition.kind == "text" else {}
        inputs = {"token_ids": ids[None], **mask}
        return Prefix(Row(inputs, 0, is_real_token), Row(inputs, 1, is_real_token))
    before, after = context.template_tokens
    cond = np.array([*before, *ids, *after], np.int64)
    uncond = cond.copy() if layout.uncond is None else np.array([*layout.uncond, *context.size.tokens], np.int64)
    if layout.uncond_fill is not None:
        uncond[len(before) : len(cond) - len(after)] = layout.uncond_fill  # replaces each id of the text
    inputs = {"token_ids": cond[None], "uncond_ids": uncond[None]}
    return Prefix(*(_make_row(context, inputs, i, tokens) for i, tokens in enumerate((cond, uncond))))


def _make_padded_prefix(ids: Ints, prefix_length: int, padding: int) -> Prefix:
    """Build the prefix of a text with one padding at its end, or none if the text fills the prefix.

    The first code is sampled after the padding, which no code attends to. The unconditional row is a padding alone.
    """
    tokens = np.append(ids, padding)[:prefix_length][None]
    is_real_token = np.arange(tokens.size) < len(ids)
    inputs = {"token_ids": tokens, "token_mask": is_real_token[None].astype(np.int64)}
    cond = Row(inputs, 0, is_real_token, first_position=prefix_length)
    return Prefix(cond, Row(inputs, 1, np.zeros(1, np.bool_), first_position=prefix_length))


def _make_row(context: RequestContext, inputs: dict[str, Ints], output: int, tokens: Ints) -> Row:
    is_real_token = np.ones(len(tokens), np.bool_)
    return Row(inputs, output, is_real_token, tokens, first_position=context.size.first_position)
