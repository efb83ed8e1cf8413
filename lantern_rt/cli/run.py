"""The `run` command: prompts in, PNG files out. All that can be refused is refused before a graph is loaded."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..checks import short, whole
from ..errors import OutputError, RequestError
from ..methods import METHODS
from ..output.files import check_output, plan_outputs, slug, write_output
from .console import Show, print_json, print_text, progress, say
from .options import METHOD, OUTPUT, SUBJECTS, Embeddings, Force, Json, Running, Shaping

if TYPE_CHECKING:
    from ..output.trace import Trace
    from ..prompts import ImageRequest
    from ..requests import Request
    from ..results import StreamStep

EXAMPLES = """
lantern-rt run "a large red sphere left of a small blue cube on grass at sunset"
lantern-rt run scenes "a green cone on snow" --num-images 4 --output cones/ --scale 4
lantern-rt run --prompt "a blue torus at night" --method lantern --delta 0.3 --neighbors 100
lantern-rt run --prompt "a pink cube on sand" --method lantern++ --lambda 2 --trace cube.npz
lantern-rt run --prompt "a red cone in the snow" --method sjd --window 8
lantern-rt run --from a-pink-cube-on-sand-seed0.png --scale 4
lantern-rt run bundles/llamagen-b --class-id 207 --method lantern --delta 0.2 --json
"""


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[BUNDLE] [PROMPT]",
            help="What to draw, in quotes; before it, if need be, a bundle: its folder, or an embedded one's name.",
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="What to draw; may be given several times.", rich_help_panel=SUBJECTS),
    ] = None,
    class_id: Annotated[
        list[int] | None,
        typer.Option(
            metavar="ID",
            help="Class to draw, for class-conditional bundles; may be given several times.",
            rich_help_panel=SUBJECTS,
        ),
    ] = None,
    embeddings: Embeddings = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="PNG",
            help="A PNG of lantern-rt to draw again, as recorded in it: prompt, seed, settings.",
            rich_help_panel=SUBJECTS,
        ),
    ] = None,
    bundle: Annotated[
        str | None,
        typer.Option(
            help="Bundle folder, or the name of an embedded bundle. [default: scenes, or the picture's]",
            rich_help_panel=SUBJECTS,
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            help="A .png file, or a folder (one that exists, or a new one in a folder that exists). "
            "[default: a name made of prompt and seed, or PNG-again, in the current folder]",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Image i of a prompt is drawn with seed + i. [default: 0]", rich_help_panel=SUBJECTS),
    ] = None,
    num_images: Annotated[
        int | None,
        typer.Option(help="Images per prompt; 1,024 in all at most. [default: 1]", rich_help_panel=SUBJECTS),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help="WIDTHxHEIGHT in pixels. [default: the bundle's]", rich_help_panel=SUBJECTS),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(METHODS)}. [default: auto if it knows enough, or the bundle's]", rich_help_panel=METHOD
        ),
    ] = None,
    *,
    parameters: Annotated[dict[str, Any], METHOD, *METHODS.values()],
    sampling: Shaping,
    running: Running,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write every draft tree to this .npz, and a picture to NAME.trace.png.", rich_help_panel=OUTPUT
        ),
    ] = None,
    scale: Annotated[
        int, typer.Option(help="Enlarge the PNG this many times, 1 .. 16, bicubic.", rich_help_panel=OUTPUT)
    ] = 1,
    json: Json = False,
    force: Force = False,
) -> None:
    """Turn prompts (or class ids, or embeddings of texts) into PNG files.

    Paths of the files go to stdout, progress and a line of statistics to stderr.
    """
    from ..auto.chooser import with_default_method
    from ..output.images import enlarge, png_bytes
    from ..output.trace import Trace
    from ..prompts import bundle_tokenizer
    from ..requests import check_request
    from ..text.embeddings import read_embeddings
    from .again import Again

    whole("scale", scale, 1, 1, 16)
    options = {"seed": seed, "num_images": num_images, "size": size, "method": method, **parameters, **sampling}
    bundle, prompts = _bundle_and_prompts(words or [], bundle, prompt or [])
    given = {"prompts": prompts or None, "class_ids": class_id or None, "embeddings": embeddings, **options}
    asked = {name: value for name, value in given.items() if value is not None}
    if source is None:
        if not (prompts or class_id or embeddings):
            found = f"bundle {bundle} and nothing to draw" if words else "nothing to draw"
            raise RequestError(
                f"found {found}; give a prompt, or --class-id or --embeddings where a bundle takes those"
            )
        if embeddings is not None:
            asked["embeddings"] = read_embeddings(embeddings)
        opened = running.open_bundle("scenes" if bundle is None else bundle)
        asked = with_default_method(asked)
        request = check_request(opened.manifest, bundle_tokenizer(opened), **asked)
        labels = _labels(request, num_images or 1)
        stems = [_stem(image, label, embeddings) for image, (_, label) in zip(request.images, labels, strict=True)]
    else:
        again = Again.read(source, asked)
        opened = running.open_bundle(again.embedded_bundle() if bundle is None else bundle)
        asked, request = again.asked(), again.check(opened)
        labels, stems = _labels(request, 1), [f"{source.stem}-again"]
    outputs = plan_outputs(output, stems, force)
    picture = None if trace is None else _check_trace(trace, outputs, force)

    prefix = max(len(real) for image in request.images for real in image.real)
    pipeline = running.load(opened, request.settings, prefix=prefix)
    began = time.perf_counter()
    grid = opened.manifest.size(request.settings.size)
    traced = None if trace is None else Trace(grid.rows, grid.columns)
    with progress(lines=False) as show:
        show("preparing")
        last = _decode(pipeline.stream(**asked), traced, show)
        assert last.stats is not None
        for i, path in enumerate(outputs):
            show("images", i, len(outputs))
            image = enlarge(last.image(i), scale)
            write_output(path, png_bytes(image, image.info), force)
        show("images", len(outputs), len(outputs))
    if trace and picture and traced:
        write_output(trace, traced.npz_bytes(), force)
        write_output(picture, png_bytes(traced.picture(), {}), force)
    if last.settings.choice is not None:
        say(str(last.settings.choice))
    count = f"{last.stats.images} image{'s' * (last.stats.images > 1)}"
    say(
        f"{last.stats.method}: {last.stats.tokens_per_forward_pass:.2f} tokens per forward pass, {count} in "
        f"{time.perf_counter() - began:.1f} s ({last.stats.seconds:.1f} s decoding codes)"
    )
    if json:
        images = [
            {"codes": codes.tolist(), "seed": image.seed, kind: label, "output": str(path)}
            for image, (kind, label), codes, path in zip(request.images, labels, last.codes, outputs, strict=True)
        ]
        stats = {name: value for name, value in vars(last.stats).items() if name not in ("images", "per_image")}
        print_json({"images": images, "stats": stats})
    else:
        print_text(*outputs)


def _bundle_and_prompts(words: list[str], bundle: str | None, prompts: list[str]) -> tuple[str | None, list[str]]:
    """The words without an option: first a bundle, if they name one and no option does, then at most one prompt.

    Raises: RequestError: there are more.
    """
    if words and bundle is None and _is_bundle(words[0]):
        bundle, *words = words
    if len(words) > 1:
        found = f"found {short(words[0])} and {short(words[1])}"
        raise RequestError(
            f"prompt: {found}, expected a bundle's folder or name and one prompt in quotes; several take --prompt each"
        )
    return bundle, [*words, *prompts]


def _is_bundle(word: str) -> bool:
    from ..bundle.files import MANIFEST_FILE, embedded_names

    with suppress(OSError, ValueError):  # too long for a name
        return word in embedded_names() or (word != "" and (Path(word) / MANIFEST_FILE).is_file())
    return False


def _labels(request: Request, num_images: int) -> list[tuple[str, str | int]]:
    """What each image is drawn from: kind, and prompt, class id, or number in the file of embeddings."""
    return [
        ("embedding", i // num_images)
        if image.label is None
        else ("prompt" if isinstance(image.label, str) else "class_id", image.label)
        for i, image in enumerate(request.images)
    ]


def _stem(image: ImageRequest, label: str | int, embeddings: Path | None) -> str:
    if isinstance(label, str):
        return f"{slug(label)}-seed{image.seed}"
    return f"{slug(embeddings.stem) if embeddings else 'class'}-{label}-seed{image.seed}"


def _check_trace(trace: Path, outputs: list[Path], force: bool) -> Path:
    """The picture's path beside the trace; both checked."""
    if trace.suffix != ".npz":
        raise OutputError(f"trace {trace}: found the ending {trace.suffix or 'none'}, expected .npz")
    picture = trace.with_name(trace.stem.removesuffix(".trace") + ".trace.png")
    for path in (trace, picture):
        check_output(path, force)
        if path.absolute() in [output.absolute() for output in outputs]:
            raise OutputError(f"{path}: would hold an image and a trace; give one of them another name")
    return picture


def _decode(steps: Generator[StreamStep, None, None], trace: Trace | None, show: Show) -> StreamStep:
    """Run all steps, showing progress; the last one."""
    for step in steps:
        if trace is not None:
            trace.add(step.step)
        show("codes", step.done, step.total)
    return step
