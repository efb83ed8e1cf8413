"""What rounded weights gain and give away: passes by nodes, whole images by method, and quality in float32's eyes.

    python benchmarks/precision.py                       # the embedded model: all three tables; minutes
    python benchmarks/precision.py --only passes --rows 2,8
    python benchmarks/precision.py --shape GPT-XL --layers 3
    python benchmarks/precision.py --smoke               # tiny: does it still run?

*passes*: milliseconds of a target pass after half an image. *speed*: whole images, text and pictures included, over
plain decoding in float32 of the same turn. *quality*: nearness of distributions as `lantern-rt verify` has it (KL in
nats, agreement on the likeliest token; no guidance, temperature 1) at the codes that float32 draws; and, by method,
the excess: nats a token of what is drawn in the eyes of the float32 target, guided, less their expected value there,
against that of float32's own `ar` on the same prompts and seeds; and in how many points more or less of what captions
of unseen scenes say the judge of the recipe finds in the pictures. Of `--shape` weights are random, so that there are
passes only. Bundles are made in `--work` and kept. Needs `lantern-rt[export]`. No figure fails the run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from decode import print_table
from random_bundle import SHAPES, Shape, export_checkpoints, write_checkpoints

from lantern_rt import LanternError, Pipeline, __version__
from lantern_rt.compare.turns import MethodRun, Prompts, read_bundle_prompts, run
from lantern_rt.engines.host import processor
from lantern_rt.export.verify import agree, divergence
from lantern_rt.planning.costs import measure_costs
from lantern_rt.runtime.likelihood import sequence_logits
from lantern_rt.runtime.statistics import Clock

sys.path.append(str(Path(__file__).resolve().parents[1]))  # recipes/ is not installed

from recipes.scenes.bundle import write_scenes_bundle
from recipes.scenes.evaluate import draw_prompts, score
from recipes.scenes.judge import load_judge
from recipes.scenes.restore import restore_work

PRECISIONS = ("fp32", "int8", "int8-weights", "int4-weights")
METHODS = ("ar", "sjd:window=3", "sjd:window=7", "sjd:window=11:lambda=5", "rows:window=8", "rows:window=6")
ONE_PICTURE = ("fp32", "int8")  # where exact methods draw what `ar` draws
PARTS = ("passes", "speed", "quality")
NODES = (2, 4, 8, 16, 32)
TOGETHER = 8  # images drawn together where time does not count
ROUNDS = 3  # over all precisions, so that what disturbs the host hits all alike


def write_bundles(shape: Shape | None, name: str, work: Path, precisions: Sequence[str]) -> dict[str, Path | str]:
    """The bundle of every precision, of a shape or the embedded model; those that are there already are kept."""
    goals = {p: work / f"{name}-{p}" for p in precisions if shape or p != "fp32"}
    if missing := [precision for precision, goal in goals.items() if not goal.is_dir()]:
        with tempfile.TemporaryDirectory(dir=work) as folder:
            checkpoints = Path(folder) / "checkpoints"
            if shape is None:
                restore_work("scenes", checkpoints)
            else:
                write_checkpoints(shape, checkpoints, drafter=False)
            for precision in missing:
                if shape is None:
                    write_scenes_bundle(checkpoints, goals[precision], False, lambda *_: None, precision=precision)
                else:
                    export_checkpoints(shape, checkpoints, goals[precision], precision)
    return {"fp32": "scenes", **goals}


def part_of(shape: Shape, layers: int | None) -> Shape:
    """A shape with fewer layers and as much less of a head, and a small image tokenizer."""
    count = layers or shape.num_layers
    return replace(shape, num_layers=count, codes=shape.codes * count // shape.num_layers, vq_width=32)


def passes(pipelines: dict[str, Pipeline], rows: int, seconds: float) -> None:
    """Print milliseconds of a target pass by precision and nodes; `seconds` for each precision."""
    found: dict[str, list[dict[int, float]]] = {precision: [] for precision in pipelines}
    steady = True
    for _ in range(ROUNDS):
        for precision, pipeline in pipelines.items():
            target, _ = pipeline.decoders()
            costs = measure_costs(pipeline.bundle.manifest, target, None, rows, seconds / ROUNDS)
            steady &= costs.steady
            found[precision].append(costs.target)
    print(f"\n{rows} rows: milliseconds of a pass by nodes" + ("" if steady else "; this host is too busy"))
    table = []
    for precision, rounds in found.items():
        medians = {n: 1e3 * statistics.median(one[n] for one in rounds) for n in NODES if all(n in o for o in rounds)}
        table.append({"precision": precision, **{str(n): medians.get(n) for n in NODES}})
    print_table(table, {"precision": "", **{str(n): ".2f" for n in NODES}})


def speed(pipelines: dict[str, Pipeline], methods: Sequence[str], subjects: Prompts, turns: int) -> None:
    """Print how fast every method is at every precision, over plain decoding in float32 of the same turn."""
    contenders = [MethodRun(method, {"method": method}) for method in methods]
    for pipeline in pipelines.values():
        for contender in contenders:  # shapes of passes are met once before they are timed
            pipeline(**subjects.request(0, 1), **contender.options)
    found = [
        {
            (precision, contender.label): run(pipeline, contender, subjects.request(turn, 1))
            for contender in contenders
            for precision, pipeline in pipelines.items()
        }
        for turn in range(turns)
    ]
    table = []
    for key in found[0]:
        gains = [one["fp32", "ar"].seconds / one[key].seconds for one in found]
        tokens = statistics.fmean(one[key].statistics.tokens_per_forward_pass for one in found)
        table.append({"precision": key[0], "method": key[1], "speed_up": statistics.median(gains), "tokens": tokens})
    print(f"\nwhole images one at a time, {turns} turns: median speed-up, tokens per forward pass")
    print_table(table, {"speed_up": ".2f", "tokens": ".2f", "precision": "", "method": ""})


def quality(pipelines: dict[str, Pipeline], methods: Sequence[str], images: int) -> None:
    """Print how far distributions are from float32's, how likely float32 finds what is drawn, and what a judge sees.

    Images are drawn a few at a time, which changes none of them.
    """
    exact, critic, together = pipelines["fp32"], load_judge(), min(images, TOGETHER)
    scenes, prompts = draw_prompts(images // together * together)
    twins = [m for m in methods if m != "ar" and exact.check(prompts[0], method=m).settings.method.exact]
    keys = [(p, m) for p in pipelines for m in methods if p not in ONE_PICTURE or m not in twins]
    same: dict[str, list[np.ndarray]] = {precision: [] for precision in pipelines}
    apart: dict[str, list[np.ndarray]] = {precision: [] for precision in pipelines}
    excess: dict[tuple[str, str], list[float]] = {key: [] for key in keys}
    shown: dict[tuple[str, str], list[float]] = {key: [] for key in keys}  # of every picture, the share of right marks
    for first in range(0, len(prompts), together):
        request = {"prompts": prompts[first : first + together], "seed": 1000 + first}
        drawn = {key: pipelines[key[0]](**request, method=key[1]) for key in keys}
        for key, result in drawn.items():
            excess[key] += [own.nats - own.entropy for own in exact.likelihoods(result.codes, **request, method="ar")]
            pictures = np.stack([np.asarray(image) for image in result.images])
            marks = score(critic, scenes[first : first + together], pictures)
            shown[key] += [float(np.mean([*one.values()])) for one in marks]
        plain = drawn["fp32", "ar"].codes
        logits = {precision: conditional_logits(pipeline, request, plain) for precision, pipeline in pipelines.items()}
        for precision, found in logits.items():
            same[precision].append(agree(logits["fp32"], found))
            apart[precision].append(divergence(logits["fp32"], found))
        print(f"{first + together} of {images} images", file=sys.stderr, flush=True)
    table: list[dict[str, Any]] = []
    for precision in pipelines:
        far, share = np.concatenate(apart[precision]), np.concatenate(same[precision]).mean()
        table.append({"precision": precision, "mean_kl": far.mean(), "largest_kl": far.max(), "agreement": share})
    print(f"\ndistributions at the codes of {len(prompts)} images")
    print_table(table, {"mean_kl": ".1e", "largest_kl": ".1e", "agreement": ".1%", "precision": ""})
    rows: list[dict[str, Any]] = []
    for key in keys:
        row: dict[str, Any] = {"precision": key[0], "method": key[1]}
        for name, own in {"excess": excess, "points": shown}.items():
            more = np.subtract(own[key], own["fp32", "ar"]) * (100 if name == "points" else 1)
            row |= {name: more.mean(), f"{name}_error": 1.96 * more.std(ddof=1) / len(more) ** 0.5}
        rows.append(row)
    right = np.mean(shown["fp32", "ar"])
    print(f"\nof {len(prompts)} images against ar in float32 (which shows {right:.1%}): excess nats a token, points")
    formats = {"excess": "+.4f", "excess_error": ".4f", "points": "+.2f", "points_error": ".2f"}
    print_table(rows, formats | {"precision": "", "method": ""})


def conditional_logits(pipeline: Pipeline, request: dict[str, Any], codes: Sequence[np.ndarray]) -> np.ndarray:
    """Logits of the conditional row at every token of every image, `[images * cells, vocab_size]`."""
    checked = pipeline.check(**request, method="ar")
    model, clock = pipeline.model(pipeline.engines, [checked.settings.method]), Clock()
    prompts = pipeline.prefixes(pipeline.engines, checked.images)
    parts = (sequence_logits(model, [p.cond], own[:-1], clock) for p, own in zip(prompts, codes, strict=True))
    return np.concatenate([part[0] for image in parts for part in image])


def main() -> None:
    parser = argparse.ArgumentParser(description="What rounded weights gain and give away.")
    parser.add_argument("--shape", choices=SHAPES, help="published sizes with random weights [default: scenes]")
    parser.add_argument("--layers", type=int, help="of a shape, with as large a part of its head [default: all]")
    parser.add_argument("--only", choices=PARTS, help="one table [default: all]")
    parser.add_argument("--rows", default="2", help="of passes: two an image with guidance, such as 2,8")
    parser.add_argument("--threads", type=int, help="engine threads [default: one per core]")
    parser.add_argument("--seconds", type=float, default=10.0, help="for the passes of each precision")
    parser.add_argument("--turns", type=int, default=8, help="of whole images, for their speed")
    parser.add_argument("--images", type=int, default=64, help="of each method, for their quality")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="with fp32 among them [default: all]")
    parser.add_argument("--methods", default=",".join(METHODS), help="with ar among them, as in `lantern-rt bench`")
    parser.add_argument("--work", type=Path, default=Path("work/precision"), help="folder for bundles")
    parser.add_argument("--smoke", action="store_true", help="few repeats of everything")
    given = parser.parse_args()
    if given.smoke:
        given.seconds, given.turns, given.images = 0.1, 1, 2
    parts = [given.only] if given.only else PARTS[: 1 if given.shape else None]
    given.work.mkdir(parents=True, exist_ok=True)
    shape = part_of(SHAPES[given.shape], given.layers) if given.shape else None
    name = f"{given.shape}-{shape.num_layers}" if shape else "scenes"
    bundles, methods = write_bundles(shape, name, given.work, given.precisions.split(",")), given.methods.split(",")
    pipelines = {precision: Pipeline.from_bundle(bundle, given.threads) for precision, bundle in bundles.items()}
    threads = pipelines["fp32"].situation(1, None, "").threads
    print(f"lantern-rt {__version__}, {processor()}, threads: {threads}, {name}")
    if "passes" in parts:
        for rows in given.rows.split(","):
            passes(pipelines, int(rows), given.seconds)
    if given.shape is None:
        subjects = read_bundle_prompts(pipelines["fp32"].bundle, None)
        if "speed" in parts:
            speed(pipelines, methods, subjects, given.turns)
        if "quality" in parts:
            quality(pipelines, methods, given.images)


if __name__ == "__main__":
    try:
        main()
    except LanternError as error:
        sys.exit(f"precision.py: {error}")
