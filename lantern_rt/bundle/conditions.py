"""Manifest entry of the condition, the input from which images are generated: a class, a prompt or text embeddings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..methods import FrozenModel
from .numbers import Count, TokenId


class TokenLayout(FrozenModel):
    """How a prompt becomes token ids, for conditions of kind `tokens`.

    The text is tokenized without special tokens. The conditional row has `before`, the ids of the text, and `after`.
    Both rows end with the tokens of the image's `Size`. If there is a negative prompt, the conditional row of the
    negative prompt replaces the unconditional row.

    Args:
        template: text in which the prompt replaces `{prompt}` and the size's name replaces `{size}`.
        before: ids before the text.
        after: ids after the text.
        strip: whether white space around the prompt is removed.
        uncond: ids of the unconditional row; None: `uncond_fill` makes this row.
        uncond_fill: id that replaces each id of the text in the unconditional row, if `uncond` is None.
        negative: template of negative prompts; None: the same as `template`.
    """

    template: Annotated[str, Field(pattern=r"\{prompt\}")] = "{prompt}"
    before: tuple[TokenId, ...] = ()
    after: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    strip: bool = False
    uncond: tuple[TokenId, ...] | None = None
    uncond_fill: TokenId | None = None
    negative: Annotated[str, Field(pattern=r"\{prompt\}")] | None = None

    @model_validator(mode="after")
    def _check_uncond_fields(self) -> TokenLayout:
        if (self.uncond is None) == (self.uncond_fill is None):
            raise ValueError("set exactly one of `uncond` and `uncond_fill`")
        return self


class ConditionSpec(FrozenModel):
    """Manifest entry of the condition: the input from which images are generated, such as a prompt.

    The graph `condition` converts this input to prefix embeddings, which the target reads before the image. The graph
    returns `prefix_embeds` and `uncond_embeds`, float32 `[rows, prefix, width]`. The inputs of the graph depend on the
    kind of the condition:

    - `class`: `class_ids [rows]` int64.
    - `words`, captions of known words: `token_ids [rows, prefix]` int64, right-padded with 0.
    - `embeddings`, the caller's text embeddings: `caption_embeds [rows, prefix, caption_dim]`, left-padded with zeros,
      and `caption_mask [rows, prefix]` int64.
    - `text`, free text: `token_ids` and `token_mask [rows, tokens]` int64, left-padded, at most `prefix` long.
    - `tokens`, free text in a vocabulary with image tokens: `token_ids [rows, tokens]` and
      `uncond_ids [rows, uncond_tokens]` int64, both at most `prefix` long. The outputs have the same lengths.

    Args:
        kind: kind of the condition.
        prefix: maximum number of positions of the prefix embeddings.
        classes: number of classes, for kind `class`.
        caption_dim: size of a text embedding, for kind `embeddings`.
        cleaning: rules by which prompts are cleaned before tokenization, for kind `text`; None: no cleaning.
        layout: layout of the token ids, for kind `tokens`.
    """

    kind: Literal["class", "words", "embeddings", "text", "tokens"]
    prefix: Count
    classes: Count | None = None
    caption_dim: Count | None = None
    cleaning: Literal["llamagen"] | None = None
    layout: TokenLayout | None = None

    def surrounding_tokens(self, size_tokens: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids before the text and the ids after it in a conditional row, which ends with `size_tokens`."""
        return ((), ()) if self.layout is None else (self.layout.before, (*self.layout.after, *size_tokens))

    @model_validator(mode="after")
    def _check_fields_of_kind(self) -> ConditionSpec:
        for field, kind in (("classes", "class"), ("caption_dim", "embeddings"), ("layout", "tokens")):
            if (getattr(self, field) is not None) != (self.kind == kind):
                raise ValueError(f"`{field}` is required for kind `{kind}` and not allowed for other kinds")
        if self.cleaning is not None and self.kind != "text":
            raise ValueError("`cleaning` is only allowed for kind `text`")
        return self
