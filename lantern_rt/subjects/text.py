"""Prompts in plain text, and the prefix of tokens that they become."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from ..errors import RequestError
from ..inputs import format_value
from ..runtime.engine import Ints
from .base import Option, Prefix, RequestContext, Row, Subject, Words

# The model's tokens limit a prompt. Usual text has 3 to 5 characters per token, so a far longer text is not tokenized.
_CHARACTERS_PER_TOKEN = 16
_MIN_CHARACTERS = 2000  # allowed for every model: some models drop the last tokens of a long prompt


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


def _make_row(context: RequestContext, inputs: dict[str, Ints], output: int, tokens: Ints) -> Row:
    is_real_token = np.ones(len(tokens), np.bool_)
    return Row(inputs, output, is_real_token, tokens, first_position=context.size.first_position)
