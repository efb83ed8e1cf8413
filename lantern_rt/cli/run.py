"""The `run` command: prompts in, PNG files out.

Everything that can be refused is refused before a graph is loaded. Does not know option parsing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from .. import __version__
from ..bundle.files import Bundle
from ..errors import OutputError, RequestError
from ..output.files import check_output, plan_outputs, slug, write_output
from ..output.images import enlarge, png_bytes
from ..output.trace import Trace
from ..pipeline import bundle_tokenizer, check_request
from ..planning.auto import with_default_method
from ..requests import ImageRequest, Request, Settings
from ..results import StreamStep
from .running import Running

MOST_SCALE = 16
_STATS = (
    "method",
    "target_passes",
    "drafter_passes",
    "tokens_per_forward_pass",
    "accepted_lengths",
    "seconds",
    "target_seconds",
    "drafter_seconds",
    "host_seconds",
    "realised_tvd",
)


@dataclass(frozen=True)
class Run:
    """What the user asked `run` for, besides the request's parameters."""

    prompts: list[str] | None
    class_ids: list[int] | None
    bundle: str
    output: str | None
    seed: int
    num_images: int
    running: Running
    trace: Path | None
    scale: int
    json: bool
    force: bool


def run_command(run: Run, options: dict[str, Any]) -> None:
    """Check, decode, write, report."""
    if run.prompts is None and run.class_ids is None:
        raise RequestError("found nothing to draw; give --prompt, or --class-id for a class-conditional bundle")
    if not 1 <= run.scale <= MOST_SCALE:
        raise RequestError(f"scale: found {run.scale}, expected a whole number 1 .. {MOST_SCALE}")
    bundle = run.running.open_bundle(run.bundle)
    options = with_default_method(bundle, options)
    asked = {"class_ids": run.class_ids, "seed": run.seed, "num_images": run.num_images, **options}
    request = check_request(bundle.manifest, bundle_tokenizer(bundle), run.prompts, **asked)
    outputs = plan_outputs(run.output, [_stem(image) for image in request.images], run.force)
    picture = _check_trace(run.trace, outputs, run.force)

    pipeline = run.running.load(bundle)
    began = time.perf_counter()
    trace = Trace(bundle.manifest.grid_rows, bundle.manifest.grid_columns)
    steps = pipeline.stream(run.prompts, **asked)
    last = _decode(steps, trace if run.trace else None)
    assert last.stats is not None
    for i, path in enumerate(outputs):
        image = enlarge(last.image(i), run.scale)
        write_output(path, png_bytes(image, _texts(bundle, last.settings, request.images[i])), run.force)
    if run.trace and picture:
        write_output(run.trace, trace.npz_bytes(), run.force)
        buffer = BytesIO()
        trace.picture().save(buffer, "PNG")
        write_output(picture, buffer.getvalue(), run.force)
    print(_summary(last, time.perf_counter() - began), file=sys.stderr)
    if run.json:
        print(json.dumps(_report(request, last, outputs), allow_nan=False))
    else:
        print(*outputs, sep="\n")


def _stem(image: ImageRequest) -> str:
    what = slug(image.label) if isinstance(image.label, str) else f"class-{image.label}"
    return f"{what}-seed{image.seed}"


def _check_trace(trace: Path | None, outputs: list[Path], force: bool) -> Path | None:
    """The picture's path beside the trace; both checked."""
    if trace is None:
        return None
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
    with _progress() as show:
        for step in steps:
            if trace is not None:
                trace.add(step.step)
            show(step.done, step.total)
    return step


@contextmanager
def _progress() -> Iterator[Any]:
    """A progress bar on stderr, called with codes done and in all; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("codes"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("codes", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _summary(last: StreamStep, seconds: float) -> str:
    """What to say after the work. Speed against plain decoding is known only where `tune` has measured it."""
    stats = last.stats
    assert stats is not None
    images = f"{stats.images} image{'s' if stats.images > 1 else ''}"
    line = (
        f"{stats.method}: {stats.tokens_per_forward_pass:.2f} tokens per forward pass, "
        f"{images} in {seconds:.1f} s ({stats.seconds:.1f} s decoding codes)"
    )
    return line if last.settings.choice is None else f"{last.settings.choice}\n{line}"


def _texts(bundle: Bundle, settings: Settings, image: ImageRequest) -> dict[str, str]:
    """Text chunks of a PNG: enough to make it again."""
    what = "prompt" if isinstance(image.label, str) else "class_id"
    return {
        "Software": f"lantern-rt {__version__}",
        what: str(image.label),
        "seed": str(image.seed),
        "method": settings.method.method,
        "settings": json.dumps(settings.as_dict()),
        "bundle": bundle.manifest.name,
        "bundle_digest": bundle.digest,
    }


def _report(request: Request, last: StreamStep, outputs: list[Path]) -> dict[str, Any]:
    """What --json prints."""
    images = []
    for image, codes, output in zip(request.images, last.codes, outputs, strict=True):
        what = "prompt" if isinstance(image.label, str) else "class_id"
        images.append({"codes": codes.tolist(), "seed": image.seed, what: image.label, "output": str(output)})
    stats = asdict(last.stats) if last.stats else {}
    return {"images": images, "stats": {name: stats[name] for name in _STATS}}
