"""The negative prompt: a text that guidance leads away from. Its row replaces the unconditional row of the prefix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from .base import Option, Part, Prefix, RequestContext, Row, Words, make_missing_guidance_error
from .prompts import make_text_prefix

_NAME = "negative_prompt"


@dataclass(eq=False)
class NegativePrompt(Part):
    option = Option(_NAME, str, "TEXT", "Prompt that guidance leads away from.")
    words = (Words(_NAME, _NAME, _NAME, option, json_type=str, needs_text=True),)
    text: Any
    row: Row = field(init=False)

    def finish(self, context: RequestContext) -> Self:
        if not context.uses_guidance:
            raise make_missing_guidance_error(_NAME)
        layout = context.condition.layout
        template = None if layout is None else layout.negative
        self.row = make_text_prefix(self.text, _NAME, context, template).cond
        return self

    def change_prefix(self, prefix: Prefix) -> Prefix:
        return prefix._replace(uncond=self.row)

    @property
    def record(self) -> Mapping[str, str]:
        return {_NAME: self.text}
