"""The `eval` command: what to draw, progress, and a folder with the report.

Does not know option parsing, nor how figures come about.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..bundle.files import Bundle
from ..checks import whole
from ..engines.host import host_report, processor
from ..errors import RequestError
from ..evaluation.drawing import Show, Subjects, parse_ways
from ..evaluation.evaluate import Evaluation, as_dict, check_evaluation, evaluate
from ..evaluation.report import html_report, text_table
from ..evaluation.statistics import require_scipy
from ..output.files import slug
from ..output.folders import check_new_folder, folder_or_nothing
from ..pipeline import Pipeline, bundle_tokenizer, check_request
from ..requests import SEED_LIMIT
from ..text.prompt_files import read_prompts
from .evaluation_graphs import GivenInstruments, open_instruments
from .running import Running

_RESULT, _KIND = "eval.json", "folder of an evaluation"
_CLASSES = 64  # class ids to draw where nothing is said, spread over all


@dataclass(frozen=True)
class Eval:
    """What the user asked `eval` for, besides sampling."""

    bundle: str
    methods: str
    prompts: Path | None
    count: int | None
    seeds: int
    seed: int
    images: int
    running: Running
    instruments: GivenInstruments
    output: Path | None
    json: bool
    force: bool


def eval_command(asked: Eval, sampling: dict[str, Any]) -> None:
    """Draw, compare, write a folder, and print the figures."""
    require_scipy()
    bundle = asked.running.open_bundle(asked.bundle)
    output = asked.output or Path(f"eval-{slug(bundle.manifest.name)}")
    check_new_folder(output, asked.force, _RESULT, _KIND)
    ways = parse_ways(asked.methods, sampling, bundle.manifest)
    subjects = _subjects(bundle, asked)
    check_evaluation(subjects)
    whole("images", asked.images, 1, 1, 64)
    tokenizer = bundle_tokenizer(bundle)
    for part in subjects.batches(asked.images, 0):  # a prompt that cannot be drawn shows before the work
        check_request(bundle.manifest, tokenizer, **{**part, "num_images": 1}, **ways[0].options)
    instruments = open_instruments(bundle, asked.instruments, asked.running.threads)
    pipeline = asked.running.load(bundle)
    with _progress() as show:
        found = evaluate(pipeline, subjects, ways, asked.images, instruments, show)
    facts = _facts(bundle, pipeline)
    result = {**facts, **as_dict(found)}
    with folder_or_nothing(output, asked.force, _RESULT, _KIND) as folder:
        (folder / _RESULT).write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", "utf-8")
        page = html_report(found, facts, f"{bundle.manifest.name}: decoding methods compared")
        (folder / "report.html").write_text(page, "utf-8")
    _print(found, output, result if asked.json else None)


def _print(found: Evaluation, output: Path, result: dict[str, object] | None) -> None:
    if result is not None:
        print(json.dumps({**result, "output": str(output)}, allow_nan=False))
        return
    print(text_table(found))
    print(output / "report.html")


def _subjects(bundle: Bundle, asked: Eval) -> Subjects:
    """Prompts of a file or of the bundle, or class ids."""
    seeds = whole("seeds", asked.seeds, 1, 1, 1000)
    seed = whole("seed", asked.seed, 0, 0, SEED_LIMIT // 2)
    manifest, condition = bundle.manifest, bundle.manifest.condition
    if condition.kind == "embeddings":
        raise RequestError(
            f"bundle {manifest.name} takes text embeddings; export it with --text-encoder to give prompts"
        )
    if condition.kind == "class":
        if asked.prompts is not None:
            raise RequestError(f"prompts: bundle {manifest.name} takes class ids; leave --prompts out")
        classes = condition.classes or 1
        count = whole("count", asked.count, min(_CLASSES, classes), 1, classes)
        return Subjects(None, [i * classes // count for i in range(count)], seeds, seed)
    path = asked.prompts
    if path is None and "prompts" in manifest.files:
        path = bundle.path("prompts")
    if path is None:
        raise RequestError(f"bundle {manifest.name} has no prompts to draw; give --prompts FILE")
    prompts = read_prompts(path)
    count = whole("count", asked.count, len(prompts), 1, len(prompts))
    return Subjects(prompts[:count], None, seeds, seed)


def _facts(bundle: Bundle, pipeline: Pipeline) -> dict[str, str]:
    """What was measured, on what."""
    host, situation = host_report(), pipeline.situation(1, None, "balanced")
    return {
        "bundle": bundle.manifest.name,
        "bundle_digest": bundle.digest,
        "backend": f"{situation.backend}, {situation.threads} threads",
        "host": f"{host.system}, {processor()}, {host.usable_cores} cores",
        "onnxruntime": ", ".join(host.distributions.values()),
        "lantern_rt": __version__,
        "date": datetime.date.today().isoformat(),
    }


@contextmanager
def _progress() -> Iterator[Show]:
    """A bar on stderr; where that is no terminal, a line whenever something else is being done."""
    if not sys.stderr.isatty():
        said: list[str] = []

        def say(what: str, done: int, total: int) -> None:
            if said[-1:] != [what]:
                said.append(what)
                print(what, file=sys.stderr, flush=True)

        yield say
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def draw(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield draw
