"""Hints for names that users of other programs type, and for misspelt names."""

from __future__ import annotations

from collections.abc import Iterable

# Names in diffusers, vLLM and other programs, without dashes and underscores, and what to use here.
_OTHER_NAMES = {
    "apikey": "--api-key-file FILE or the variable LANTERN_RT_API_KEY",
    "callbackonstepend": "callback_on_step",
    "generate": "run",
    "generator": "seed",
    "guidancescale": "cfg_scale",
    "height": "size, as WIDTHxHEIGHT",
    "inferencesteps": "nothing: an image has tokens, not steps",
    "list": "models",
    "maxnumseqs": "--batch",
    "model": "the bundle as an argument",
    "numimagesperprompt": "num_images",
    "numinferencesteps": "nothing: an image has tokens, not steps",
    "numoutputs": "num_images",
    "servedmodelname": "--alias NAME=MODEL",
    "steps": "nothing: an image has tokens, not steps",
    "width": "size, as WIDTHxHEIGHT",
    "workers": "nothing: one process shares its passes among all requests",
}
_MAX_TYPOS = 2  # letters added, missing or replaced, up to which a name counts as misspelt


def suggest_name(name: str, known_names: Iterable[str]) -> str:
    """Return a remedy for an unknown name: what replaces a name of another program, or the known name that was meant.

    The result is empty if no known name is within two letters.
    """
    plain = name.lower().replace("-", "").replace("_", "")
    if plain in _OTHER_NAMES:
        return f"use {_OTHER_NAMES[plain]}"
    distances = {known: _count_typos(name, known) for known in known_names}
    nearest = min(distances, key=distances.__getitem__, default="")
    is_near = nearest and distances[nearest] <= min(_MAX_TYPOS, len(name.strip("-")) // 2)
    return f"did you mean {nearest}?" if is_near else ""


def _count_typos(one: str, other: str) -> int:
    """Return the edit distance of two names."""
    typos = list(range(len(other) + 1))  # of the letters of `one` so far, for each start of `other`
    for i, letter in enumerate(one, 1):
        diagonal, typos[0] = typos[0], i
        for j, expected in enumerate(other, 1):
            replaced = diagonal + (letter != expected)
            diagonal = typos[j]
            typos[j] = min(typos[j] + 1, typos[j - 1] + 1, replaced)
    return typos[-1]
