"""What decoding costs on this host: passes, the memory bound, the host's own share, and what tuned drafts would give.

    python benchmarks/decode.py                            # LlamaGen-B's sizes, random weights; minutes
    python benchmarks/decode.py --shape GPT-XL --methods ar --threads 1
    python benchmarks/decode.py --bundle bundles/llamagen-b
    python benchmarks/decode.py --smoke                    # tiny: does it still run?

Three parts. *Passes*: milliseconds of a pass against its nodes at half an image, two rows (one image with guidance),
beside the time it takes to read the target's weights once. *Methods*: every method against plain decoding, as
`lantern-rt bench` compares them, and the share of decoding that is spent outside the engines. *Projection*: what the
best tree or window would give at these costs, with the papers' trees beside it, if drafts were accepted as often as
`lantern-rt tune` counted on the bundle `--rates`. Random weights need `lantern-rt[export]`. Nothing is judged.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from lantern_rt import LanternError, Pipeline, RequestError, __version__, open_bundle
from lantern_rt.bundle.files import Bundle
from lantern_rt.engines.bandwidth import read_bandwidth
from lantern_rt.engines.host import host_report, processor
from lantern_rt.evaluation.drawing import parse_ways
from lantern_rt.planning.costs import HostCosts, PassCost
from lantern_rt.planning.probe import CHAIN, WINDOW, measure_costs, with_overhead
from lantern_rt.planning.rates_file import Rates, brought_rates
from lantern_rt.planning.tree_search import Plan, best_plan, expected_codes, slots_per_level
from lantern_rt.runtime.tree import StaticTree
from lantern_rt.runtime.tree_names import named_tree
from lantern_rt.tuning.bench import bench, target_bytes, usual_ways
from lantern_rt.tuning.measure import Calibration

ROWS = 2  # one image with guidance
PASS_SECONDS = 20.0
PAPER_TREES = ("mc-25", "naive-57")


def measure(
    pipeline: Pipeline, bandwidth: float, methods: str | None, images: int, rates: Rates, seconds: float = PASS_SECONDS
) -> dict[str, Any]:
    """Print and return all three parts for one pipeline; bandwidth: bytes per second."""
    manifest = pipeline.bundle.manifest
    size = target_bytes(pipeline.bundle) // (2 if manifest.target.dtype == "float16" else 1)
    bound = size / bandwidth
    print(f"\n{manifest.name}, {manifest.codes_per_image} tokens: target weights {size / 1e6:.0f} MB", end="")
    print(f", read once in {1e3 * bound:.2f} ms at {bandwidth / 1e9:.1f} GB/s")
    costs = measure_costs(manifest, *pipeline.decoders(), ROWS, seconds)
    passes = {"target": print_passes("target", costs.target, bound)}
    if costs.drafter is not None:
        passes["drafter"] = print_passes("drafter", costs.drafter, None)
    rows = compare(pipeline, methods, images)
    request = calibration_of(pipeline.bundle).batch(0)
    costs = with_overhead(
        costs,
        pipeline.stream(**request, method="ar"),
        pipeline.stream(**request, method="sjd", window=WINDOW),
        pipeline.stream(**request, method="eagle", tree=f"chain-{CHAIN}") if costs.drafter else None,
    )
    projected = print_projection(rates, costs)
    return {"name": manifest.name, "bound_ms": 1e3 * bound, "passes": passes, "methods": rows, "projection": projected}


def calibration_of(bundle: Bundle) -> Calibration:
    """What to draw, one image at a time: class ids, or the bundle's own prompts where it has some."""
    condition = bundle.manifest.condition
    if condition.kind == "embeddings":
        raise RequestError(f"bundle {bundle.manifest.name}: takes embeddings, expected one of prompts or class ids")
    if condition.kind == "class":
        return Calibration(None, range(condition.classes or 1), 1)
    if "prompts" in bundle.manifest.files:
        return Calibration(bundle.path("prompts").read_text("utf-8").splitlines(), None, 1)
    return Calibration(("a red cube on sand",), None, 1)


def print_passes(name: str, cost: PassCost, bound: float | None) -> list[dict[str, Any]]:
    """Milliseconds against nodes, in units of the smallest pass, and the share of the bound that is reached."""
    rows = []
    print(f"  {name:8} nodes       ms  relative  share of the bound")
    for nodes, seconds in zip(cost.nodes, cost.seconds, strict=True):
        share = None if bound is None else bound / seconds
        row = {"nodes": nodes, "ms": 1e3 * seconds, "relative": seconds / cost.seconds[0], "bound_share": share}
        reached = "" if share is None else f"{share:.0%}"
        print(f"  {nodes:14} {row['ms']:8.2f} {row['relative']:9.2f} {reached:>19}", flush=True)
        rows.append(row)
    return rows


