"""Count the GPU operations of decoding and measure the time of the host, without a GPU.

    tests/cuda/build.sh build/null-cuda           # needs onnxruntime-gpu, a C compiler, binutils
    python benchmarks/device.py build/null-cuda
    python benchmarks/device.py build/null-cuda --only host    # only the host's times; run on one idle core

ONNX Runtime's CUDA provider runs on stand-in libraries, in which kernels do nothing and every call is counted. The
target has the 36 layers and 16,384 codes of LlamaGen-XL in float16. It is narrow, since the number of operations does
not depend on the width. Logits that the host reads are random numbers. Codes that are sampled on the device are zeros,
so that every draft token is accepted. The program prints:

- operations (kernels, matrix products, copies) of a target pass and of appending accepted nodes to the KV cache, before
  and after the pass is captured as a CUDA graph;
- operations of a decoding step of each method;
- median microseconds of the host's processor for a step, divided into calls of ONNX Runtime, inputs of a pass, sampling
  and the decode loop. The time of random numbers is printed separately, for 16 tokens of an image, as most of them are
  generated while a real device computes. A row is left out if the host finds NaN in memory that no kernel wrote;
- memory of a target of 625 MB, its drafter and a cache;
- copies of the KV cache in a pass of Emu3, in which several queries share keys.

There is no pass or fail.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cuda"))

import null_cuda

COUNTS = ("total", "graph_launches", "kernels", "gemms", "h2d", "d2h", "d2d", "syncs", "bytes_up", "bytes_down")
COPYING = ("Ungroup", "TransposeQKV")  # kernels that copy all keys or values of a cache
METHODS = ("ar", "sjd:window=7", "lantern++:tree=balanced-25", "eagle:tree=dynamic-59-5-10")
HOST_METHODS = ("ar", "sjd:window=7", "sjd:window=15", "sjd:window=31", "rows:window=8", "lantern++")
ROWS = 2
PAST = 200
CODES = 16384
WARM = 10  # steps after which recurring shapes have been captured as CUDA graphs
MIN_STEPS = 60  # minimum number of steps for a row of host times
REQUEST: dict[str, Any] = {"cfg_scale": 7.5, "top_k": 1000}


def main() -> None:
    """Export the bundles, count the operations, measure the times, and print all results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", type=Path, help="output folder of build.sh")
    parser.add_argument("--steps", type=int, default=30, help="number of steps of each method to count")
    parser.add_argument("--only", choices=("counts", "host"))
    arguments = parser.parse_args()
    null_cuda.load(arguments.libraries)  # before any library loads CUDA
    from random_bundle import SHAPES, random_bundle

    from lantern_rt import Pipeline
    from lantern_rt.engines.ort import backend

    backend.check_provider = lambda provider: None  # cuDNN has no stand-in and is not needed, as no image is decoded
    narrow = {"num_heads": 2, "hidden_size": 128, "intermediate_size": 192, "vq_width": 32}
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        pipes = {}
        for name in ("GPT-B", "GPT-XL"):
            bundle = random_bundle(replace(SHAPES[name], **narrow), Path(folder) / name, "float16")
            pipes[name] = pipe = Pipeline.from_bundle(bundle, provider="cuda", verify=False)
        if arguments.only != "counts":
            print_host_times(pipes)
        if arguments.only == "host":
            return
        rows |= count_pass_operations(pipe)
        null_cuda.fill_copies_with_noise(4 * CODES)
        for method in METHODS:
            rows[f"step of {method}"] = count_step_operations(pipe, method, arguments.steps)
        emu3 = replace(SHAPES["tiny-emu3"], hidden_size=512, queries_per_key=4)
        small = random_bundle(emu3, Path(folder) / "narrow-emu3", "float16")
        pipe = Pipeline.from_bundle(small, provider="cuda,vq_decoder=cpu", verify=False)
        rows["Emu3, target pass over 2 nodes"] = count_cache_copies(pipe)
        large = random_bundle(replace(SHAPES["GPT-XL"], num_layers=13, vq_width=32), Path(folder) / "large", "float16")
        rows["MiB of the device's memory"] = measure_memory(large)
    for name, row in rows.items():
        print(f"{name:36}" + "".join(f"  {key} {value:g}" for key, value in row.items()))


