"""All kinds of subjects and parts. Python, the command line, HTTP and recipes take their inputs from these tables."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ..errors import RequestError
from .base import Part, Subject, Words
from .embeddings import Embedding
from .image_input import ImageInput
from .negative_prompt import NegativePrompt
from .prompts import ClassId, Text, TokenIds

SUBJECTS: tuple[type[Subject], ...] = (Text, ClassId, TokenIds, Embedding)
# The first kind that a condition takes is the one that errors ask for.
SUBJECTS_BY_CONDITION = {condition: kind for kind in reversed(SUBJECTS) for condition in kind.conditions}
# A part may read what the parts before it changed. The parts of users come last.
PARTS: list[type[Part]] = [NegativePrompt, ImageInput]
_ALL_WORDS = [kind.words for kind in SUBJECTS] + [words for kind in PARTS for words in kind.words]
WORDS: dict[str, Words] = {words.parameter: words for words in _ALL_WORDS}
# Parameters of a pipeline call and of a server: parameter -> (command-line option, HTTP field).
PARAMETER_NAMES = {
    **{words.parameter: (words.option.name, words.field) for words in _ALL_WORDS},
    "num_images": ("count", "n"),
    "quality": ("quality", "quality_budget"),
    "max_images_per_pass": ("batch", "max_images_per_pass"),
    "max_queued_images": ("waiting", "max_queued_images"),
}


def choose_subject_kind(inputs: Mapping[str, Any], condition_kind: str, owner: str) -> type[Subject]:
    """Return the kind of the only subject in a request, which a condition of `owner` must take."""
    accepted = SUBJECTS_BY_CONDITION[condition_kind]
    present = list_subjects(inputs)
    wrong = next((kind for kind in present if kind is not accepted), None)
    if len(present) != 1 or condition_kind not in present[0].conditions:
        parameter = accepted.words.parameter
        found = wrong.description if wrong else "nothing to generate"
        remedy = accepted.remedy if wrong is Text else ""
        expected = f"{accepted.description}, as {owner} requires"
        raise RequestError(field=parameter, found=found, expected=expected, remedy=remedy)
    for words in WORDS.values():
        if words.needs_text and words.parameter in inputs and accepted is not Text:
            raise RequestError(f"{owner} takes {accepted.description}", field=words.parameter, remedy="omit it")
    return present[0]


def list_subjects(inputs: Mapping[str, Any]) -> list[type[Subject]]:
    return [kind for kind in SUBJECTS if kind.words.parameter in inputs]


def restore_subject(texts: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the parameter of a request that text chunks of an image record, by its name; empty if there is none."""
    for words in (kind.words for kind in SUBJECTS if kind.words.chunk in texts):
        with suppress(ValidationError):
            return {words.parameter: words.restore(TypeAdapter(words.chunk_type).validate_strings(texts[words.chunk]))}
    return {}
