"""Compare quantized weights of the embedded model with float32: time of forward passes, speed of methods, and quality.

    python benchmarks/precision.py                       # all three tables; minutes
    python benchmarks/precision.py --only passes --rows 2 8
    python benchmarks/precision.py --smoke               # few repeats, to test this program

The embedded model has integer weights, which the precision fp32 stores as floats. The comparison of int8 with fp32
therefore shows the effect of rounding activations. The program prints three tables:

- passes: milliseconds of a target pass with half an image in the KV cache, by number of nodes;
- speed: speed-up of whole images over plain decoding in float32 of the same round, including text and pixels;
- quality, by precision: mean and largest KL divergence from float32 in nats, and agreement on the most likely token.
  Distributions are without guidance and at temperature 1, as in `lantern-rt verify`, at the codes of float32;
- quality, by method: differences to `ar` in float32 with the same prompts and seeds. Excess is the mean negative
  log-likelihood of sampled tokens under the fp32 target, minus its expected value. Points are percentage points of
  caption attributes that the recipe's judge model finds in the image. The captions are of unseen scenes.

Bundles are written to `--work` and kept. The program needs `lantern-rt[export]`. There is no pass or fail.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from decode import NODES, REPEATS, measure_pass_seconds

from lantern_rt import LanternError, Pipeline, __version__
from lantern_rt.cli.console import print_table
from lantern_rt.compare.prompts import read_bundle_prompts
from lantern_rt.compare.turns import ComparedMethod, run_method
from lantern_rt.engines.host import describe_processor
from lantern_rt.export.measures import compare_top_tokens, measure_kl_divergence
from lantern_rt.runtime.likelihood import compute_sequence_logits
from lantern_rt.runtime.statistics import EngineTimer

sys.path.append(str(Path(__file__).resolve().parents[1]))  # recipes/ is not installed

from recipes.scenes.bundle import write_scenes_bundle
from recipes.scenes.evaluate import match_attributes, sample_prompts
from recipes.scenes.judge import judge, load_judge
from recipes.scenes.restore import restore_work_folder

PRECISIONS = ("fp32", "int8", "int8-weights", "int4-weights")
METHODS = ("ar", "sjd:window=3", "sjd:window=7", "sjd:window=11:lambda=5", "rows:window=8", "rows:window=6")
SAME_IMAGE = ("fp32", "int8")  # precisions in which exact methods generate the image of `ar`
KEY_COLUMNS = {"precision": "{precision}", "method": "{method}"}
BATCH_SIZE = 8  # for measurements of quality, where time does not matter


def write_bundles(work_folder: Path, precisions: Sequence[str]) -> dict[str, Path]:
    """Write a bundle of the embedded model for each precision and for fp32, unless the bundle exists.

    Returns:
        The folder of each bundle, by precision.
    """
    paths = {precision: work_folder / f"scenes-{precision}" for precision in dict.fromkeys(["fp32", *precisions])}
    missing = [precision for precision, path in paths.items() if not path.is_dir()]
    with tempfile.TemporaryDirectory(dir=work_folder) as folder:
        checkpoints = Path(folder) / "checkpoints"
        if missing:
            restore_work_folder("scenes", checkpoints)
        for precision in missing:
            name, _, compute = precision.partition("+")
            write_scenes_bundle(checkpoints, paths[precision], False, lambda *_: None, compute or "float32", name)
    return paths


def print_pass_times(pipelines: dict[str, Pipeline], rows: int, repeats: int) -> None:
    """Print a table of the milliseconds of a target pass, by precision and number of nodes."""
    print(f"\n{rows} rows: milliseconds of a pass by nodes")
    table = []
    for precision, pipeline in pipelines.items():
        seconds = measure_pass_seconds(pipeline, "target", rows, repeats)
        table.append({"precision": precision} | {f"n{nodes}": 1e3 * cost for nodes, cost in seconds.items()})
    print_table({"precision": "{precision}"} | {str(nodes): f"{{n{nodes}:.2f}}" for nodes in NODES}, table)


def print_speed(pipelines: dict[str, Pipeline], methods: Sequence[str], num_turns: int) -> None:
    """Print a table of the speed-up of each method and precision over plain decoding in float32 of the same round."""
    prompts = read_bundle_prompts(pipelines["fp32"].bundle)
    runs = [(precision, ComparedMethod(method, {"method": method})) for method in methods for precision in pipelines]
    for precision, method in runs:  # warm up every shape of forward passes
        pipelines[precision](**prompts.request(0, 1), **method.options)
    by_turn = []
    for turn in range(num_turns):
        request = prompts.request(turn, 1)
        by_turn.append({(p, method.label): run_method(pipelines[p], method, request) for p, method in runs})
    table = []
    for key in by_turn[0]:
        gains = [turn_runs["fp32", "ar"].seconds / turn_runs[key].seconds for turn_runs in by_turn]
        tokens = statistics.fmean(turn_runs[key].statistics.tokens_per_forward_pass for turn_runs in by_turn)
        table.append({"precision": key[0], "method": key[1], "speed_up": statistics.median(gains), "tokens": tokens})
    print(f"\nwhole images one at a time, {num_turns} turns: median speed-up, tokens per forward pass")
    columns = {"speed-up": "{speed_up:.2f}", "tokens per pass": "{tokens:.2f}"}
    print_table(KEY_COLUMNS | columns, table)


def print_quality(pipelines: dict[str, Pipeline], methods: Sequence[str], num_images: int) -> None:
    """Print the tables of quality: divergence from float32 by precision; excess and agreement by method."""
    reference = pipelines["fp32"]
    judge_model = load_judge()
    batch = min(num_images, BATCH_SIZE)
    scenes, prompts = sample_prompts(num_images // batch * batch)
    settings = {method: reference.check(prompts[0], method=method).settings for method in methods}
    same_image_methods = [method for method in methods if method != "ar" and settings[method].method.exact]
    keys = [(p, m) for p in pipelines for m in methods if p not in SAME_IMAGE or m not in same_image_methods]
    top_agreements: dict[str, list[np.ndarray]] = {precision: [] for precision in pipelines}
    divergences: dict[str, list[np.ndarray]] = {precision: [] for precision in pipelines}
    excess: dict[tuple[str, str], list[float]] = {key: [] for key in keys}
    image_marks: dict[tuple[str, str], list[float]] = {
        key: [] for key in keys
    }  # share of right attributes of each image
    for first in range(0, len(prompts), batch):
        shown = scenes[first : first + batch]
        request: dict[str, Any] = {"prompts": prompts[first : first + batch], "seed": 1000 + first}
        results = {key: pipelines[key[0]](**request, method=key[1]) for key in keys}
        for key, result in results.items():
            excess[key] += [
                values.nats - values.entropy for values in reference.likelihoods(result.codes, **request, method="ar")
            ]
            pixels = np.stack([np.asarray(image) for image in result.images])
            verdicts = judge(judge_model, pixels, [len(scene.solids) for scene in shown])
            marks = match_attributes(shown, request["prompts"], verdicts)
            image_marks[key] += [float(np.mean([*image_mark.values()])) for image_mark in marks]
        reference_codes = results["fp32", "ar"].codes
        logits = {
            precision: compute_conditional_logits(pipeline, request, reference_codes)
            for precision, pipeline in pipelines.items()
        }
        for precision, logits_of_precision in logits.items():
            top_agreements[precision].append(compare_top_tokens(logits["fp32"], logits_of_precision))
            divergences[precision].append(measure_kl_divergence(logits["fp32"], logits_of_precision))
        print(f"{first + batch} of {num_images} images", file=sys.stderr, flush=True)
    table: list[dict[str, Any]] = []
    for precision in pipelines:
        divergence = np.concatenate(divergences[precision])
        share = np.concatenate(top_agreements[precision]).mean()
        table.append(
            {"precision": precision, "mean_kl": divergence.mean(), "largest_kl": divergence.max(), "agreement": share}
        )
    print(f"\ndistributions at the codes of {len(prompts)} images")
    columns = {"mean KL": "{mean_kl:.1e}", "largest KL": "{largest_kl:.1e}", "agreement": "{agreement:.1%}"}
    print_table({"precision": "{precision}"} | columns, table)
    rows: list[dict[str, Any]] = []
    for key in keys:
        row: dict[str, Any] = {"precision": key[0], "method": key[1]}
        for name, values in {"excess": excess, "points": image_marks}.items():
            differences = np.subtract(values[key], values["fp32", "ar"]) * (100 if name == "points" else 1)
            error = 1.96 * differences.std(ddof=1) / len(differences) ** 0.5  # half of the 95 % confidence interval
            row |= {name: differences.mean(), f"{name}_error": error}
        rows.append(row)
    reference_share = np.mean(image_marks["fp32", "ar"])
    print(
        f"\nof {len(prompts)} images against ar in float32 (which shows {reference_share:.1%}): "
        "excess nats a token, points"
    )
    columns = {"excess": "{excess:+.4f} +- {excess_error:.4f}", "points": "{points:+.2f} +- {points_error:.2f}"}
    print_table(KEY_COLUMNS | columns, rows)


def compute_conditional_logits(pipeline: Pipeline, request: dict[str, Any], codes: Sequence[np.ndarray]) -> np.ndarray:
    """Return the logits of the conditional batch row at every token of every image, `[images * cells, vocab_size]`."""
    prepared = pipeline.prepare(pipeline.check(**request, method="ar"))
    model = prepared.model()
    layout = prepared.plan.layout
    timer = EngineTimer()
    prompts = zip(prepared.prompts(), codes, strict=True)
    logit_blocks = (
        compute_sequence_logits(model, layout, [prompt.cond], image_codes[:-1], timer)
        for prompt, image_codes in prompts
    )
    return np.concatenate([block[0] for image_blocks in logit_blocks for block in image_blocks])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the speed and the quality of quantized weights.")
    parser.add_argument("--only", choices=("passes", "speed", "quality"), help="one table [default: all]")
    parser.add_argument("--rows", type=int, nargs="+", default=[2], help="batch rows; an image with guidance has two")
    parser.add_argument("--threads", type=int, help="engine threads [default: one per core]")
    parser.add_argument("--turns", type=int, default=8, help="rounds of the speed measurement")
    parser.add_argument("--images", type=int, default=64, help="images of each method for quality")
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, help="such as fp32, int8 or int8+float16")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="decoding methods, including ar")
    parser.add_argument("--work", type=Path, default=Path("work/precision"), help="folder for bundles")
    parser.add_argument("--smoke", action="store_true", help="few repeats of everything")
    arguments = parser.parse_args()
    repeats = REPEATS
    if arguments.smoke:
        repeats = 1
        arguments.turns = 1
        arguments.images = 2
        arguments.methods = ("ar", "sjd:window=3")
    arguments.work.mkdir(parents=True, exist_ok=True)
    bundles = write_bundles(arguments.work, arguments.precisions)
    pipelines = {precision: Pipeline.from_bundle(bundle, arguments.threads) for precision, bundle in bundles.items()}
    print(f"lantern-rt {__version__}, {describe_processor()}, threads: {pipelines['fp32'].engines.threads}")
    if arguments.only in (None, "passes"):
        for rows in arguments.rows:
            print_pass_times(pipelines, rows, repeats)
    if arguments.only in (None, "speed"):
        print_speed(pipelines, arguments.methods, arguments.turns)
    if arguments.only in (None, "quality"):
        print_quality(pipelines, arguments.methods, arguments.images)


if __name__ == "__main__":
    try:
        main()
    except LanternError as error:
        sys.exit(f"precision.py: {error}")
