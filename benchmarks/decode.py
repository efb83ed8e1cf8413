"""What decoding costs on this host: passes, drafting, the host's own share, and the memory bound.

    python benchmarks/decode.py                # everything; minutes
    python benchmarks/decode.py --smoke        # tiny shapes and few repeats: does it still run?
    python benchmarks/decode.py --json out.json

Three parts. *Passes*: milliseconds of one target pass against the number of nodes, on the shapes of LlamaGen-B
with random weights, beside the time it takes to read the weights once. *Decoding*: the same target with a
one-layer drafter through the real decode loop, and how much of the time is spent outside the engines. *Bundle*:
seconds per image, for every method, on a real bundle.

The first two need `lantern-rt[export]` to build their graphs; without it they are left out. Times are printed,
never judged: medians, with nothing else running if you can.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from random_model import LLAMAGEN_B, SMOKE, RandomModel, Shapes, build_random_model

from lantern_rt import LanternError, Pipeline, __version__, open_bundle
from lantern_rt.bundle.files import embedded_names
from lantern_rt.bundle.manifest import DrafterSpec, Manifest
from lantern_rt.engines.bandwidth import read_bandwidth
from lantern_rt.engines.host import host_report, usable_cores
from lantern_rt.engines.ort.engine import OrtEngine
from lantern_rt.engines.ort.session import ThreadOptions
from lantern_rt.runtime.acceptance import Relaxation
from lantern_rt.runtime.decode import Method, Model, Prompt, decode
from lantern_rt.runtime.engine import Cache, Pass, PassOutput
from lantern_rt.runtime.sampling import Sampling
from lantern_rt.runtime.statistics import Statistics
from lantern_rt.runtime.tree_names import named_tree

GUIDED_ROWS = 2  # one image with guidance
METHODS = ("ar", "sjd", "eagle", "lantern", "lantern++")
PROMPTS = (
    "a large red sphere left of a small blue cube on grass at sunset",
    "a green cone on snow",
    "a shiny yellow torus on water at night",
    "a small white pyramid on sand",
)


# ---------------------------------------------------------------- engines


class Watched:
    """An engine that keeps its caches, which count the seconds inside the graph itself."""

    def __init__(self, engine: OrtEngine) -> None:
        self.engine = engine
        self.caches: list[Any] = []

    def new_cache(self, rows: int, capacity: int) -> Cache:
        self.caches.append(self.engine.new_cache(rows, capacity))
        return self.caches[-1]

    def next_past_length(self, cache: Cache, nodes: int) -> int:
        return self.engine.next_past_length(cache, nodes)

    def run(self, batch: Pass, cache: Cache) -> PassOutput:
        return self.engine.run(batch, cache)

    def graph_seconds(self) -> float:
        return sum(cache.seconds for cache in self.caches)


# ---------------------------------------------------------------- parts


def measure_passes(shapes: Shapes, random: RandomModel, threads: int, bandwidth: float) -> dict[str, Any]:
    """Milliseconds of a target pass against nodes and past, and of the drafter's."""
    target = OrtEngine(random.target, random.target_spec, random.code_embeddings, ThreadOptions(threads))
    bound = 1e3 * random.target_bytes / bandwidth
    drafter_bound = 1e3 * random.drafter_bytes / bandwidth
    print(f"\nPasses, {shapes.name}, {GUIDED_ROWS} rows, {threads} thread{'s' * (threads > 1)}")
    speed = f"{bandwidth / 1e9:.1f} GB/s"
    print(f"  target weights {random.target_bytes / 1e6:.0f} MB, read once in {bound:.2f} ms at {speed}")
    rows = []
    for past in shapes.pasts:
        one = None
        print(f"  past {past}:  nodes       ms   x one node   share of the bound reached")
        for nodes in shapes.nodes:
            ms = _pass_ms(target, past, nodes, shapes.repeats)
            one = one or ms
            share = bound / ms
            print(f"             {nodes:7d} {ms:8.2f} {ms / one:12.2f} {share:12.0%}")
            rows.append({"past": past, "nodes": nodes, "ms": ms, "relative": ms / one, "bound_share": share})
    drafts = []
    print(f"  drafter weights {random.drafter_bytes / 1e6:.0f} MB, read once in {drafter_bound:.2f} ms")
    for kind, path in _drafters(random, shapes.vocabulary).items():
        drafter = OrtEngine(path, random.drafter_spec, None, ThreadOptions(threads))
        for nodes in (2, 10):
            ms = _pass_ms(drafter, shapes.pasts[-1], nodes, shapes.repeats)
            relative = ms / rows[-len(shapes.nodes)]["ms"]
            print(f"             {nodes:7d} {ms:8.2f} {relative:12.2f}   {kind}")
            drafts.append({"past": shapes.pasts[-1], "nodes": nodes, "kind": kind, "ms": ms, "relative": relative})
    return {
        "threads": threads,
        "target_bytes": random.target_bytes,
        "drafter_bytes": random.drafter_bytes,
        "bound_ms": bound,
        "target": rows,
        "drafter": drafts,
    }


