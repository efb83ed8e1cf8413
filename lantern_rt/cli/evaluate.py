"""The `eval` command: what to draw and measure with, and a folder with the report."""

from __future__ import annotations

import datetime
from contextlib import suppress
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from ..bundle.files import Bundle
from ..checks import require_library, short, whole
from ..compare.evaluate import Images
from ..compare.evaluate import evaluate as measure
from ..compare.image_graph import Agreement, EncoderFeatures, Features, Preprocessing, Triple
from ..compare.report import html_report, text_report
from ..compare.turns import parse_contenders, subjects_of
from ..engines.doctor import host_report
from ..engines.host import processor, usable_cores
from ..errors import RequestError
from ..output.files import check_new_folder, folder_or_nothing
from ..output.names import slug
from ..pipeline import Pipeline
from ..requests import SEED_LIMIT, bundle_tokenizer, check_request
from .console import print_json, print_text, progress
from .options import BundleName, Embeddings, Force, Json, Prompts, Running, Shaping

EXAMPLES = """
lantern-rt eval scenes --methods ar,sjd,eagle,lantern++
lantern-rt eval scenes --methods sjd,sjd:lambda=2,lantern++:lambda=3:tree=chain-4 --count 32 --seeds 4
lantern-rt eval bundles/t2i --methods auto --prompts captions.txt --features inception.onnx --feature-size 299
lantern-rt eval bundles/t2i --prompts captions.txt --agreement clip.onnx --agreement-tokenizer tokenizer.json
"""
_RESULT, _KIND = "eval.json", "folder of an evaluation"


