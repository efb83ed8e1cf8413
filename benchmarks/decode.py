"""What decoding costs on this host: passes, the memory bound, the host's own share, and what tuned drafts would give.

    python benchmarks/decode.py                            # LlamaGen-B's sizes, random weights; minutes
    python benchmarks/decode.py --shape GPT-XL --methods ar --threads 1
    python benchmarks/decode.py --bundle bundles/llamagen-b
    python benchmarks/decode.py --smoke                    # tiny: does it still run?

Three parts. *Passes*: milliseconds of a pass against its nodes at half an image, two rows (one image with guidance),
beside the time it takes to read the target's weights once. *Methods*: every method against plain decoding, as
`lantern-rt bench` compares them, and the share of decoding that is spent outside the engines. *Projection*: what the
best tree or window would give at these costs, with the papers' trees beside it, if drafts were accepted as often as
`lantern-rt tune` counted on the bundle `--project`. Needs `lantern-rt[export]`. Nothing is judged.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from random_bundle import SHAPES, random_bundle
from tree_figures import expected_tokens, slots_per_level

from lantern_rt import LanternError, Pipeline, __version__, open_bundle
from lantern_rt.compare.bench import bench, figures, memory_bound, usual_methods
from lantern_rt.compare.turns import Subjects, parse_contenders, subjects_of
from lantern_rt.engines.doctor import host_report
from lantern_rt.engines.host import processor, read_bandwidth
from lantern_rt.engines.memory import weight_bytes
from lantern_rt.planning.acceptance_statistics import AcceptanceStatistics, bundle_statistics
from lantern_rt.planning.costs import HostCosts, PassCost, early_pass, measure_costs, with_overhead
from lantern_rt.planning.tree_search import Plan, best_plan
from lantern_rt.runtime.tree import StaticTree
from lantern_rt.runtime.tree_names import named_tree
from lantern_rt.tuning.measure import describe

ROWS = 2  # one image with guidance
PASS_SECONDS = 20.0
PAPER_TREES = ("mc-25", "naive-57")


def measure(
    pipeline: Pipeline,
    bandwidth: float,
    methods: str | None,
    images: int,
    measured: AcceptanceStatistics | None,
    seconds: float = PASS_SECONDS,
) -> dict[str, Any]:
    """Print and return all three parts for one pipeline; bandwidth: bytes per second."""
    manifest = pipeline.bundle.manifest
    size = weight_bytes(pipeline.bundle, "target") // (2 if manifest.target.dtype == "float16" else 1)
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
    request = subjects(pipeline).request(0, 1)
    plain = early_pass(manifest, pipeline.decoders()[0], ROWS)
    costs = with_overhead(costs, plain, lambda method: pipeline.stream(**request, method=method), seconds / 4)
    if not costs.steady:
        print("  this host is too busy: costs of passes and steps vary too much")
    print(
        f"  outside the engines {1e3 * costs.step:.2f} ms a step, {1e3 * costs.level:.2f} ms a drafter pass; projected:"
    )
    projected = project(measured, costs)
    columns = {"speed_up": ".2f", "tokens_per_forward_pass": ".2f", "tvd_per_token": ".4f", "method": ""}
    print_table(projected, columns)
    return {"name": manifest.name, "bound_ms": 1e3 * bound, "passes": passes, "methods": rows, "projection": projected}


def print_table(rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    """Print rows under their keys; columns: those to show, and how."""
    lines = [[f"{row[key]:{kind}}" if row[key] is not None else "" for key, kind in columns.items()] for row in rows]
    lines.insert(0, [key.replace("_", " ") for key in columns])
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def subjects(pipeline: Pipeline) -> Subjects:
    """What to draw; random models of prompts bring none."""
    kind = pipeline.bundle.manifest.condition.kind
    return Subjects("prompts", ["a red cube on sand"]) if kind == "tokens" else subjects_of(pipeline.bundle, None)


def pass_rows(graph: str, cost: PassCost, bound: float | None = None) -> list[dict[str, Any]]:
    """Milliseconds against nodes, in units of the smallest pass, and the share of the bound that is reached."""
    return [
        {
            "graph": graph,
            "nodes": nodes,
            "ms": 1e3 * s,
            "relative": s / cost[min(cost)],
            "bound_share": bound and bound / s,
        }
        for nodes, s in cost.items()
    ]


def compare(pipeline: Pipeline, methods: str | None, images: int) -> list[dict[str, Any]]:
    """Methods against plain decoding; outside_engines: a share of decoding, without text and pictures."""
    manifest = pipeline.bundle.manifest
    contenders = parse_contenders(methods or usual_methods(manifest, (), sweep=False), {}, pipeline.bundle)
    found = bench(pipeline, contenders, subjects(pipeline), 1, images, lambda *_: None)
    rows = []
    plain, bound = found[0], memory_bound(pipeline)
    for runs in found:
        stats = [run.statistics for run in runs]
        drafted = [one.drafter_seconds / one.drafter_passes for one in stats if one.drafter_passes]
        times = {
            "target_ms": 1e3 * statistics.median(one.target_seconds / one.target_passes for one in stats),
            "drafter_ms": 1e3 * statistics.median(drafted) if drafted else None,
            "outside_engines": sum(one.host_seconds for one in stats) / sum(one.seconds for one in stats),
        }
        rows.append(figures(runs, plain, bound) | times)
    columns = {"speed_up": ".2f", "tokens_per_forward_pass": ".2f", "target_ms": ".2f", "drafter_ms": ".2f"}
    print_table(rows, columns | {"outside_engines": ".1%", "tvd_per_token": ".4f", "label": ""})
    return rows


def project(measured: AcceptanceStatistics | None, costs: HostCosts) -> list[dict[str, Any]]:
    """Per measured method the best tree or window at these costs, and the papers' static trees beside it."""
    rows = []
    for entry in measured.entries if measured else ():
        if entry.greedy or (entry.method.needs_drafter and costs.drafter is None):
            continue
        plans = [best_plan(entry, costs)]
        for name in PAPER_TREES if entry.method.needs_drafter else ():
            tree = named_tree(name)
            assert isinstance(tree, StaticTree)
            seconds = costs.tree_seconds(tree.nodes, slots_per_level(tree.paths))
            plans.append(Plan(tree.paths, expected_tokens(tree.paths, entry.acceptance_rates), seconds))
        for name, plan in zip(("", *PAPER_TREES), plans, strict=False):
            method = entry.method.model_copy(update={"tree": name} if name else plan.drafting)
            label = str(method) if plan.nodes > 1 else f"ar, not {describe(method)}"
            gain = {"speed_up": plan.rate * costs.plain_seconds, "tokens_per_forward_pass": plan.tokens}
            rows.append({"method": label, **gain, "tvd_per_token": entry.tvd_per_token})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="What decoding costs on this host.")
    parser.add_argument("--shape", choices=SHAPES, default="GPT-B", help="published sizes, random weights")
    parser.add_argument("--bundle", help="a bundle instead")
    parser.add_argument("--threads", type=int, help="engine threads [default: one per core]")
    parser.add_argument("--methods", help="as in `lantern-rt bench` [default: all that the bundle can run]")
    parser.add_argument("--images", type=int, default=3, help="of every method, at least 3")
    parser.add_argument("--project", default="scenes", help="bundle whose acceptance statistics are projected")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, few repeats")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        name = "tiny" if arguments.smoke else arguments.shape
        bundle = arguments.bundle or random_bundle(replace(SHAPES[name], vq_width=32), Path(folder) / name)
        host = host_report()
        print(f"lantern-rt {__version__}, {processor()}")
        print("\n".join(f"  {name:12} {value}" for name, value in host.facts.items()))
        pipeline = Pipeline.from_bundle(bundle, arguments.threads)
        threads = pipeline.situation(1, None, "").threads
        bandwidth = read_bandwidth(weight_bytes(pipeline.bundle, "target"), threads)
        measured, seconds = bundle_statistics(open_bundle(arguments.project)), 1.0 if arguments.smoke else PASS_SECONDS
        found = measure(pipeline, bandwidth, arguments.methods, arguments.images, measured, seconds)
    if arguments.json:
        report = {"lantern_rt": __version__, "host": asdict(host), "processor": processor(), "threads": threads}
        arguments.json.write_text(json.dumps(report | found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except LanternError as error:
        sys.exit(f"decode.py: {error}")