def _drafters(random: RandomModel, vocabulary: int) -> dict[str, Path]:
    """The drafter's graph, and cheaper ones: 8-bit matrices, and heads as `lantern-rt reduce-drafter` makes them."""
    from lantern_rt.export.graph.draft_head import reduce_head

    kinds = {"drafter": random.drafter, "int8 matrices": random.drafter_int8}
    for share in (4, 16):
        path = random.drafter.with_name(f"head-{share}.onnx")
        reduce_head(random.drafter, path, np.arange(vocabulary // share), vocabulary)
        kinds[f"head for {vocabulary // share} of {vocabulary} codes"] = path
    return kinds


def _pass_ms(engine: OrtEngine, past: int, nodes: int, repeats: int) -> float:
    spec = engine.spec
    rng = np.random.default_rng(0)
    cache = engine.new_cache(GUIDED_ROWS, past)
    entry = (past, GUIDED_ROWS, spec.num_kv_heads, spec.head_dim)
    cache.append(
        [rng.standard_normal(entry, np.float32) for _ in range(2 * spec.num_layers)], [np.arange(past)] * GUIDED_ROWS
    )
    past_length = engine.next_past_length(cache, nodes)
    attention_mask = np.zeros((GUIDED_ROWS, nodes, past_length + nodes), bool)
    attention_mask[:, :, :past] = True
    attention_mask[:, :, past_length:] = np.tri(nodes, dtype=bool)
    rows = (GUIDED_ROWS, nodes)
    hidden = rng.standard_normal((*rows, spec.hidden_size), np.float32) if isinstance(spec, DrafterSpec) else None
    batch = Pass(
        positions=np.broadcast_to(past + np.arange(nodes) % 8, rows),
        attention_mask=attention_mask,
        tokens=rng.integers(spec.vocab_size, size=rows),
        hidden=hidden,
    )
    seconds = [_time(lambda: engine.run(batch, cache)) for _ in range(repeats + 2)]
    return 1e3 * statistics.median(seconds[2:])


def measure_decoding(shapes: Shapes, random: RandomModel, threads: int) -> list[dict[str, Any]]:
    """Whole decodes with the random model; what counts is the share of time outside the engines."""
    target = Watched(OrtEngine(random.target, random.target_spec, random.code_embeddings, ThreadOptions(threads)))
    drafter = Watched(OrtEngine(random.drafter, random.drafter_spec, None, ThreadOptions(threads)))
    model = Model(target, drafter, shapes.codes, random.target_spec.max_positions)
    prefix = np.random.default_rng(1).standard_normal((2, 1, shapes.width), np.float32)
    prompt = Prompt(prefix[0], prefix[1], np.ones(1, bool))
    sampling = Sampling(cfg_scale=4.0)
    # Whose neighbours they are is of no account when weights are random.
    table = (np.arange(shapes.vocabulary)[:, None] + 1 + np.arange(shapes.neighbors)) % shapes.vocabulary
    relaxations = {
        "lantern": Relaxation(table, shapes.neighbors, delta=0.2),
        "lantern++": Relaxation(table, min(10, shapes.neighbors), lambda_=2.0),
    }
    print(f"\nDecoding, {shapes.name}, one image of {shapes.codes} codes, {threads} thread{'s' * (threads > 1)}")
    print("  method     tree            s/image  tokens/pass  target ms  drafter ms  outside engines  outside graphs")
    rows = []
    for name, tree in shapes.trees:
        method = Method(name, named_tree(tree) if tree else None, relaxations.get(name))
        for warm in (True, False):  # the first decode pays for memory
            target.caches, drafter.caches = [], []
            stats = _drain(model, prompt, sampling, method, shapes.codes // 4 if warm else shapes.codes)
        outside = 1 - (target.graph_seconds() + drafter.graph_seconds()) / stats.seconds
        row = _describe(stats) | {"tree": tree, "outside_graphs": outside}
        rows.append(row)
        print(
            f"  {name:10} {tree or '-':14} {stats.seconds:8.2f} {stats.tokens_per_target_pass:12.2f} "
            f"{row['target_ms']:10.2f} {row['drafter_ms']:11.2f} {row['host_share']:16.1%} {outside:15.1%}"
        )
    return rows


def _drain(model: Model, prompt: Prompt, sampling: Sampling, method: Method, codes: int) -> Statistics:
    steps = decode(replace(model, codes=codes), [prompt], [np.random.default_rng(7)], sampling, method)
    for step in steps:
        last = step
    assert last.statistics is not None
    return last.statistics


def measure_bundle(name: str, images: int, threads: int) -> dict[str, Any]:
    """Seconds per image of every method, with the bundle's own defaults, images one after another."""
    start = time.perf_counter()
    pipeline = Pipeline.from_bundle(name, threads=threads)
    load = time.perf_counter() - start
    manifest = pipeline.bundle.manifest
    methods = [m for m in METHODS if m in ("ar", "sjd") or (manifest.drafter and (m == "eagle" or manifest.neighbors))]
    plural = "s" * (threads > 1)
    print(f"\nBundle {manifest.name}, {manifest.codes_per_image} codes, {images} images, {threads} thread{plural}")
    print(f"  opened, checked and loaded in {load:.2f} s")
    print("  method     tree            s/image  x ar  tokens/pass  target ms  drafter ms  outside engines  TVD")
    rows: list[dict[str, Any]] = []
    for method in methods:
        runs, seconds = [], []
        for i in range(images + 1):  # the first warms up
            start = time.perf_counter()
            result = pipeline(**_subject(manifest, i), seed=i, method=method)
            seconds.append(time.perf_counter() - start)
            runs.append(result.stats)
        runs, per_image = runs[1:], statistics.mean(seconds[1:])
        described = [_describe(stats) for stats in runs]
        row = {key: statistics.mean(one[key] for one in described) for key in described[0] if key != "method"}
        row |= {"method": method, "tree": result.settings.tree or "", "image_seconds": per_image}
        row["speed_against_ar"] = rows[0]["image_seconds"] / per_image if rows else 1.0
        rows.append(row)
        print(
            f"  {method:10} {row['tree'] or '-':14} {per_image:8.2f} {row['speed_against_ar']:5.2f} "
            f"{row['tokens_per_target_pass']:12.2f} {row['target_ms']:10.2f} {row['drafter_ms']:11.2f} "
            f"{row['host_share']:16.1%} {row['realised_tvd']:4.1f}"
        )
    return {"bundle": manifest.name, "digest": pipeline.bundle.digest, "load_seconds": load, "methods": rows}


def _subject(manifest: Manifest, i: int) -> dict[str, Any]:
    """What image i is conditioned on."""
    condition = manifest.condition
    if condition.kind in ("words", "tokens"):
        return {"prompts": PROMPTS[i % len(PROMPTS)]}
    if condition.kind == "class":
        return {"class_ids": i % (condition.classes or 1)}
    rng = np.random.default_rng(i)
    return {"embeddings": rng.standard_normal((condition.prefix // 2 + 1, condition.caption_dim or 1), np.float32)}


def _describe(stats: Statistics) -> dict[str, Any]:
    """Statistics of one decode and what follows from them."""
    return {
        "method": stats.method,
        "seconds": stats.seconds,
        "tokens_per_target_pass": stats.tokens_per_target_pass,
        "target_passes": stats.target_passes,
        "drafter_passes": stats.drafter_passes,
        "target_ms": 1e3 * stats.target_seconds / stats.target_passes,
        "drafter_ms": 1e3 * stats.drafter_seconds / max(1, stats.drafter_passes),
        "host_share": stats.host_seconds / stats.seconds,
        "realised_tvd": stats.realised_tvd,
    }


def _time(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# ---------------------------------------------------------------- all of it


def main() -> int:
    parser = argparse.ArgumentParser(description="What decoding costs on this host.")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, few repeats")
    parser.add_argument("--threads", type=int, help="engine threads (default: one per core)")
    parser.add_argument("--bundle", default="scenes", help="bundle folder or name of the last part")
    parser.add_argument("--images", type=int, help="images per method on the bundle")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    arguments = parser.parse_args()
    shapes = SMOKE if arguments.smoke else LLAMAGEN_B
    threads = arguments.threads or usable_cores()

    host = host_report()
    report: dict[str, Any] = {"lantern_rt": __version__, "host": asdict(host), "processor": _processor()}
    print(f"lantern-rt {__version__}, {_processor()}")
    print("\n".join(f"  {name:12} {value}" for name, value in host.rows()))
    counts = sorted({1, threads})
    bandwidths = {count: read_bandwidth(shapes.bandwidth_bytes, count) for count in counts}
    report["bandwidth"] = {str(count): value for count, value in bandwidths.items()}
    for count, value in bandwidths.items():
        print(f"  memory read  {value / 1e9:.1f} GB/s with {count} thread{'s' * (count > 1)}")

    with tempfile.TemporaryDirectory() as folder:
        try:
            random = build_random_model(shapes, Path(folder))
        except ImportError as error:
            print(f"\nPasses and decoding left out: {error}; install lantern-rt[export]")
        else:
            report["passes"] = [measure_passes(shapes, random, count, bandwidths[count]) for count in counts]
            report["decoding"] = measure_decoding(shapes, random, threads)
    if arguments.bundle in embedded_names() or Path(arguments.bundle).is_dir():
        open_bundle(arguments.bundle)
        report["bundle"] = measure_bundle(arguments.bundle, arguments.images or shapes.images, threads)
    else:
        print(f"\nBundle left out: no bundle {arguments.bundle!r} here")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "processor unknown"
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "processor unknown"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LanternError as error:
        sys.exit(f"decode.py: {error}")
