"""Hints for names that users of other programs type, and for misspelt names."""

from __future__ import annotations

from collections.abc import Collection

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
_MAX_EDITS = 2  # changed letters up to which a name counts as misspelt


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
    max_edits = min(_MAX_EDITS, len(name) // 3)  # two other letters make any other name of a short one
    similar = [known for known in known_names if abs(len(known) - len(name)) <= max_edits]
    edits, nearest = min([(_count_edits(name, known), known) for known in similar], default=(_MAX_EDITS + 1, ""))
    return f"did you mean {nearest}?" if edits <= max_edits else ""


def _count_edits(name: str, known: str) -> int:
    """Return how many letters to insert, delete or replace, to make one name of the other (Levenshtein distance)."""
    counts: list[int] = [*range(len(known) + 1)]  # from the first letters of `name` to each beginning of `known`
    for i, letter in enumerate(name):
        before = counts
        counts = [i + 1]
        for j, other in enumerate(known):
            counts.append(min(before[j + 1] + 1, counts[j] + 1, before[j] + (letter != other)))
    return counts[-1]
