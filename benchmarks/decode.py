"""Measure the time of forward passes on this host, and the bound by memory bandwidth.

    python benchmarks/decode.py                            # LlamaGen-B's sizes, random weights; a minute
    python benchmarks/decode.py --shape GPT-XL --threads 1
    python benchmarks/decode.py --precision int8           # weights in int8
    python benchmarks/decode.py --bundle bundles/llamagen-b
    python benchmarks/decode.py --smoke                    # tiny sizes, to test this program

The program prints milliseconds of a forward pass by its number of nodes. The KV cache holds half an image, and the
batch has two rows (one image with guidance). The bound is the time to read the target's weights once. On CPUs, ONNX
Runtime's profiler divides the time into weight products, attention and other operations; profiling takes time itself.
`lantern-rt bench` measures whole methods. The program needs `lantern-rt[export]`. There is no pass or fail.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from random_bundle import SHAPES, random_bundle

from lantern_rt import LanternError, Pipeline, __version__
from lantern_rt.bundle.files import Bundle
from lantern_rt.cli.console import print_table
from lantern_rt.engines.doctor import make_host_report
from lantern_rt.engines.host import describe_processor
from lantern_rt.memory import count_weight_bytes
from lantern_rt.runtime.engine import Cache, DeviceArray, Engine, HiddenStateView, PassInput
from lantern_rt.runtime.passes import build_committed_mask

ROWS = 2  # one image with guidance
NODES = (2, 4, 8, 16, 32, 64)
REPEATS = 20  # measurements of a forward pass with each number of nodes
PASS_COLUMNS = {
    "graph": "{graph}",
    "nodes": "{nodes:d}",
    "ms": "{ms:.2f}",
    "relative": "{relative:.2f}",
    "bound": "{bound_share:.0%}",
}
PART_COLUMNS = {
    "nodes": "{nodes:d}",
    "products, ms": "{products:.2f}",
    "attention, ms": "{attention:.2f}",
    "other, ms": "{other:.2f}",
    "operations": "{operations:d}",
}


def measure_passes(pipeline: Pipeline, bandwidth: float, repeats: int = REPEATS) -> dict[str, Any]:
    """Measure the forward passes of target and drafter; print the results as a table and return them for JSON."""
    manifest = pipeline.bundle.manifest
    num_bytes = count_target_bytes(pipeline.bundle)
    bound = num_bytes / bandwidth
    print(f"\n{manifest.name}, {manifest.codes_per_image} tokens: target weights {num_bytes / 1e6:.0f} MB", end="")
    print(f", read once in {1e3 * bound:.2f} ms at {bandwidth / 1e9:.1f} GB/s", flush=True)
    passes = []
    for graph in ("target", "drafter") if manifest.drafter else ("target",):
        seconds = measure_pass_seconds(pipeline, graph, ROWS, repeats)
        for nodes, cost in seconds.items():
            row = {"graph": graph, "nodes": nodes, "ms": 1e3 * cost, "relative": cost / seconds[NODES[0]]}
            passes.append(row | {"bound_share": bound / cost if graph == "target" else None})
    print_table(PASS_COLUMNS, passes)
    return {"name": manifest.name, "bound_ms": 1e3 * bound, "passes": passes}


def count_target_bytes(bundle: Bundle) -> int:
    """Return the bytes of the target's files; a forward pass reads all weights once."""
    return sum(file.bytes for name, file in bundle.manifest.files.items() if name.startswith("target"))


def measure_pass_seconds(pipeline: Pipeline, graph: str, rows: int, repeats: int) -> dict[int, float]:
    """Return the median seconds of a forward pass by number of nodes, with half an image in the KV cache."""
    manifest = pipeline.bundle.manifest
    engine: Engine = getattr(pipeline.engines, graph)
    past = manifest.condition.prefix + manifest.codes_per_image // 2
    cache = engine.make_cache(rows, past + NODES[-1])
    rng = np.random.default_rng(0)
    hidden: DeviceArray | None = None

    def make_chain_input(nodes: int, engine: Engine = engine, cache: Cache = cache) -> PassInput:
        tokens = rng.integers(manifest.target.vocab_size, size=(rows, nodes))
        padding = np.zeros((rows, 0), bool)
        attention_mask, past_length = build_committed_mask(engine, cache, cache.lengths, nodes, padding)
        attention_mask[:, :, past_length:] = np.tri(nodes, dtype=bool)
        positions = np.minimum(cache.lengths[:, None] + np.arange(nodes), manifest.target.max_positions - 1)
        batch = PassInput(positions, attention_mask, tokens)
        if hidden is None:
            return batch
        row, node = np.indices((rows, nodes))
        return batch._replace(hidden=HiddenStateView(hidden, row, node))  # the states stay on their device

    if graph == "drafter":
        target = pipeline.engines.target
        target_cache = target.make_cache(rows, NODES[-1])
        hidden = target.run(make_chain_input(NODES[-1], target, target_cache), target_cache).hidden
    while (length := int(cache.lengths[0])) < past:  # fill the cache with keys and values that the graph computes
        nodes = min(NODES[-1], past - length)
        cache.append(engine.run(make_chain_input(nodes), cache).new_kv, [np.arange(nodes)] * rows)
    batches = {nodes: make_chain_input(nodes) for nodes in NODES}
    seconds: dict[int, list[float]] = {nodes: [] for nodes in NODES}
    for _ in range(repeats):
        for nodes, batch in batches.items():
            engine.run(batch, cache)  # not timed: processor caches hold data of the previous number of nodes
            began = time.perf_counter()
            cache.append(engine.run(batch, cache).new_kv, [np.arange(2)] * rows)
            seconds[nodes].append(time.perf_counter() - began)
            cache.truncate(np.full(rows, past))
    return {nodes: statistics.median(values) for nodes, values in seconds.items()}


