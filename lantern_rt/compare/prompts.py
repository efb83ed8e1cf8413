"""The prompts and seeds on which methods are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..bundle.files import Bundle
from ..errors import RequestError
from ..inputs import check_int, read_plain_file, reading
from ..prompts import bundle_tokenizer, text_requests
from ..requests import check_request
from ..text.embeddings import read_embeddings

MAX_PROMPTS = 100_000
CLASSES = 64  # class ids where no count is given, spread over all
_PROMPTS_LIMIT = 1 << 24  # bytes of a file


@dataclass(frozen=True)
class Prompts:
    """What images are drawn of.

    Args:
        kind: `prompts`, `class_ids` or `embeddings`, as a pipeline call names them.
        items: texts, ids, or pairs of embeddings `[tokens, dim]` and mask `[tokens]`.
    """

    kind: str
    items: Sequence[Any]

    @property
    def labels(self) -> list[str]:
        """Each as text."""
        if self.kind == "embeddings":
            return [f"embedding {i}" for i in range(len(self.items))]
        return [item if isinstance(item, str) else f"class {item}" for item in self.items]

    def request(self, index: int, images: int, first_seed: int = 10_000) -> dict[str, Any]:
        """Arguments of a pipeline call for batch `index` of an endless row: the prompts over and over, new seeds."""
        return self._arguments(range(index * images, (index + 1) * images), 1, first_seed)

    def requests(self, images: int, seeds: int, first_seed: int) -> Iterator[dict[str, Any]]:
        """Arguments of pipeline calls for all prompts with `seeds` images each, `images` at a time."""
        count = len(self.items) * seeds
        for start in range(0, count, images):
            yield self._arguments(range(start, min(start + images, count)), seeds, first_seed)

    def _arguments(self, numbers: range, seeds: int, first_seed: int) -> dict[str, Any]:
        """For images of these numbers; embeddings are stacked: `[images, tokens, dim]` and `[images, tokens]`."""
        chosen: Any = [self.items[number // seeds % len(self.items)] for number in numbers]
        if self.kind == "embeddings":
            chosen = tuple(map(np.stack, zip(*chosen, strict=True)))
        return {self.kind: chosen, "seed": [first_seed + number for number in numbers]}


def read_bundle_prompts(bundle: Bundle, path: Path | None = None, count: int | None = None) -> Prompts:
    """Read prompts, each checked to be one that a bundle can draw.

    Args:
        bundle: what it takes decides what is read.
        path: a text file, one prompt a line, by default the bundle's own; for text embeddings an .npz of them.
        count: the first so many at most; class ids are spread over all classes. By default all, of classes 64.

    Raises:
        RequestError: the bundle takes nothing of the kind, there are none, or one cannot be drawn: `file:line`.
    """
    manifest = bundle.manifest
    kind = manifest.condition.kind
    most = check_int("count", count, CLASSES if kind == "class" else MAX_PROMPTS, 1, MAX_PROMPTS)
    if kind == "class":
        if path is not None:
            raise RequestError(f"bundle {manifest.name} takes class ids", field="prompts", remedy="leave --prompts out")
        classes = manifest.condition.classes or 1
        number = min(most, classes)
        return Prompts("class_ids", [i * classes // number for i in range(number)])
    if path is None and "prompts" in manifest.files:
        path = bundle.path("prompts")
    if path is None:
        remedy = "give --prompts FILE"
        if kind == "embeddings":
            remedy += " with an .npz of text embeddings, or export it with --text-encoder"
        raise RequestError(f"bundle {manifest.name} has no prompts of its own", field="prompts", remedy=remedy)
    if kind == "embeddings":
        rows, masks = read_embeddings(path)
        check_request(manifest, None, embeddings=(rows, masks))
        return Prompts("embeddings", list(zip(rows, masks, strict=True))[:most])
    prompts = read_prompts(path)[:most]
    tokenizer = bundle_tokenizer(bundle)
    assert tokenizer is not None
    for line, prompt in prompts:
        try:
            text_requests(manifest.condition, tokenizer, manifest.size(), [prompt])
        except RequestError as error:
            error.field = f"{path}:{line}"
            raise
    return Prompts("prompts", [prompt for _, prompt in prompts])


def read_prompts(path: Path) -> list[tuple[int, str]]:
    """Lines of a text file that are not empty, with their numbers. Raises: RequestError: there are none."""
    with reading(path, "a text file of prompts", RequestError, "give one prompt a line, in UTF-8"):
        text = read_plain_file(path, _PROMPTS_LIMIT).decode()
    prompts = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not prompts:
        raise RequestError(field=f"prompts {path}", found="no prompt", expected="one a line")
    return prompts
