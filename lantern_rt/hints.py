"""Hints for names that users of other programs type, and for misspelt names."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

# Names in diffusers, vLLM and other programs, without dashes and underscores, and what has their place here.
_NAMES_HERE = {
    "apikey": ("--api-key-file",),
    "callbackonstepend": ("callback_on_step",),
    "generate": ("run",),
    "generator": ("seed", "--seed"),
    "guidancescale": ("cfg_scale", "--cfg-scale"),
    "height": ("size", "--size"),
    "list": ("models",),
    "maxnumseqs": ("--batch",),
    "numimagesperprompt": ("num_images", "--count", "n"),
    "servedmodelname": ("--alias",),
    "width": ("size", "--size"),
}
_STEPS = "leave it out: an image has tokens, not steps"
_REASONS = {
    "enableprogressbar": "give a call progress=True",
    "model": "give the bundle as an argument",
    "numinferencesteps": _STEPS,
    "savepretrained": "copy the folder of the bundle",
    "steps": _STEPS,
    "to": 'give from_bundle a provider, such as provider="cuda"',
    "workers": "leave it out: one process shares its passes among all requests",
}
_MIN_SIMILARITY = 0.75  # share of letters in common from which a name counts as misspelt


def suggest_name(name: str, known_names: Collection[str]) -> str:
    """Return a remedy for an unknown name: what has its place here, or a known name that is alike; empty: neither."""
    plain = name.lower().replace("-", "").replace("_", "")
    if plain in _REASONS:
        return _REASONS[plain]
    if found := [known for known in _NAMES_HERE.get(plain, ()) if known in known_names]:
        return f"use {found[0]}"
    longer = [known for known in known_names if len(name) > 2 and known.startswith(name)]
    if len(longer) == 1:
        return f"did you mean {longer[0]}?"
    nearest = get_close_matches(name, known_names, 1, _MIN_SIMILARITY)
    return f"did you mean {nearest[0]}?" if nearest else ""
