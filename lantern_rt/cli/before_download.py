"""Checks of `run` with a published model before its download, as far as the command and the table of models allow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from ..inputs import format_value
from ..output.names import plan_outputs
from ..published import find_model
from ..requests import SUBJECTS, check_options
from .outputs import check_trace, writes_images
from .replay import check_recorded

if TYPE_CHECKING:
    from .options import EngineOptions

_SIZE = r"[1-9]\d{0,3}x[1-9]\d{0,3}"


def check_run(name: str, options: Mapping[str, Any], source: Path | None, engine: EngineOptions) -> int:
    """Check the options of `run`.

    Args:
        name: name of the model.
        options: options of a request, without None.
        source: PNG to generate again, None without.
        engine: options of the engine.

    Returns:
        The number of images.

    Raises:
        LanternError: no bundle of the model takes an option, or the PNG has no recipe.
    """
    engine.check()
    if source is not None:
        check_recorded(source, options)
        return 1
    model = find_model(name)
    present = [subject for subject in SUBJECTS if subject in options]
    allowed = ["prompts", "token_ids"] if model.subject == "prompts" else [model.subject]
    if len(present) != 1 or present[0] not in allowed:
        wrong = next(subject for subject in present if subject != model.subject)
        expected = f"{SUBJECTS[model.subject]}, as {name} requires"
        raise RequestError(field=model.subject, found=SUBJECTS[wrong], expected=expected)
    if "negative_prompt" in options and model.subject != "prompts":
        raise RequestError(f"{name} takes {SUBJECTS[model.subject]}", field="negative_prompt", remedy="omit it")
    size = options.get("size")
    pattern = _SIZE if "," in model.sizes else model.sizes  # "768x768, other shapes" or "256x256"
    if size is not None and not re.fullmatch(pattern, size, re.ASCII):
        raise RequestError(field="size", found=format_value(size), expected=model.sizes)
    subject = options[present[0]]
    count = 1 if present == ["token_ids"] and not isinstance(subject[:1], list) else len(subject)
    settings = {key: value for key, value in options.items() if key not in (*SUBJECTS, "negative_prompt")}
    method = check_options(count, **settings)
    if method is not None and (method.needs.order or (method.needs.drafters and "drafter" not in model.files)):
        problem = f"{name} has no drafter" if method.needs.drafters else f"{name} draws one token after another"
        raise RequestError(problem, field=f"method {method.method}", remedy="use another method, such as sjd")
    num_images: int = count * options.get("num_images", 1)
    return num_images


def check_outputs(
    name: str, num_images: int, output: str | None, codes: bool, scale: int, trace: Path | None, force: bool
) -> None:
    """Check the files that `run` will write. Existing files may hold the images, which only the bundle can tell.

    Args:
        name: name of the model.
        num_images: number of images.
        output: file or folder of the images; None: the current folder.
        codes, scale, trace: see `outputs.choose_outputs`.
        force: whether to replace existing files.

    Raises:
        LanternError: an option needs images, or a file cannot be written.
    """
    suffix = ".png" if writes_images(find_model(name).makes_images, f"model {name}", codes, scale, trace) else ".npz"
    outputs = plan_outputs(output, ["image"] * num_images, force, lambda i, path: True, suffix)
    check_trace(trace, [path for path, _ in outputs], force)
