"""What tuned trees and windows would give on larger models: a projection, not a measurement.

    python benchmarks/projection.py                                # LlamaGen-B and LlamaGen-XL
    python benchmarks/projection.py --rates work/scenes/rates.json --threads 1

Measured here: what passes over 2 to 64 nodes cost on the shapes of a published model (random weights), and the work
outside the engines. Taken over from another model: how often drafts are accepted, as `lantern-rt tune` counted it on
the `scenes` bundle. A drafter of the larger model may be better or worse at its work, so the speed-ups say what a tree
is worth on this host if it accepts as well, and how far the papers' trees are from the best.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from random_model import LLAMAGEN_B, LLAMAGEN_XL, SMOKE, RandomModel, Shapes, build_random_model

from lantern_rt import LanternError, open_bundle
from lantern_rt.engines.host import usable_cores
from lantern_rt.engines.ort.engine import OrtEngine
from lantern_rt.engines.ort.session import ThreadOptions
from lantern_rt.planning.costs import HostCosts, measure_pass
from lantern_rt.planning.rates_file import RatesEntry, read_rates
from lantern_rt.planning.tree_search import Plan, best_plan, expected_codes, slots_per_level
from lantern_rt.runtime.decode import Method, Model, Prompt, decode
from lantern_rt.runtime.engine import Engine
from lantern_rt.runtime.jacobi import Jacobi
from lantern_rt.runtime.sampling import Sampling
from lantern_rt.runtime.tree import StaticTree
from lantern_rt.runtime.tree_names import named_tree

ROWS = 2  # one image with guidance
PAPER_TREES = ("mc-25", "naive-57")
CODES = 64  # decoded to see what a step costs outside the engines
LEVELS, WINDOW = 4, 8  # of the chain and the window that tell what drafting costs outside the engines


def measure_costs(shapes: Shapes, random: RandomModel, threads: int, seconds: float) -> HostCosts:
    """Passes at half an image, and the work outside them from three short decodes."""
    target = OrtEngine(random.target, random.target_spec, random.code_embeddings, ThreadOptions(threads))
    drafter = OrtEngine(random.drafter, random.drafter_spec, None, ThreadOptions(threads))
    past, sizes = shapes.grid**2 // 2, (shapes.width, shapes.vocabulary)
    methods = (
        Method("ar"),
        Method("eagle", named_tree(f"chain-{LEVELS}")),
        Method("sjd", jacobi=Jacobi(WINDOW, shapes.grid, shapes.vocabulary)),
    )
    step, chain, window = (_host_seconds(shapes, target, drafter, method) for method in methods)
    return HostCosts(
        measure_pass(target, ROWS, past, *sizes, drafts=False, budget=seconds),
        measure_pass(drafter, ROWS, past, *sizes, drafts=True, budget=seconds / 2),
        step,
        level=max(0.0, chain - step) / LEVELS,
        redraft=max(0.0, window - step) / WINDOW,
    )


def _host_seconds(shapes: Shapes, target: Engine, drafter: Engine, method: Method) -> float:
    """Seconds outside the engines, a step."""
    model = Model(target, drafter, shapes.codes, shapes.grid**2 + 1)
    prefix = np.random.default_rng(1).standard_normal((2, 1, shapes.width), np.float32)
    prompt = Prompt(prefix[0], prefix[1], np.ones(1, bool))
    most = min(CODES, shapes.codes)
    for codes in (most // 4, most):  # the first decode pays for memory
        steps = decode(
            replace(model, codes=codes), [prompt], [np.random.default_rng(7)], Sampling(cfg_scale=4.0), method
        )
        *_, last = steps
    assert last.statistics is not None
    return last.statistics.host_seconds / last.statistics.target_passes


def project(entries: Sequence[RatesEntry], costs: HostCosts) -> list[dict[str, Any]]:
    """Per candidate the best plan, and with a drafter the papers' static trees beside it."""
    rows = []
    for entry in entries:
        rates, windows = entry.tree_rates(), entry.window_codes()
        plans = {"tuned": best_plan(rates, windows, costs)}
        for name in PAPER_TREES if entry.rates else ():
            tree = named_tree(name)
            assert isinstance(tree, StaticTree)
            codes = expected_codes(tree.paths, rates)
            plans[name] = Plan(tree.paths, codes, costs.tree_seconds(tree.nodes, slots_per_level(tree.paths)))
        for kind, plan in plans.items():
            rows.append(
                {
                    "candidate": entry.candidate.label,
                    "tvd_per_code": entry.tvd_per_code,
                    "plan": plan.name if kind == "tuned" else kind,
                    "codes_per_pass": plan.codes,
                    "speed_against_ar": plan.rate * costs.plain_seconds,
                }
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=Path, help="rates that `lantern-rt tune --rates` wrote [default: the bundle's]")
    parser.add_argument("--bundle", default="scenes", help="bundle whose rates are taken")
    parser.add_argument("--threads", type=int, help="engine threads (default: one per core)")
    parser.add_argument("--seconds", type=float, default=20, help="for the passes of one target")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    arguments = parser.parse_args()
    threads = arguments.threads or usable_cores()
    bundle = open_bundle(arguments.bundle)
    if arguments.rates is None and "rates" not in bundle.manifest.files:
        sys.exit(f"projection.py: bundle {bundle.manifest.name} brings no rates; give --rates FILE")
    rates = read_rates(arguments.rates or bundle.path("rates"))
    entries = [entry for entry in rates.entries if not entry.greedy]
    report: dict[str, Any] = {"threads": threads, "shapes": {}}
    for shapes in (SMOKE,) if arguments.smoke else (LLAMAGEN_B, LLAMAGEN_XL):
        with tempfile.TemporaryDirectory() as folder:
            costs = measure_costs(shapes, build_random_model(shapes, Path(folder)), threads, arguments.seconds)
        rows = project(entries, costs)
        report["shapes"][shapes.name] = rows
        print(
            f"\nProjection for {shapes.name}, {ROWS} rows, {threads} threads: costs of this host, acceptance of scenes"
        )
        assert costs.drafter is not None
        for label, cost in (("target", costs.target), ("drafter", costs.drafter)):
            curve = "  ".join(f"{n}: {1e3 * s:.1f}" for n, s in zip(cost.nodes, cost.seconds, strict=True))
            print(f"  {label} ms by nodes  {curve}")
        print(f"  outside the engines {1e3 * costs.step:.2f} ms a step, {1e3 * costs.level:.2f} ms a drafter pass")
        print("  x ar  codes/pass  TVD/code  candidate, tree or window")
        for row in rows:
            print(
                f"  {row['speed_against_ar']:4.2f} {row['codes_per_pass']:11.2f} {row['tvd_per_code']:9.4f}"
                f"  {row['candidate']}, {row['plan'] or 'plain decoding'}"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LanternError as error:
        sys.exit(f"projection.py: {error}")
