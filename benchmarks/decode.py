"""What decoding costs on this host: passes, the memory bound, the host's own share, and what tuned drafts would give.

    python benchmarks/decode.py                            # LlamaGen-B's sizes, random weights; minutes
    python benchmarks/decode.py --shape GPT-XL --methods ar --threads 1
    python benchmarks/decode.py --bundle bundles/llamagen-b
    python benchmarks/decode.py --smoke                    # tiny: does it still run?

Three parts. *Passes*: milliseconds of a pass against its nodes at half an image, two rows (one image with guidance),
beside the time it takes to read the target's weights once. *Methods*: every method against plain decoding, as
`lantern-rt bench` compares them, and the share of decoding that is spent outside the engines. *Projection*: what the
best tree or window would give at these costs, with the papers' trees beside it, if drafts were accepted as often as
`lantern-rt tune` counted on the bundle `--rates`. Needs `lantern-rt[export]`. Nothing is judged.
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

from random_bundle import SHAPES, random_bundle

from lantern_rt import LanternError, Pipeline, __version__, open_bundle
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
    pipeline: Pipeline,
    bandwidth: float,
    methods: str | None,
    images: int,
    rates: Rates | None,
    seconds: float = PASS_SECONDS,
) -> dict[str, Any]:
    """Print and return all three parts for one pipeline; bandwidth: bytes per second."""
    manifest = pipeline.bundle.manifest
    size = target_bytes(pipeline.bundle) // (2 if manifest.target.dtype == "float16" else 1)
    bound = size / bandwidth
    print(f"\n{manifest.name}, {manifest.codes_per_image} tokens: target weights {size / 1e6:.0f} MB", end="")
    print(f", read once in {1e3 * bound:.2f} ms at {bandwidth / 1e9:.1f} GB/s")
    costs = measure_costs(manifest, *pipeline.decoders(), ROWS, seconds)
    passes = [
        *pass_rows("target", costs.target, bound),
        *(pass_rows("drafter", costs.drafter) if costs.drafter else ()),
    ]
    print_table(passes, {"graph": "", "nodes": "d", "ms": ".2f", "relative": ".2f", "bound_share": ".0%"})
    rows = compare(pipeline, methods, images)
    request = calibration_of(pipeline.bundle).batch(0)
    costs = with_overhead(
        costs,
        pipeline.stream(**request, method="ar"),
        pipeline.stream(**request, method="sjd", window=WINDOW),
        pipeline.stream(**request, method="eagle", tree=f"chain-{CHAIN}") if costs.drafter else None,
    )
    print(
        f"  outside the engines {1e3 * costs.step:.2f} ms a step, {1e3 * costs.level:.2f} ms a drafter pass; projected:"
    )
    projected = project(rates, costs)
    columns = {"speed_against_ar": ".2f", "tokens_per_target_pass": ".2f", "tvd_per_code": ".4f"}
    print_table(projected, columns | {"plan": "", "candidate": ""})
    return {"name": manifest.name, "bound_ms": 1e3 * bound, "passes": passes, "methods": rows, "projection": projected}


def print_table(rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    """Print rows under their keys; columns: those to show, and how."""
    lines = [[f"{row[key]:{kind}}" if row[key] is not None else "" for key, kind in columns.items()] for row in rows]
    lines.insert(0, [key.replace("_", " ") for key in columns])
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def calibration_of(bundle: Bundle) -> Calibration:
    """What to draw, one image at a time: class ids, or the bundle's own prompts where it has some."""
    condition = bundle.manifest.condition
    if condition.kind == "class":
        return Calibration(None, range(condition.classes or 1), 1)
    if "prompts" in bundle.manifest.files:
        return Calibration(bundle.path("prompts").read_text("utf-8").splitlines(), None, 1)
    return Calibration(("a red cube on sand",), None, 1)


def pass_rows(graph: str, cost: PassCost, bound: float | None = None) -> list[dict[str, Any]]:
    """Milliseconds against nodes, in units of the smallest pass, and the share of the bound that is reached."""
    return [
        {
            "graph": graph,
            "nodes": nodes,
            "ms": 1e3 * s,
            "relative": s / cost.seconds[0],
            "bound_share": bound and bound / s,
        }
        for nodes, s in zip(cost.nodes, cost.seconds, strict=True)
    ]


