"""The `run` command: prompts in, PNG files out. All that can be refused is refused before a graph is loaded."""

from __future__ import annotations

import time
from collections.abc import Generator
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import __version__
from ..checks import whole
from ..errors import OutputError, RequestError
from ..methods import METHODS
from ..output.files import check_output, plan_outputs, slug, write_output
from .console import print_json, print_text, progress, say
from .options import Force, Json, Running, Shaping

if TYPE_CHECKING:
    from ..bundle.files import Bundle
    from ..output.trace import Trace
    from ..requests import ImageRequest, Settings
    from ..results import StreamStep

EXAMPLES = """
lantern-rt run --prompt "a large red sphere left of a small blue cube on grass at sunset"
lantern-rt run --prompt "a green cone on snow" --num-images 4 --output cones/ --scale 4
lantern-rt run --prompt "a blue torus at night" --method lantern --delta 0.3 --neighbors 100
lantern-rt run --prompt "a pink cube on sand" --method lantern++ --lambda 2 --trace cube.npz
lantern-rt run --prompt "a red cone in the snow" --method sjd --window 8
lantern-rt run --from a-pink-cube-on-sand-seed0.png --scale 4
lantern-rt run --bundle bundles/llamagen-b --class-id 207 --method lantern --delta 0.2 --json
"""


def run(
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="What to draw; may be given several times.")
    ] = None,
    class_id: Annotated[
        list[int] | None,
        typer.Option(metavar="ID", help="Class to draw, for class-conditional bundles; may be given several times."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="PNG",
            help="A PNG of lantern-rt to draw again, as recorded in it: prompt, seed, settings.",
        ),
    ] = None,
    bundle: Annotated[
        str | None,
        typer.Option(help="Bundle folder, or the name of an embedded bundle. [default: scenes, or the picture's]"),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            help="A .png file, or a folder (one that exists, or a new one in a folder that exists). "
            "[default: a name made of prompt and seed, or PNG-again, in the current folder]"
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Image i of a prompt is drawn with seed + i. [default: 0]")] = None,
    num_images: Annotated[int | None, typer.Option(help="Images per prompt. [default: 1]")] = None,
    method: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(METHODS)}. [default: auto if it knows enough, or the bundle's]"),
    ] = None,
    *,
    parameters: Annotated[dict[str, Any], *METHODS.values()],
    sampling: Shaping,
    running: Running,
    trace: Annotated[
        Path | None, typer.Option(help="Write every draft tree to this .npz, and a picture to NAME.trace.png.")
    ] = None,
    scale: Annotated[int, typer.Option(help="Enlarge the PNG this many times, 1 .. 16, bicubic.")] = 1,
    json: Json = False,
    force: Force = False,
) -> None:
    """Turn prompts (or class ids) into PNG files.

    Paths of the files go to stdout, progress and a line of statistics to stderr.
    """
    from ..output.images import enlarge, png_bytes
    from ..output.trace import Trace
    from ..planning.auto import with_default_method
    from ..requests import bundle_tokenizer, check_request
    from .again import Again

    whole("scale", scale, 1, 1, 16)
    options = {"seed": seed, "num_images": num_images, "method": method, **parameters, **sampling}
    given = {"prompts": prompt or None, "class_ids": class_id or None, **options}
    asked = {name: value for name, value in given.items() if value is not None}
    if source is None:
        if not (prompt or class_id):
            raise RequestError("found nothing to draw; give --prompt, or --class-id for a class-conditional bundle")
        opened = running.open_bundle("scenes" if bundle is None else bundle)
        asked = with_default_method(asked)
        request = check_request(opened.manifest, bundle_tokenizer(opened), **asked)
        stems = [_stem(image) for image in request.images]
    else:
        again = Again.read(source, asked)
        opened = running.open_bundle(again.embedded_bundle() if bundle is None else bundle)
        asked, request = again.asked(), again.check(opened)
        stems = [f"{source.stem}-again"]
    outputs = plan_outputs(output, stems, force)
    picture = None if trace is None else _check_trace(trace, outputs, force)

    pipeline = running.load(opened)
    began = time.perf_counter()
    traced = None if trace is None else Trace(opened.manifest.grid_rows, opened.manifest.grid_columns)
    last = _decode(pipeline.stream(**asked), traced)
    assert last.stats is not None
    for i, path in enumerate(outputs):
        image = enlarge(last.image(i), scale)
        write_output(path, png_bytes(image, _texts(opened, last.settings, request.images[i])), force)
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
            {"codes": codes.tolist(), "seed": image.seed, _kind(image): image.label, "output": str(path)}
            for image, codes, path in zip(request.images, last.codes, outputs, strict=True)
        ]
        stats = {name: value for name, value in vars(last.stats).items() if name not in ("images", "per_image")}
        print_json({"images": images, "stats": stats})
    else:
        print_text(*outputs)


def _stem(image: ImageRequest) -> str:
    what = slug(image.label) if isinstance(image.label, str) else f"class-{image.label}"
    return f"{what}-seed{image.seed}"


def _kind(image: ImageRequest) -> str:
    return "prompt" if isinstance(image.label, str) else "class_id"


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


def _decode(steps: Generator[StreamStep, None, None], trace: Trace | None) -> StreamStep:
    """Run all steps, showing progress; the last one."""
    with progress(lines=False) as show:
        for step in steps:
            if trace is not None:
                trace.add(step.step)
            show("codes", step.done, step.total)
    return step


def _texts(bundle: Bundle, settings: Settings, image: ImageRequest) -> dict[str, str]:
    """Text chunks of a PNG: enough to make it again."""
    from ..runtime.noise import FORMAT

    return {
        "Software": f"lantern-rt {__version__}",
        _kind(image): str(image.label),
        "seed": str(image.seed),
        "method": settings.method.method,
        "noise": FORMAT,
        "settings": dumps(settings.as_dict()),
        "bundle": bundle.manifest.name,
        "bundle_digest": bundle.digest,
    }
