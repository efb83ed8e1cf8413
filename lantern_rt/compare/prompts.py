"""Prompts and seeds on which decoding methods are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bundle.files import Bundle
from ..errors import RequestError
from ..inputs import check_int, convert_read_errors, read_regular_file, split_lines
from ..subjects.base import RequestContext, Subject
from ..subjects.embeddings import Embedding, read_embeddings
from ..subjects.prompts import Text
from ..subjects.table import SUBJECTS_BY_CONDITION
from ..text.tokenizers import load_bundle_tokenizer

MAX_PROMPTS = 100_000
MAX_FIRST_SEED = 2**63  # leaves seeds for all images
CLASSES = 64  # Default number of class ids.
_PROMPTS_LIMIT = 1 << 24  # Maximum size of a text file in bytes.


@dataclass(frozen=True)
class Prompts:
    """Texts, class ids, or pairs of embeddings `[tokens, dim]` and mask `[tokens]`, to generate images from."""

    kind: type[Subject]
    items: Sequence[Any]

    @property
    def labels(self) -> list[str]:
        return [self.kind.title.format(item=item, index=i) for i, item in enumerate(self.items)]

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
        items = [self.items[number // num_seeds % len(self.items)] for number in image_indices]
        seeds = [first_seed + number for number in image_indices]
        return {self.kind.words.parameter: self.kind.join(items), "seed": seeds}


def read_bundle_prompts(bundle: Bundle, path: Path | None = None, count: int | None = None) -> Prompts:
    """Read and check at most `count` items, on which methods of a bundle are compared.

    Prompts or text embeddings are in the file `path`, by default the bundle's example prompts. Class ids are spread
    over all classes, by default 64 of them. The error of an invalid prompt has the field `file:line`.
    """
    manifest = bundle.manifest
    condition = manifest.condition
    kind = SUBJECTS_BY_CONDITION[condition.kind]
    limit = check_int("count", count, CLASSES if condition.classes else MAX_PROMPTS, 1, MAX_PROMPTS)
    if condition.classes:
        if path is not None:
            problem = f"bundle {manifest.name} takes {kind.description}"
            raise RequestError(problem, field="prompts", remedy="omit --prompts")
        number = min(limit, condition.classes)
        return Prompts(kind, [i * condition.classes // number for i in range(number)])
    if path is None and "prompts" in manifest.files:
        path = bundle.path("prompts")
    if path is None:
        remedy = "give --prompts FILE"
        if kind is Embedding:
            remedy += " with an .npz of text embeddings, or export it with --text-encoder"
        raise RequestError(f"bundle {manifest.name} contains no prompts", field="prompts", remedy=remedy)
    prompts = _FILE_READERS[kind](path)[:limit]
    context = RequestContext(condition, load_bundle_tokenizer(bundle), manifest.size(), uses_guidance=False)
    for place, item in prompts:
        try:
            kind.read(kind.join([item]), context)
        except RequestError as error:
            error.field = place
            raise
    return Prompts(kind, [item for _, item in prompts])


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


# How the items of a file are read, each with its place for errors.
_FILE_READERS: dict[type[Subject], Callable[[Path], list[tuple[str, Any]]]] = {
    Text: lambda path: [(f"{path}:{line}", prompt) for line, prompt in read_prompts(path)],
    Embedding: lambda path: [(str(path), item) for item in zip(*read_embeddings(path), strict=True)],
}