def compare(pipeline: Pipeline, methods: str | None, images: int) -> list[dict[str, Any]]:
    """Methods against plain decoding, one line each.

    outside: the share of decoding, text and pictures apart, that is spent outside the engines.
    """
    manifest = pipeline.bundle.manifest
    ways = parse_ways(methods or usual_ways(manifest, (), sweep=False), {}, manifest)
    found = bench(pipeline, ways, calibration_of(pipeline.bundle), images, lambda line: None)
    rows = []
    print("  speed-up  tokens/pass  target ms  drafter ms  outside  TVD/token  method")
    for row in found.rows:
        figures, stats = found.figures(row), [run.stats for run in row.runs]
        drafted = [one.drafter_seconds / one.drafter_passes for one in stats if one.drafter_passes]
        figures |= {
            "target_ms": 1e3 * statistics.median(one.target_seconds / one.target_passes for one in stats),
            "drafter_ms": 1e3 * statistics.median(drafted) if drafted else 0.0,
            "outside_engines": sum(one.host_seconds for one in stats) / sum(one.seconds for one in stats),
        }
        print(
            f"  {figures['speed_against_ar']:8.2f} {figures['tokens_per_target_pass']:12.2f} "
            f"{figures['target_ms']:10.2f} {figures['drafter_ms']:11.2f} {figures['outside_engines']:8.1%} "
            f"{figures['tvd_per_code']:10.4f}  {row.way.label}",
            flush=True,
        )
        rows.append(figures)
    return rows


def print_projection(rates: Rates, costs: HostCosts) -> list[dict[str, Any]]:
    """Per measured candidate the best tree or window at these costs, and the papers' static trees beside it."""
    rows = []
    print(
        f"  outside the engines {1e3 * costs.step:.2f} ms a step, {1e3 * costs.level:.2f} ms a drafter pass; projected:"
    )
    print("  speed-up  tokens/pass  TVD/token  method, tree or window")
    for entry in rates.entries:
        if entry.greedy or (entry.rates and costs.drafter is None):
            continue
        chances = entry.tree_rates()
        plans = {"": best_plan(chances, entry.window_codes(), costs)}
        for name in PAPER_TREES if entry.rates else ():
            tree = named_tree(name)
            assert isinstance(tree, StaticTree)
            seconds = costs.tree_seconds(tree.nodes, slots_per_level(tree.paths))
            plans[name] = Plan(tree.paths, expected_codes(tree.paths, chances), seconds)
        for name, plan in plans.items():
            row = {
                "candidate": entry.candidate.label,
                "plan": name or plan.name,
                "speed_against_ar": plan.rate * costs.plain_seconds,
                "tokens_per_target_pass": plan.codes,
                "tvd_per_code": entry.tvd_per_code,
            }
            print(
                f"  {row['speed_against_ar']:8.2f} {plan.codes:12.2f} {entry.tvd_per_code:10.4f}  "
                f"{entry.candidate.label}, {row['plan'] or 'plain decoding'}"
            )
            rows.append(row)
    return rows


def read_rates_of(name: str) -> Rates:
    """The acceptance statistics that a bundle brings."""
    bundle = open_bundle(name)
    if (rates := brought_rates(bundle)) is None:
        raise RequestError(
            f"rates: bundle {bundle.manifest.name} brings none, expected those of `lantern-rt tune --rates`"
        )
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description="What decoding costs on this host.")
    parser.add_argument("--shape", default="GPT-B", help="published sizes, with random weights [default: GPT-B]")
    parser.add_argument("--bundle", help="a bundle instead")
    parser.add_argument("--threads", type=int, help="engine threads [default: one per core]")
    parser.add_argument("--methods", help="as in `lantern-rt bench` [default: all that the bundle can run]")
    parser.add_argument("--images", type=int, default=3, help="of every method, at least 3")
    parser.add_argument("--rates", default="scenes", help="bundle whose rates are projected")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, few repeats")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = arguments.bundle
        if bundle is None:
            from random_bundle import SHAPES, random_bundle

            name = "tiny" if arguments.smoke else arguments.shape
            if name not in SHAPES:
                raise RequestError(f"shape: found {name!r}, expected one of {', '.join(SHAPES)}")
            bundle = random_bundle(replace(SHAPES[name], vq_width=32), Path(folder) / name)
        host = host_report()
        print(f"lantern-rt {__version__}, {processor()}")
        print("\n".join(f"  {name:12} {value}" for name, value in host.rows()))
        pipeline = Pipeline.from_bundle(bundle, arguments.threads)
        threads = pipeline.situation(1, None, "").threads
        bandwidth = read_bandwidth(target_bytes(pipeline.bundle), threads)
        seconds = 1.0 if arguments.smoke else PASS_SECONDS
        found = measure(
            pipeline, bandwidth, arguments.methods, arguments.images, read_rates_of(arguments.rates), seconds
        )
    if arguments.json:
        report = {"lantern_rt": __version__, "host": host.as_dict(), "processor": processor(), "threads": threads}
        arguments.json.write_text(json.dumps(report | found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except LanternError as error:
        sys.exit(f"decode.py: {error}")
