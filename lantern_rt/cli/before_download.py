"""Checks of the options of `run` before a published model is downloaded, with the facts in the table of models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import RequestError
from ..inputs import format_value
from ..output.formats import OutputFormat
from ..output.names import choose_output_paths
from ..prompts import check_class_ids
from ..published import find_published_model
from ..requests import INPUT_DESCRIPTIONS, check_options


def check_run_options(
    name: str, options: Mapping[str, Any], output: str | None, force: bool, formats: Sequence[OutputFormat]
) -> list[Path]:
    """Check the options of `run` before a published model is downloaded.

    Args:
        options: the request options that the user gave; `embeddings` and `token_ids` are paths.

    Returns:
        A preliminary path for each image. Only its folder and ending are final.
    """
    model = find_published_model(name)
    present = [subject for subject in INPUT_DESCRIPTIONS if subject in options]
    if present != [model.subject] and (present, model.subject) != (["token_ids"], "prompts"):
        wrong = next((subject for subject in present if subject != model.subject), None)
        actual = INPUT_DESCRIPTIONS[wrong] if wrong else "nothing to generate"
        raise RequestError(
            field=model.subject, found=actual, expected=f"{INPUT_DESCRIPTIONS[model.subject]}, as {name} requires"
        )
    if "negative_prompt" in options and model.subject != "prompts":
        raise RequestError(
            f"{name} takes {INPUT_DESCRIPTIONS[model.subject]}", field="negative_prompt", remedy="omit it"
        )
    size = options.get("size")
    others = "," in model.sizes  # the table does not list all sizes
    if size is not None and not re.fullmatch(r"[1-9]\d{0,3}x[1-9]\d{0,3}" if others else model.sizes, size, re.ASCII):
        raise RequestError(field="size", found=format_value(size), expected=model.sizes)
    subject = options[present[0]]
    count = len(subject) if isinstance(subject, list) else 1
    if model.classes:
        check_class_ids(subject, model.classes)
    settings = {key: value for key, value in options.items() if key not in (*INPUT_DESCRIPTIONS, "negative_prompt")}
    method = check_options(count, **settings)
    if method is not None:
        problem = ""
        if method.requirements.order:
            problem = f"{name} generates one token after another"
        elif method.requirements.drafters and "drafter" not in model.files:
            problem = f"{name} has no drafter"
        if problem:
            raise RequestError(problem, field=f"method {method.method}", remedy="use another method, such as sjd")
    stems = ["image"] * (count * options.get("num_images", 1))
    return [path for path, _ in choose_output_paths(output, stems, force, lambda i, path: True, formats)]
