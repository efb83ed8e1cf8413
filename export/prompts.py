"""Prompts that travel with a bundle, on which `bench`, `eval` and `push` generate images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import RequestError
from .model import BundleContents

DEFAULT_PROMPTS = (
    "a red fox in deep snow",
    "a bowl of oranges on a wooden table",
    "a lighthouse on a cliff at sunset",
    "two children flying a kite on a beach",
    "a cup of coffee beside an open book",
    "an old bicycle leaning against a brick wall",
    "a bird with blue feathers on a branch",
    "a street in the rain at night with neon signs",
    "a watercolor painting of a mountain lake",
    "a close-up photo of a sunflower",
    "a small wooden boat on a calm river",
    "an astronaut riding a horse in a desert",
)


def add_prompts(contents: BundleContents, prompts: Sequence[str] = ()) -> BundleContents:
    """Return the contents with these prompts or, without any, with `DEFAULT_PROMPTS` if the model takes text."""
    takes_text = contents.manifest_fields["condition"].kind in ("text", "tokens")
    if prompts and not takes_text:
        raise RequestError("the model takes no prompts", field="prompts", remedy="leave it out")
    if not takes_text:
        return contents
    text = "".join(f"{prompt}\n" for prompt in prompts or DEFAULT_PROMPTS)
    return replace(contents, extra_files={**contents.extra_files, "prompts": ("prompts.txt", text.encode())})