@dataclass(frozen=True)
class Graphs:
    """What images are measured with, and how they are prepared for it; None where the user said nothing."""

    features: Annotated[
        Path | None,
        typer.Option(help="ONNX graph from images to features, such as Inception. [default: the bundle's VQ encoder]"),
    ] = None
    feature_size: Annotated[
        int | None, typer.Option(help="Width and height of images for --features. [default: its own]")
    ] = None
    feature_mean: Annotated[
        str | None, typer.Option(help="Taken off RGB values 0 .. 1: a number, or three, by commas. [default: 0]")
    ] = None
    feature_std: Annotated[str | None, typer.Option(help="What they are then divided by. [default: 1]")] = None
    bandwidth: Annotated[
        float | None,
        typer.Option(help="Bandwidth of the kernel distance; 10 for CMMD. [default: median distance of features]"),
    ] = None
    agreement: Annotated[
        Path | None,
        typer.Option(help="ONNX graph from images and token ids to their agreement, such as CLIP. [default: none]"),
    ] = None
    agreement_tokenizer: Annotated[
        Path | None, typer.Option(help="Its tokenizer.json. [default: the bundle's list of words]")
    ] = None
    agreement_size: Annotated[int | None, typer.Option(help="As --feature-size, for --agreement.")] = None
    agreement_mean: Annotated[str | None, typer.Option(help="As --feature-mean, for --agreement.")] = None
    agreement_std: Annotated[str | None, typer.Option(help="As --feature-std, for --agreement.")] = None


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
    embeddings: Embeddings = None,
    count: Annotated[
        int | None, typer.Option(help="Use the first so many prompts, or so many classes. [default: all; 64 classes]")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Images per prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="Image i is drawn with seed + i, alike in all methods.")] = 0,
    *,
    graphs: Graphs,
    output: Annotated[
        Path | None, typer.Option(help="Folder for report.html and eval.json. [default: eval-NAME, here]")
    ] = None,
    sampling: Shaping,
    images: Annotated[int, typer.Option(help="Images decoded together; changes none of them.")] = 8,
    running: Running,
    json: Json = False,
    force: Force = False,
) -> None:
    """Compare methods with plain decoding, on the same prompts and seeds. Needs lantern-rt[cpu,eval]."""
    for library in ("scipy", "matplotlib"):
        require_library(library, "eval", "eval")
    opened = running.open_bundle(bundle)
    manifest = opened.manifest
    output = output or Path(f"eval-{slug(manifest.name)}")
    check_new_folder(output, force, _RESULT, _KIND)
    contenders = parse_contenders(methods, sampling, opened)
    drawn = Images(
        subjects_of(opened, prompts, count, embeddings),
        whole("seeds", seeds, 1, 1, 1000),
        whole("seed", seed, 0, 0, SEED_LIMIT // 2),
        whole("images", images, 1, 1, 64),
    )
    tokenizer = bundle_tokenizer(opened)
    for request in drawn.requests():  # a prompt that cannot be drawn shows before the work
        check_request(manifest, tokenizer, **{**request, "num_images": 1}, **contenders[0].options)
    features, agreement = _features(opened, graphs, running.threads), _agreement(opened, graphs, running.threads)
    pipeline = running.load(opened)
    with progress() as show:
        found, pictures = measure(pipeline, drawn, contenders, show, features, graphs.bandwidth, agreement)
    facts = _facts(opened, pipeline)
    result = {**facts, **found}
    with folder_or_nothing(output, force, _RESULT, _KIND) as folder:
        (folder / _RESULT).write_text(dumps(result, indent=1, allow_nan=False) + "\n", "utf-8")
        page = html_report(found, pictures, facts, f"{manifest.name}: decoding methods compared")
        (folder / "report.html").write_text(page, "utf-8")
    if json:
        print_json({**result, "output": str(output)})
    else:
        print_text(text_report(found), output / "report.html")


def _features(bundle: Bundle, given: Graphs, threads: int | None) -> Features | None:
    """The user's graph, or the bundle's."""
    prepare = _preprocessing(given, "feature", "features")
    features = None
    if given.features is not None:
        features = Features(given.features, prepare, threads)
    elif "vq_encoder" in bundle.manifest.files:
        features = EncoderFeatures(bundle, threads)
    if given.bandwidth is not None:
        if not 1e-9 <= given.bandwidth <= 1e9:
            raise RequestError(f"bandwidth: found {given.bandwidth:g}, expected 1e-09 .. 1e+09")
        if features is None:
            name = bundle.manifest.name
            raise RequestError(f"bandwidth: bundle {name} has no features of its own; give --features too")
    return features


def _agreement(bundle: Bundle, given: Graphs, threads: int | None) -> Agreement | None:
    """The user's graph."""
    prepare = _preprocessing(given, "agreement", "agreement")
    if given.agreement is None:
        if given.agreement_tokenizer is not None:
            raise RequestError("agreement-tokenizer: makes tokens for --agreement, which is not given")
        return None
    if (kind := bundle.manifest.condition.kind) in ("class", "embeddings"):
        takes = "class ids" if kind == "class" else kind
        raise RequestError(
            f"agreement: bundle {bundle.manifest.name} takes {takes}, not prompts; leave --agreement out"
        )
    return Agreement(given.agreement, prepare, given.agreement_tokenizer or bundle, threads)


def _preprocessing(given: Graphs, prefix: str, graph: str) -> Preprocessing:
    """How images are prepared for a graph, by the options of this prefix.

    Raises: RequestError: a value is out of range, or given without the graph.
    """
    size, mean, std = (getattr(given, f"{prefix}_{name}") for name in ("size", "mean", "std"))
    for name, value in (("size", size), ("mean", mean), ("std", std)):
        if value is not None and getattr(given, graph) is None:
            raise RequestError(f"{prefix}-{name}: says how images are prepared for --{graph}, which is not given")
    size = None if size is None else whole(f"{prefix}-size", size, 0, 8, 4096)
    scale = _triple(f"{prefix}-std", "1" if std is None else std)
    if min(scale) <= 0:
        raise RequestError(f"{prefix}-std: found {short(std)}, expected numbers above 0")
    return Preprocessing(size, _triple(f"{prefix}-mean", "0" if mean is None else mean), scale)


def _triple(name: str, text: str) -> Triple:
    """One number for all channels, or three."""
    with suppress(ValueError):
        numbers = [float(part) for part in text.split(",")]
        if len(numbers) in (1, 3) and all(abs(one) < 1e6 for one in numbers):
            return numbers[0], numbers[len(numbers) // 2], numbers[-1]
    raise RequestError(f"{name}: found {short(text)}, expected a number, or three as in 0.48,0.46,0.41")


def _facts(bundle: Bundle, pipeline: Pipeline) -> dict[str, str]:
    """What was measured, on what."""
    host, situation = host_report().facts, pipeline.situation(1, None, "balanced")
    return {
        "bundle": bundle.manifest.name,
        "bundle_digest": bundle.digest,
        "backend": f"{situation.backend}, {situation.threads} threads",
        "image_decoder": pipeline.engines.picture_backend,
        "host": f"{host['system']}, {processor()}, {usable_cores()} cores",
        "onnxruntime": host["onnxruntime"],
        "lantern_rt": __version__,
        "date": datetime.date.today().isoformat(),
    }
