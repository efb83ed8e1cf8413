"""The `edit` command: regenerates a part of an image. All input is checked before the bundle's graphs are loaded."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..inputs import is_number
from ..output.formats import PNG
from ..output.names import choose_output_paths
from .console import print_stderr, print_text
from .options import OUTPUT, SUBJECTS, BundleArgument, EngineOptions, MethodOption, QualityOption

if TYPE_CHECKING:
    from ..pipeline import Pipeline

EXAMPLES = """
lantern-rt edit scene.png --mask mask.png --prompt "a green cone left of a blue cube on grass"
lantern-rt edit scene.png --keep-rows 8 --count 4 --output variations/
lantern-rt edit cut-out.png bundles/llamagen-b --prompt 207 --seed 3 --output dog.png
"""

ImageArgument = Annotated[
    Path, typer.Argument(help="Image to edit: PNG, JPEG or WebP, scaled to a size of the bundle.")
]
MaskOption = Annotated[
    Path | None,
    typer.Option(
        help="Image of the same size that is transparent where IMAGE is to change or, if it has no transparency, "
        "white there. [default: the transparency of IMAGE]",
        rich_help_panel=SUBJECTS,
    ),
]
KeepRowsOption = Annotated[
    int | None,
    typer.Option(
        help="Number of rows of the token grid to keep at the top, in place of a mask.", rich_help_panel=SUBJECTS
    ),
]
PromptOption = Annotated[
    str | None,
    typer.Option(
        help="Prompt for the whole image, or class id. [default: the prompt that IMAGE records]",
        rich_help_panel=SUBJECTS,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        help="Random seed; further images have the next seeds. [default: random, and printed]",
        rich_help_panel=SUBJECTS,
    ),
]
CountOption = Annotated[int, typer.Option(help="Number of images.", rich_help_panel=SUBJECTS)]
OutputOption = Annotated[
    str | None,
    typer.Option(
        help="PNG file (of one image) or folder to write. [default: IMAGE-edit-seedN.png in the current folder]",
        rich_help_panel=OUTPUT,
    ),
]


def edit(
    image: ImageArgument,
    bundle: BundleArgument = "scenes",
    mask: MaskOption = None,
    keep_rows: KeepRowsOption = None,
    prompt: PromptOption = None,
    seed: SeedOption = None,
    count: CountOption = 1,
    quality: QualityOption = None,
    method: MethodOption = None,
    output: OutputOption = None,
) -> None:
    """Regenerate a part of an image.

    Prints the paths of the files to stdout, progress and a line of statistics to stderr.
    """
    from ..edits import check_supports_edits
    from ..prompts import load_bundle_tokenizer
    from ..requests import check_request, choose_random_seed
    from .replay import png_contains_image

    engine = EngineOptions()
    opened = engine.open_bundle(bundle)
    check_supports_edits(opened.manifest)
    seed = choose_random_seed() if seed is None else seed
    chosen = {"seed": seed, "quality": quality, "method": method, "mask": mask, "keep_rows": keep_rows}
    options: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    if prompt is not None and opened.manifest.condition.kind == "class" and is_number(prompt):
        options["class_ids"] = int(prompt)
    else:
        options["prompts"] = prompt
    request = check_request(opened.manifest, load_bundle_tokenizer(opened), image=image, num_images=count, **options)

    def contains_image(index: int, path: Path) -> bool:
        return png_contains_image(path, opened, replace(request, images=[request.images[index]]), 1)

    stems = [f"{image.stem}-edit-seed{seed + i}" for i in range(count)]
    outputs = choose_output_paths(output, stems, False, contains_image)
    if all(done for _, done in outputs):
        print_stderr("the image exists already" if count == 1 else "the images exist already")
    else:
        options |= {"num_images": count, "progress": sys.stderr.isatty()}
        _generate_edits(engine.load_pipeline(opened, request.settings), image, options, outputs)
    print_text(*(path for path, _ in outputs))


def _generate_edits(
    pipeline: Pipeline, image_path: Path, options: dict[str, Any], planned_files: list[tuple[Path, bool]]
) -> None:
    """Generate the images, and write the files that do not exist yet. `planned_files`: path, and whether it exists."""
    from ..output.files import write_output

    began = time.perf_counter()
    result = pipeline.edit(image_path, **options)
    for (path, done), edited in zip(planned_files, result.images, strict=True):
        if not done:
            write_output(path, PNG.encode_image(edited), False)
    print_stderr(f"{result.settings.method}: {time.perf_counter() - began:.1f} s, seed {options['seed']}")