def compare(pipeline: Pipeline, methods: str | None, images: int) -> list[dict[str, Any]]:
    """Methods against plain decoding; outside_engines: a share of decoding, without text and pictures."""
    manifest = pipeline.bundle.manifest
    ways = parse_ways(methods or usual_ways(manifest, (), sweep=False), {}, manifest)
    found = bench(pipeline, ways, calibration_of(pipeline.bundle), images, lambda line: None)
    rows = []
    for row in found.rows:
        stats = [run.stats for run in row.runs]
        drafted = [one.drafter_seconds / one.drafter_passes for one in stats if one.drafter_passes]
        times = {
            "target_ms": 1e3 * statistics.median(one.target_seconds / one.target_passes for one in stats),
            "drafter_ms": 1e3 * statistics.median(drafted) if drafted else None,
            "outside_engines": sum(one.host_seconds for one in stats) / sum(one.seconds for one in stats),
        }
        rows.append(found.figures(row) | times)
    columns = {"speed_against_ar": ".2f", "tokens_per_target_pass": ".2f", "target_ms": ".2f", "drafter_ms": ".2f"}
    print_table(rows, columns | {"outside_engines": ".1%", "tvd_per_code": ".4f", "way": ""})
    return rows


def project(rates: Rates | None, costs: HostCosts) -> list[dict[str, Any]]:
    """Per measured candidate the best tree or window at these costs, and the papers' static trees beside it."""
    rows = []
    for entry in rates.entries if rates else ():
        if entry.greedy or (entry.rates and costs.drafter is None):
            continue
        chances = entry.tree_rates()
        plans = [best_plan(chances, entry.window_codes(), costs)]
        for name in PAPER_TREES if entry.rates else ():
            tree = named_tree(name)
            assert isinstance(tree, StaticTree)
            seconds = costs.tree_seconds(tree.nodes, slots_per_level(tree.paths))
            plans.append(Plan(tree.paths, expected_codes(tree.paths, chances), seconds))
        rows += [
            {
                "candidate": entry.candidate.label,
                "plan": name or plan.name or "ar",
                "speed_against_ar": plan.rate * costs.plain_seconds,
                "tokens_per_target_pass": plan.codes,
                "tvd_per_code": entry.tvd_per_code,
            }
            for name, plan in zip(("", *PAPER_TREES), plans, strict=False)
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="What decoding costs on this host.")
    parser.add_argument("--shape", choices=SHAPES, default="GPT-B", help="published sizes, random weights")
    parser.add_argument("--bundle", help="a bundle instead")
    parser.add_argument("--threads", type=int, help="engine threads [default: one per core]")
    parser.add_argument("--methods", help="as in `lantern-rt bench` [default: all that the bundle can run]")
    parser.add_argument("--images", type=int, default=3, help="of every method, at least 3")
    parser.add_argument("--rates", default="scenes", help="bundle whose rates are projected")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, few repeats")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        name = "tiny" if arguments.smoke else arguments.shape
        bundle = arguments.bundle or random_bundle(replace(SHAPES[name], vq_width=32), Path(folder) / name)
        host = host_report()
        print(f"lantern-rt {__version__}, {processor()}")
        print("\n".join(f"  {name:12} {value}" for name, value in host.rows()))
        pipeline = Pipeline.from_bundle(bundle, arguments.threads)
        threads = pipeline.situation(1, None, "").threads
        bandwidth = read_bandwidth(target_bytes(pipeline.bundle), threads)
        rates, seconds = brought_rates(open_bundle(arguments.rates)), 1.0 if arguments.smoke else PASS_SECONDS
        found = measure(pipeline, bandwidth, arguments.methods, arguments.images, rates, seconds)
    if arguments.json:
        report = {"lantern_rt": __version__, "host": host.as_dict(), "processor": processor(), "threads": threads}
        arguments.json.write_text(json.dumps(report | found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except LanternError as error:
        sys.exit(f"decode.py: {error}")
