"""Prompts and seeds on which decoding methods are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..bundle.files import Bundle
from ..errors import RequestError
from ..inputs import check_int, convert_read_errors, read_regular_file, split_lines
from ..prompts import build_prompt_requests, load_bundle_tokenizer
from ..requests import check_request
from ..text.embeddings import read_embeddings

MAX_PROMPTS = 100_000
CLASSES = 64  # Default number of class ids.
_PROMPTS_LIMIT = 1 << 24  # Maximum size of a text file in bytes.


@dataclass(frozen=True)
class Prompts:
    """Prompts, class ids or text embeddings to generate images from.

    Args:
        input_kind: parameter of a pipeline call that takes the items: `prompts`, `class_ids` or `embeddings`.
        items: texts, class ids, or pairs of embeddings `[tokens, dim]` and mask `[tokens]`.
    """

    input_kind: str
    items: Sequence[Any]

    @property
    def labels(self) -> list[str]:
        if self.input_kind == "embeddings":
            return [f"embedding {i}" for i in range(len(self.items))]
        return [item if isinstance(item, str) else f"class {item}" for item in self.items]

    def request(self, batch_index: int, batch_size: int, first_seed: int = 10_000) -> dict[str, Any]:
        """Return the keyword arguments of the pipeline call that generates batch `batch_index`.

        After the last prompt, the first prompt follows again, with new seeds. `first_seed` is that of batch 0.
        """
        return self._make_call_arguments(range(batch_index * batch_size, (batch_index + 1) * batch_size), 1, first_seed)

    def requests(self, batch_size: int, num_seeds: int, first_seed: int) -> Iterator[dict[str, Any]]:
        """Yield keyword arguments of the pipeline calls that generate `num_seeds` images of every prompt."""
        count = len(self.items) * num_seeds
        for start in range(0, count, batch_size):
            yield self._make_call_arguments(range(start, min(start + batch_size, count)), num_seeds, first_seed)

    def _make_call_arguments(self, image_indices: range, num_seeds: int, first_seed: int) -> dict[str, Any]:
        chosen: Any = [self.items[number // num_seeds % len(self.items)] for number in image_indices]
        if self.input_kind == "embeddings":
            chosen = tuple(map(np.stack, zip(*chosen, strict=True)))  # [images, tokens, dim], [images, tokens]
        return {self.input_kind: chosen, "seed": [first_seed + number for number in image_indices]}


def read_bundle_prompts(bundle: Bundle, path: Path | None = None, count: int | None = None) -> Prompts:
    """Read and check prompts, class ids or text embeddings, on which methods of a bundle are compared.

    Args:
        path: text file with one prompt per line, or .npz file of text embeddings. None: the bundle's example prompts.
        count: maximum number of prompts. Class ids are spread over all classes. None: all prompts, or 64 classes.

    Raises:
        RequestError: the bundle takes class ids but `path` is given, there are no prompts, or a prompt is invalid. For
            an invalid prompt, the error's field is `file:line`.
    """
    manifest = bundle.manifest
    kind = manifest.condition.kind
    limit = check_int("count", count, CLASSES if kind == "class" else MAX_PROMPTS, 1, MAX_PROMPTS)
    if kind == "class":
        if path is not None:
            raise RequestError(f"bundle {manifest.name} takes class ids", field="prompts", remedy="omit --prompts")
        classes = manifest.condition.classes or 1
        number = min(limit, classes)
        return Prompts("class_ids", [i * classes // number for i in range(number)])
    if path is None and "prompts" in manifest.files:
        path = bundle.path("prompts")
    if path is None:
        remedy = "give --prompts FILE"
        if kind == "embeddings":
            remedy += " with an .npz of text embeddings, or export it with --text-encoder"
        raise RequestError(f"bundle {manifest.name} contains no prompts", field="prompts", remedy=remedy)
    if kind == "embeddings":
        rows, masks = read_embeddings(path)
        check_request(manifest, None, embeddings=(rows, masks))
        return Prompts("embeddings", list(zip(rows, masks, strict=True))[:limit])
    prompts = read_prompts(path)[:limit]
    tokenizer = load_bundle_tokenizer(bundle)
    assert tokenizer is not None
    for line, prompt in prompts:
        try:
            build_prompt_requests(manifest.condition, tokenizer, manifest.size(), [prompt])
        except RequestError as error:
            error.field = f"{path}:{line}"
            raise
    return Prompts("prompts", [prompt for _, prompt in prompts])


def read_prompts(path: Path) -> list[tuple[int, str]]:
    """Read the prompts in a text file, one per nonempty line, with their line numbers."""
    with convert_read_errors(path, "a text file of prompts", RequestError, "give one prompt per line, in UTF-8"):
        lines = [line.strip().strip("\0") for line in split_lines(read_regular_file(path, _PROMPTS_LIMIT).decode())]
        if any("\0" in line for line in lines):
            raise ValueError("has a NUL character in a line")  # UTF-16 without a byte order mark
    prompts = [(number, line) for number, line in enumerate(lines, 1) if line]
    if not prompts:
        raise RequestError(field=f"prompts {path}", found="no prompt", expected="one per line")
    return prompts