def count_pass_operations(pipe: Any) -> dict[str, dict[str, float]]:
    """Count the operations of target passes, and of appending the nodes of a chain or a tree path to the KV cache.

    Returns:
        The counts of `count_operations`, by description.
    """
    from lantern_rt.methods import Sampling
    from lantern_rt.runtime.device import SamplingRequest
    from lantern_rt.runtime.noise import Noise

    cache = pipe.engines.target.make_cache(ROWS, PAST + 64)
    run = partial(run_target_pass, pipe, cache)
    while cache.lengths[0] < PAST:
        cache.append(run(50).new_kv, [np.arange(50)] * ROWS)

    def append_nodes(nodes: list[int]) -> None:
        cache.append(output.new_kv, [np.array(nodes)] * ROWS)
        cache.truncate(np.full(ROWS, PAST))

    def choose_codes(nodes: int) -> None:
        positions = np.arange(1, 1 + nodes) % 8 + 1  # eight tree depths, whose noise is already on the device
        node_indices = np.tile(np.arange(nodes), (ROWS, 1))
        scales = np.full(nodes, 7.5, np.float32)
        sampling = Sampling(cfg_scale=7.5, top_k=1000)
        request = SamplingRequest(slice(0, ROWS), node_indices, sampling, noise, positions, scales)
        run(nodes).logits.sample_top_codes([request], 1)

    noise = Noise(1)
    rows = {"target pass over 2 nodes, op by op": count_operations(lambda: run(2).logits.value, 1)}
    rows |= {
        f"target pass over {n} nodes, again": count_operations(lambda n=n: run(n).logits.value, 6) for n in (2, 59)
    }
    rows["the same, and choices at 59 nodes"] = count_operations(lambda: choose_codes(59), 6)
    output = run(59)
    rows["append 4 nodes of a chain"] = count_operations(lambda: append_nodes([0, 1, 2, 3]))
    output = run(59)
    rows["append 4 nodes of a tree"] = count_operations(lambda: append_nodes([0, 3, 17, 40]))
    return rows


def run_target_pass(pipe: Any, cache: Any, nodes: int) -> Any:
    """Start a target pass in which every node attends to all nodes and to all cached tokens.

    Args:
        pipe: pipeline of the target.
        cache: KV cache of the target.
        nodes: number of nodes.

    Returns:
        The output of the pass, which is computed at its first use.
    """
    from lantern_rt.runtime.engine import PassInput

    tokens = np.zeros((ROWS, nodes), np.int64)
    mask = np.zeros((ROWS, nodes, pipe.engines.target.past_columns(cache, nodes) + nodes), bool)
    mask[:, :, : int(cache.lengths[0])] = mask[:, :, -nodes:] = True
    return pipe.engines.target.run(PassInput(positions=tokens, attention_mask=mask, tokens=tokens), cache)


def count_cache_copies(pipe: Any) -> dict[str, float]:
    """Count the kernels of a forward pass that copy the whole KV cache.

    The KV cache of Emu3-8B has 2.2 GB. It would have 8.9 GB if keys and values were copied for every query head.
    """
    output = run_target_pass(pipe, pipe.engines.target.make_cache(ROWS, PAST), 2)
    with null_cuda.count_cuda_operations() as ops:
        _ = output.logits.value
    kernels = null_cuda.count_kernel_launches(ops)
    return {"copies of the cache": sum(n for name, n in kernels.items() if name.endswith(COPYING))}


