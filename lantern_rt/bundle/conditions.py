"""Manifest entry of the condition: class, prompt or text embeddings; `docs/bundle-format.md` describes the fields."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..methods import ExtendedModel, FrozenModel
from .numbers import Count, TokenId


class TokenLayout(FrozenModel):
    """How a prompt becomes token ids, for conditions of kind `tokens`."""

    template: Annotated[str, Field(pattern=r"\{prompt\}")] = "{prompt}"
    before: tuple[TokenId, ...] = ()
    after: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    strip: bool = False
    uncond: tuple[TokenId, ...] | None = None
    uncond_fill: TokenId | None = None
    negative: Annotated[str, Field(pattern=r"\{prompt\}")] | None = None

    def fill(self, prompt: str, size_name: str, template: str | None = None) -> str:
        """Return the text to tokenize, in which the template, or another one, surrounds a prompt."""
        text = prompt.strip() if self.strip else prompt
        return (template or self.template).replace("{size}", size_name).replace("{prompt}", text)

    def surrounding_tokens(self, size_tokens: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids before and after the text in a conditional row, which ends with the tokens of a size."""
        return self.before, (*self.after, *size_tokens)

    @model_validator(mode="after")
    def _check_uncond_fields(self) -> TokenLayout:
        if (self.uncond is None) == (self.uncond_fill is None):
            raise ValueError("set exactly one of `uncond` and `uncond_fill`")
        return self


class ConditionSpec(ExtendedModel):
    """Manifest entry of the condition, from which the graph `condition` computes the prefix embeddings."""

    added_fields = frozenset({"padding", "positions_per_class"})

    kind: Literal["class", "words", "embeddings", "text", "tokens"]
    prefix: Count
    classes: Count | None = None
    caption_dim: Count | None = None
    cleaning: Literal["llamagen"] | None = None
    layout: TokenLayout | None = None
    padding: TokenId | None = None
    positions_per_class: Count | None = None

    def find_first_position(self, class_id: int | None) -> int | None:
        """Return the position of the first code of a class, None for no class; None: codes follow the prefix."""
        if self.positions_per_class is None or self.classes is None:
            return None
        return (self.classes if class_id is None else class_id) * self.positions_per_class + self.prefix

    @model_validator(mode="after")
    def _check_fields_of_kind(self) -> ConditionSpec:
        for field, kind in (("classes", "class"), ("caption_dim", "embeddings"), ("layout", "tokens")):
            if (getattr(self, field) is not None) != (self.kind == kind):
                raise ValueError(f"`{field}` is required for kind `{kind}` and not allowed for other kinds")
        for name in ("cleaning", "padding"):
            if getattr(self, name) is not None and self.kind != "text":
                raise ValueError(f"`{name}` is only allowed for kind `text`")
        return self
