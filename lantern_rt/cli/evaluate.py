"""The `eval` command: what to draw, and a folder with the report."""

from __future__ import annotations

import datetime
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from ..bundle.files import Bundle
from ..checks import whole
from ..engines.host import host_report, processor
from ..errors import RequestError
from ..evaluation.drawing import Subjects, parse_ways
from ..evaluation.evaluate import as_dict, check_evaluation
from ..evaluation.evaluate import evaluate as measure
from ..evaluation.report import html_report, text_table
from ..evaluation.statistics import require_scipy
from ..output.files import slug
from ..output.folders import check_new_folder, folder_or_nothing
from ..pipeline import Pipeline, bundle_tokenizer, check_request
from ..requests import SEED_LIMIT
from ..text.prompt_files import read_prompts
from .console import print_json, progress
from .evaluation_graphs import GivenInstruments, open_instruments
from .options import BundleName, Force, Json, Prompts, Running, Shaping

EXAMPLES = """
lantern-rt eval scenes --methods ar,sjd,eagle,lantern++
lantern-rt eval scenes --methods sjd,sjd:lambda=2,lantern++:lambda=3:tree=chain-4 --count 32 --seeds 4
lantern-rt eval bundles/t2i --methods auto --prompts captions.txt --features inception.onnx --feature-size 299
lantern-rt eval bundles/t2i --prompts captions.txt --agreement clip.onnx --agreement-tokenizer tokenizer.json
"""
_RESULT, _KIND = "eval.json", "folder of an evaluation"
_CLASSES = 64  # class ids to draw where nothing is said, spread over all


def evaluate(
    bundle: BundleName,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods to compare with ar, each with parameters if need be, NAME:PARAMETER=VALUE:..., "
            "joined by commas; parameters are those of run."
        ),
    ] = "ar,sjd,eagle,lantern++",
    prompts: Prompts = None,
    count: Annotated[
        int | None, typer.Option(help="Use the first so many prompts, or so many classes. [default: all; 64 classes]")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Pictures per prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="Picture i is drawn with seed + i, alike in all methods.")] = 0,
    *,
    instruments: GivenInstruments,
    output: Annotated[
        Path | None, typer.Option(help="Folder for report.html and eval.json. [default: eval-NAME, here]")
    ] = None,
    sampling: Shaping,
    images: Annotated[int, typer.Option(help="Pictures decoded together; changes none of them.")] = 8,
    running: Running,
    json: Json = False,
    force: Force = False,
) -> None:
    """Compare methods with plain decoding, on the same prompts and seeds. Needs lantern-rt[cpu,eval]."""
    require_scipy()
    opened = running.open_bundle(bundle)
    manifest = opened.manifest
    output = output or Path(f"eval-{slug(manifest.name)}")
    check_new_folder(output, force, _RESULT, _KIND)
    ways = parse_ways(methods, sampling, manifest)
    subjects = _subjects(opened, prompts, count, seeds, seed)
    check_evaluation(subjects)
    whole("images", images, 1, 1, 64)
    tokenizer = bundle_tokenizer(opened)
    for part in subjects.batches(images, 0):  # a prompt that cannot be drawn shows before the work
        check_request(manifest, tokenizer, **{**part, "num_images": 1}, **ways[0].options)
    opened_instruments = open_instruments(opened, instruments, running.threads)
    pipeline = running.load(opened)
    with progress() as show:
        found = measure(pipeline, subjects, ways, images, opened_instruments, show)
    facts = _facts(opened, pipeline)
    result = {**facts, **as_dict(found)}
    with folder_or_nothing(output, force, _RESULT, _KIND) as folder:
        (folder / _RESULT).write_text(dumps(result, indent=1, allow_nan=False) + "\n", "utf-8")
        page = html_report(found, facts, f"{manifest.name}: decoding methods compared")
        (folder / "report.html").write_text(page, "utf-8")
    if json:
        print_json({**result, "output": str(output)})
    else:
        print(text_table(found))
        print(output / "report.html")


def _subjects(bundle: Bundle, path: Path | None, count: int | None, seeds: int, seed: int) -> Subjects:
    """Prompts of a file or of the bundle, or class ids."""
    whole("seeds", seeds, 1, 1, 1000)
    whole("seed", seed, 0, 0, SEED_LIMIT // 2)
    manifest, condition = bundle.manifest, bundle.manifest.condition
    if condition.kind == "embeddings":
        raise RequestError(
            f"bundle {manifest.name} takes text embeddings; export it with --text-encoder to give prompts"
        )
    if condition.kind == "class":
        if path is not None:
            raise RequestError(f"prompts: bundle {manifest.name} takes class ids; leave --prompts out")
        classes = condition.classes or 1
        count = whole("count", count, min(_CLASSES, classes), 1, classes)
        return Subjects(None, [i * classes // count for i in range(count)], seeds, seed)
    if path is None and "prompts" in manifest.files:
        path = bundle.path("prompts")
    if path is None:
        raise RequestError(f"bundle {manifest.name} has no prompts to draw; give --prompts FILE")
    prompts = read_prompts(path)
    count = whole("count", count, len(prompts), 1, len(prompts))
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
