"""The `edit` command: regenerates a part of an image. All input is checked before the bundle's graphs are loaded."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import RequestError
from ..inputs import is_number
from ..output.formats import PNG
from ..output.names import choose_output_paths
from .console import print_stderr, print_text
from .options import EDIT_INPUTS, OUTPUT, SUBJECTS, EngineOptions, add_request_options, split_arguments

if TYPE_CHECKING:
    from ..pipeline import Pipeline

EXAMPLES = """
lantern-rt edit scene.png "a green cone left of a blue cube on grass" --mask mask.png
lantern-rt edit scene.png --keep-rows 8 --count 4 --output variations/
lantern-rt edit cut-out.png bundles/llamagen-b --prompt 207 --seed 3 --output dog.png
"""

ImageArgument = Annotated[
    Path, typer.Argument(help="Image to edit: PNG, JPEG or WebP, scaled to a size of the bundle.")
]
WordsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[BUNDLE] [PROMPT]",
        help="Prompt for the whole image, in quotes, perhaps after a bundle: its folder or name, or "
        "hf:owner/name[@revision]. [default: scenes, and the prompt that IMAGE records]",
    ),
]
PromptOption = Annotated[
    str | None,
    typer.Option(help="Prompt or class id, as an alternative to the argument.", rich_help_panel=SUBJECTS),
]
OutputOption = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--output",
        help="PNG file (of one image) or folder to write. [default: IMAGE-edit-seedN.png in the current folder]",
        rich_help_panel=OUTPUT,
    ),
]


@add_request_options("output", [*EDIT_INPUTS, "seed", "num_images", "quality", "method"])
def edit(
    image: ImageArgument,
    words: WordsArgument = None,
    prompt: PromptOption = None,
    output: OutputOption = None,
    **options: Any,
) -> None:
    """Regenerate a part of an image.

    Prints the paths of the files to stdout, progress and a line of statistics to stderr.
    """
    from ..requests import check_request, choose_random_seed
    from ..subjects.image_input import check_supports_edits
    from ..text.tokenizers import load_bundle_tokenizer
    from .replay import png_contains_image

    name, prompts = split_arguments(words or [], prompt is not None)
    if len(prompts) + (prompt is not None) > 1:
        raise RequestError(field="prompt", found="several", expected="one prompt for the whole image")
    prompt = prompt or next(iter(prompts), None)
    engine = EngineOptions()
    opened = engine.open_bundle(name or "scenes")
    check_supports_edits(opened.manifest)
    options = {"seed": choose_random_seed(), **{name: value for name, value in options.items() if value is not None}}
    count = options.get("num_images", 1)
    if prompt is not None and opened.manifest.condition.kind == "class" and is_number(prompt):
        options["class_ids"] = int(prompt)
    else:
        options["prompts"] = prompt
    request = check_request(opened.manifest, load_bundle_tokenizer(opened), {"image": image, **options})

    stems = [f"{image.stem}-edit-seed{generated.seed}" for generated in request.images]
    outputs = choose_output_paths(output, stems, False, partial(png_contains_image, opened, request, 1))
    if all(done for _, done in outputs):
        print_stderr("the image exists already" if count == 1 else "the images exist already")
    else:
        options["progress"] = sys.stderr.isatty()
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
