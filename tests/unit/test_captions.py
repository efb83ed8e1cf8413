"""Prompts cleaned as LlamaGen's text encoder wrapper cleans them; pairs recorded from the published code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lantern_rt.text.captions import clean_caption

DATA = Path(__file__).parent.parent / "data" / "llamagen-captions"
PAIRS: list[tuple[str, str]] = [tuple(pair) for pair in json.loads((DATA / "cleaned.json").read_text("utf-8"))]


def test_recorded_prompts_are_cleaned_as_the_published_code_did() -> None:
    assert len(PAIRS) > 200
    wrong = {text: (clean_caption(text), cleaned) for text, cleaned in PAIRS if clean_caption(text) != cleaned}
    assert not wrong


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("  A Red CUBE  ", "a red cube"),
        ("see https://example.com/a-b_c?d", "see ?d"),
        ("<b>bold</b><script>var x</script>", "bold"),
        ("中文", ""),
        ("this-is-my-cute-cat", "this is my cute cat"),
    ],
)
def test_some_steps_in_plain_sight(text: str, cleaned: str) -> None:
    assert clean_caption(text) == cleaned