def measure_memory(bundle: Path) -> dict[str, float]:
    """Return the device memory in MiB after loading, with a KV cache for one image, and after ten decoding steps."""
    from lantern_rt import Pipeline

    with null_cuda.count_cuda_operations() as opened:
        pipe = Pipeline.from_bundle(bundle, provider="cuda", verify=False)
        references = [pipe.engines.drafter, pipe.engines.target.make_cache(ROWS, 256)]  # keeps both in memory
    with null_cuda.count_cuda_operations() as decoding:
        for _ in islice(pipe.stream(class_ids=1, method=METHODS[-1], cfg_scale=7.5, top_k=1000), WARM):
            del references[:]
    return {"opened": opened.bytes_held / 2**20, "decoding": (opened.bytes_held + decoding.bytes_held) / 2**20}


def count_operations(operation: Callable[[], object], num_warm_ups: int = 0) -> dict[str, float]:
    """Call a function after `num_warm_ups` warm-up calls; return its operations by kind, and its milliseconds."""
    for _ in range(num_warm_ups):
        operation()
    start_time = time.perf_counter()
    with null_cuda.count_cuda_operations() as ops:
        operation()
    return {**{name: getattr(ops, name) for name in COUNTS}, "ms": round(1e3 * (time.perf_counter() - start_time), 2)}


def count_step_operations(pipe: Any, method: str, num_steps: int) -> dict[str, float]:
    """Return the mean operations of a decoding step.

    Args:
        pipe: pipeline to measure.
        method: decoding method.
        num_steps: number of steps to count, after the warm-up steps.
    """
    running = pipe.stream(class_ids=1, **REQUEST, method=method)
    for _ in islice(running, WARM):
        pass
    with null_cuda.count_cuda_operations() as ops:
        count = sum(1 for _ in islice(running, num_steps))
    running.close()
    names = ("total", "graph_launches", "h2d", "d2h", "syncs")
    return {name: round(getattr(ops, name) / count, 1) for name in names}


def print_host_times(pipes: dict[str, Any]) -> None:
    """Print the median time of the host for a decoding step, by part of the step.

    Args:
        pipes: pipelines by size name.
    """
    from host_parts import StepPartTimer

    from lantern_rt import EngineError
    from lantern_rt.runtime.noise import GROUP_SIZE, Noise

    start_time = time.thread_time()
    for seed in range(10):
        Noise(seed).gumbel(0, GROUP_SIZE, CODES)
    print(f"noise of {GROUP_SIZE} tokens: {1e5 * (time.thread_time() - start_time):.0f} us")
    zeros = np.zeros((GROUP_SIZE, CODES), np.float32)
    # From now on noise is zeros, so that it takes no time.
    Noise._get_noise_group = lambda noise, group, size: noise._groups.setdefault(group, zeros)
    parts = ("engine", "inputs", "sampling", "loop")
    print(f"{'microseconds of a step':24} {'size':7} images" + "".join(f"{part:>10}" for part in (*parts, "all")))
    for method, (size, pipe), images in product(HOST_METHODS, pipes.items(), (1, 8)):
        label = f"{method:24} {size:7} {images:6}"
        try:
            with StepPartTimer(time.thread_time) as clock:
                steps = measure_step_times(clock, pipe, method, images)
        except EngineError as error:
            print(f"{label}  left out: {error.problem}", flush=True)
            continue
        row = [statistics.median(step_parts[part] for step_parts in steps) for part in parts]
        row.append(statistics.median(step_parts.total() for step_parts in steps))
        print(label + "".join(f"{1e6 * value:10.0f}" for value in row), flush=True)


def measure_step_times(clock: Any, pipe: Any, method: str, num_images: int) -> list[Counter[str]]:
    """Return the seconds of each decoding step, by part of the step.

    Args:
        clock: running `StepPartTimer`.
        pipe: pipeline to measure.
        method: decoding method.
        num_images: number of images in the batch.
    """
    batches: list[list[Counter[str]]] = []
    while sum(map(len, batches[2:])) < MIN_STEPS:  # the first two batches capture recurring passes as CUDA graphs
        running = pipe.stream(class_ids=[1] * num_images, seed=[*range(num_images)], **REQUEST, method=method)
        clock.read_and_reset()
        batches.append([clock.read_and_reset() for _ in running][1:])  # without the prefill
    return [step for batch in batches[2:] for step in batch]


if __name__ == "__main__":
    main()
