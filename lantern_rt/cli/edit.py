"""The `edit` command: regenerates a part of an image. All input is checked before a graph is loaded."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ..output.names import plan_outputs
from .console import print_stderr, print_text
from .options import OUTPUT, SUBJECTS, BundleArgument, EngineOptions
from .run import generate_files

EXAMPLES = """
lantern-rt edit scene.png --mask mask.png --prompt "a green cone left of a blue cube on grass"
lantern-rt edit cut-out.png bundles/llamagen-b --prompt 207 --seed 3 --output dog.png
"""


def edit(
    image: Annotated[Path, typer.Argument(help="Image to edit: PNG, JPEG or WebP, scaled to a size of the bundle.")],
    bundle: BundleArgument = "scenes",
    mask: Annotated[
        Path | None,
        typer.Option(
            help="Image of the same size that is transparent where IMAGE is to change or, if it has no transparency, "
            "white there. [default: the transparency of IMAGE]",
            rich_help_panel=SUBJECTS,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Prompt for the whole image, or class id. [default: the prompt that IMAGE records]",
            rich_help_panel=SUBJECTS,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.", rich_help_panel=SUBJECTS)] = 0,
    output: Annotated[
        str | None,
        typer.Option(
            help="PNG file or folder to write. [default: IMAGE-edit-seedN.png in the current folder]",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Regenerate a part of an image.

    Prints the path of the file to stdout, progress and a line of statistics to stderr.
    """
    from ..prompts import load_bundle_tokenizer
    from ..requests import check_request
    from .replay import holds_image

    engine = EngineOptions()
    opened = engine.open_bundle(bundle)
    manifest = opened.manifest
    subject: dict[str, Any] = {"prompts": prompt}
    if prompt is not None and manifest.condition.kind == "class" and prompt.isdecimal():
        subject = {"class_ids": int(prompt)}
    request = check_request(manifest, load_bundle_tokenizer(opened), **subject, image=image, mask=mask, seed=seed)
    outputs = plan_outputs(
        output, [f"{image.stem}-edit-seed{seed}"], False, lambda _, path: holds_image(path, opened, request, 1)
    )
    ((path, exists),) = outputs
    if exists:
        print_stderr("the image exists already")
    else:
        began = time.perf_counter()
        pipeline = engine.load(opened, request.settings)
        last = generate_files(pipeline, request, outputs, 1, None, False)
        assert last.stats is not None
        print_stderr(f"{last.stats.method}: {time.perf_counter() - began:.1f} s")
    print_text(path)
