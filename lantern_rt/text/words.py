"""Captions of known words as ids, read from a bundle's `tokenizer.json`.

The file is in Hugging Face's `tokenizers` layout, so that other programs read it too:

    {"version": "1.0", "truncation": null, "padding": null, "post_processor": null, "decoder": null,
     "added_tokens": [],
     "normalizer": {"type": "Lowercase"},
     "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[a-z]+"}, "behavior": "Removed", "invert": true},
     "model": {"type": "WordLevel", "unk_token": "<unk>", "vocab": {"<pad>": 0, "<unk>": 1, "a": 2, ...}}}

Ids are 0 .. n - 1 without gaps; every word but the two special ones is made of the letters a to z. Of the
other fields only `normalizer` and `pre_tokenizer` are looked at: if given, they must say the above.

Does not know graphs. A word that the model was not trained on is an error, not `<unk>`: the image would
silently lack what was asked for. For the same reason letters and digits outside a-z count as words.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BundleError, RequestError

PAD, UNKNOWN = "<pad>", "<unk>"
_WORD = re.compile(r"[^\W_]+")
_FILE_LIMIT = 1 << 24  # bytes
_LISTED = 100  # known words an error message may list
_NAMED = 3  # unknown words it names


@dataclass(frozen=True)
class WordTokenizer:
    """A vocabulary: `ids` maps every word, special ones included, to its id."""

    ids: dict[str, int]

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The words that a prompt may use, sorted."""
        return tuple(sorted(self.ids.keys() - {PAD, UNKNOWN}))

    def encode(self, prompt: str, slots: int) -> NDArray[np.int64]:
        """Word ids `[slots]`, padded on the right with 0. Case and punctuation do not matter."""
        words = _WORD.findall(prompt.lower())
        if not words:
            raise RequestError(f"prompt: found no word in it, expected 1 to {slots} words such as {self._examples()}")
        if len(words) > slots:
            raise RequestError(
                f"prompt: found {len(words)} words, expected at most {slots}; leave out {len(words) - slots}"
            )
        if unknown := [word for word in dict.fromkeys(words) if word not in self.ids]:
            raise RequestError(self._explain(unknown))
        ids = np.zeros(slots, np.int64)
        ids[: len(words)] = [self.ids[word] for word in words]
        return ids

    def _explain(self, unknown: list[str]) -> str:
        named = []
        for word in unknown[:_NAMED]:
            close = difflib.get_close_matches(word[:40], self.words, n=1)
            named.append(repr(_cut(word)) + (f" (did you mean {close[0]!r}?)" if close else ""))
        more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
        rest = f" and {len(self.words) - _LISTED} more" if len(self.words) > _LISTED else ""
        known = " ".join(self.words[:_LISTED])
        plural = "words" if len(unknown) > 1 else "word"
        return f"prompt: found unknown {plural} {', '.join(named)}{more}; this model knows: {known}{rest}"

    def _examples(self) -> str:
        return ", ".join(self.words[:3])


def read_tokenizer(path: Path) -> WordTokenizer:
    """Read and check a `tokenizer.json`."""
    try:
        with path.open("rb") as file:
            text = file.read(_FILE_LIMIT + 1)
        if len(text) > _FILE_LIMIT:
            raise ValueError(f"more than {_FILE_LIMIT:,} bytes")
        data = json.loads(text.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        brief = " ".join(str(error).split())[:160]
        raise BundleError(f"{path}: expected a tokenizer in JSON, found {brief}; export the bundle again") from error
    for field, found, expected in _claims(data):
        if found != expected:
            raise BundleError(f"{path}: field `{field}`: found {_cut(repr(found))}, expected {expected!r}")
    vocabulary = data["model"].get("vocab")
    if not isinstance(vocabulary, dict) or any(type(i) is not int for i in vocabulary.values()):
        raise BundleError(f"{path}: field `model.vocab`: expected a map from words to ids")
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise BundleError(f"{path}: field `model.vocab`: expected the ids 0 .. {len(vocabulary) - 1}, each once")
    if vocabulary.get(PAD) != 0 or vocabulary.get(UNKNOWN) != 1 or len(vocabulary) < 3:
        raise BundleError(f"{path}: field `model.vocab`: expected {PAD} with id 0, {UNKNOWN} with id 1, then words")
    if odd := [word for word in vocabulary if word not in (PAD, UNKNOWN) and not re.fullmatch("[a-z]+", word)]:
        raise BundleError(f"{path}: field `model.vocab`: found {_cut(repr(odd[0]))}, expected words of letters a to z")
    return WordTokenizer(vocabulary)


def _claims(data: Any) -> list[tuple[str, Any, Any]]:
    """Fields that must have one value: name, found, expected."""
    data = data if isinstance(data, dict) else {}
    model = data.get("model")
    model = model if isinstance(model, dict) else {}
    split = {"type": "Split", "pattern": {"Regex": "[a-z]+"}, "behavior": "Removed", "invert": True}
    claims: list[tuple[str, Any, Any]] = [
        ("model.type", model.get("type"), "WordLevel"),
        ("model.unk_token", model.get("unk_token"), UNKNOWN),
    ]
    if data.get("normalizer") is not None:
        claims.append(("normalizer", data["normalizer"], {"type": "Lowercase"}))
    if data.get("pre_tokenizer") is not None:
        claims.append(("pre_tokenizer", data["pre_tokenizer"], split))
    return claims


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