def profile_target_pass(pipeline: Pipeline, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """Measure the parts of forward passes of the target with ONNX Runtime's profiler, at half an image in the KV cache.

    Returns:
        A dictionary for each number of nodes: milliseconds of weight products, attention and other operations, and the
        number of operations. They are also printed as a table.
    """
    manifest = pipeline.bundle.manifest
    past = manifest.condition.prefix + manifest.codes_per_image // 2
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = pipeline.engines.threads
    options.enable_profiling = True
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = f"{folder}/pass"
        for nodes in NODES[:3]:
            session = onnxruntime.InferenceSession(
                pipeline.bundle.path("target"), options, providers=["CPUExecutionProvider"]
            )
            sizes = {"rows": ROWS, "nodes": nodes, "past": past, "past + nodes": past + nodes}
            feeds = {}
            for tensor in session.get_inputs():
                shape = [sizes.get(axis, axis) for axis in tensor.shape]
                feeds[tensor.name] = np.zeros(shape, np.int64 if "int64" in tensor.type else np.float32)
            for _ in range(repeats):
                session.run(None, feeds)
            events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
            kernels = [event for event in events if event["name"].endswith("_kernel_time")]
            kernels = kernels[len(kernels) // repeats :]  # the first pass warms up
            passes = repeats - 1
            spent = dict.fromkeys(("products", "attention", "other"), 0.0)
            for kernel in kernels:
                spent[classify_operation(kernel["args"])] += kernel["dur"] / 1e3 / passes
            rows.append({"nodes": nodes, "operations": len(kernels) // passes} | spent)
    print_table(PART_COLUMNS, rows)
    return rows


def classify_operation(operation: dict[str, Any]) -> str:
    """Return the kind of an operation in an ONNX Runtime profile: `products` (with weights), `attention` or `other`."""
    if "MatMul" not in operation["op_name"]:
        return "other"
    shapes = [shape for types in operation["input_type_shape"] for shape in types.values()]
    # The second operand has four axes in attention (rows, heads, positions, width) and two axes in weight products.
    return "attention" if len(shapes) > 1 and len(shapes[1]) == 4 else "products"


def measure_read_bandwidth(num_bytes: int, threads: int) -> float:
    """Return the memory bandwidth in bytes per second, the best of five measurements.

    Each thread computes the maximum of one section of an array, which takes little time besides reading the section.
    An array that fits into a processor cache is read from this cache, as weights of the same size would be.
    """
    numbers = np.ones(max(num_bytes, 2**20) // 4, np.float32)
    sections = np.array_split(numbers, threads)
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(6):  # the first measurement warms up
            began = time.perf_counter()
            list(pool.map(np.max, sections))
            seconds.append(time.perf_counter() - began)
    return numbers.nbytes / min(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the time of forward passes on this host.")
    parser.add_argument("--shape", choices=SHAPES, default="GPT-B", help="published sizes, random weights")
    parser.add_argument("--precision", help="precision of the random weights, such as int8 [default: fp32]")
    parser.add_argument("--bundle", help="bundle to measure instead of random weights")
    parser.add_argument("--threads", type=int, help="engine threads [default: one per core]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, few repeats")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        name = "tiny" if arguments.smoke else arguments.shape
        bundle = arguments.bundle
        if bundle is None:
            shape = replace(SHAPES[name], vq_width=32)
            bundle = random_bundle(shape, Path(folder) / name, precision=arguments.precision)
        host = make_host_report()
        print(f"lantern-rt {__version__}, {describe_processor()}")
        print("\n".join(f"  {name:12} {value}" for name, value in host.facts.items()))
        pipeline = Pipeline.from_bundle(bundle, arguments.threads)
        threads = pipeline.engines.threads
        bandwidth = measure_read_bandwidth(count_weight_bytes(pipeline.bundle, "target"), threads)
        repeats = 2 if arguments.smoke else REPEATS
        figures = measure_passes(pipeline, bandwidth, repeats)
        if pipeline.engines.backend.startswith("onnxruntime-cpu"):
            figures["parts"] = profile_target_pass(pipeline, repeats)
    if arguments.json:
        report = {
            "lantern_rt": __version__,
            "host": asdict(host),
            "processor": describe_processor(),
            "threads": threads,
        }
        arguments.json.write_text(json.dumps(report | figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except LanternError as error:
        sys.exit(f"decode.py: {error}")
