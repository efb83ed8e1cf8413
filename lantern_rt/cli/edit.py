"""The `edit` command: a picture and a mask in, a PNG file out. What can be refused is, before a graph is loaded."""

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
    image: Annotated[Path, typer.Argument(help="The picture: PNG, JPEG or WebP, scaled to the bundle's size.")],
    bundle: BundleArgument = "scenes",
    mask: Annotated[
        Path | None,
        typer.Option(
            help="A picture of the same size: transparent or, if nothing of it is, white where it is to be drawn anew. "
            "[default: where IMAGE is transparent]",
            rich_help_panel=SUBJECTS,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="What the whole picture is to show, or a class id. [default: what IMAGE records]",
            rich_help_panel=SUBJECTS,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn.", rich_help_panel=SUBJECTS)] = 0,
    output: Annotated[
        str | None,
        typer.Option(
            help="A .png file, or a folder. [default: IMAGE-edit-seedN.png in the current folder]",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Draw a part of a picture anew.

    The path of the file goes to stdout, progress and a line of statistics to stderr.
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
    ((path, there),) = outputs
    if there:
        print_stderr("the picture is there already")
    else:
        began = time.perf_counter()
        pipeline = engine.load(opened, request.settings)
        last = generate_files(pipeline, request, outputs, 1, None, False)
        assert last.stats is not None
        print_stderr(f"{last.stats.method}: {time.perf_counter() - began:.1f} s")
    print_text(path)
