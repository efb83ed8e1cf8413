"""The negative prompt: a text that guidance leads away from. Its row replaces the unconditional row of the prefix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ..bundle.manifest import Manifest
from .base import Option, Part, PartInput, Prefix, RequestContext, Row, Words, make_missing_guidance_error
from .text import make_text_prefix

_NAME = "negative_prompt"


@dataclass(frozen=True, eq=False)
class NegativePrompt(Part):
    text: str
    row: Row

    def change_prefix(self, prefix: Prefix) -> Prefix:
        return prefix._replace(uncond=self.row)

    @property
    def record(self) -> Mapping[str, str]:
        return {_NAME: self.text}


@dataclass(frozen=True)
class NegativePromptInput(PartInput):
    option = Option(_NAME, str, "TEXT", "Prompt that guidance leads away from.")
    words = (Words(_NAME, _NAME, _NAME, option, json_type=str, needs_text=True),)
    text: Any

    @classmethod
    def read(cls, inputs: Mapping[str, Any], manifest: Manifest) -> Self:
        return cls(inputs[_NAME])

    def finish(self, context: RequestContext) -> NegativePrompt:
        if not context.uses_guidance:
            raise make_missing_guidance_error(_NAME)
        layout = context.condition.layout
        template = None if layout is None else layout.negative
        return NegativePrompt(self.text, make_text_prefix(self.text, _NAME, context, template).cond)
