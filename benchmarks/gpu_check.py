"""Does lantern-rt run on this GPU, and how fast? One command, no network.

    python benchmarks/gpu_check.py --size B --precision float16   # the gpu tests, then one model: the place to start
    python benchmarks/gpu_check.py                       # every size, both precisions
    python benchmarks/gpu_check.py --size XL --backend onnxruntime --json out.json
    python benchmarks/gpu_check.py --end-to-end          # and then train, export and measure: end_to_end.py
    python benchmarks/gpu_check.py --smoke               # tiny shapes in host memory: does the script itself run?

Runs `pytest -m gpu`, then random-weight models of LlamaGen's sizes through ONNX Runtime's CUDA provider, and as plans
through TensorRT and TensorRT-RTX where they are installed, without and with CUDA graphs: milliseconds per pass against
nodes and past, beside the time it takes to read the weights once; decode steps, and the host's own share of them;
memory. Needs `lantern-rt[gpu,export,dev]` and an NVIDIA driver. Times are printed, never judged. What does not fit the
GPU's memory, or a library does not build, is left out, and said so. Without plans it should take under ten minutes;
their builds take minutes more.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from random_model import LLAMAGEN_3B, LLAMAGEN_B, LLAMAGEN_XL, SMOKE, RandomModel, Shapes, build_random_model

from lantern_rt import EngineError, LanternError, __version__
from lantern_rt.bundle.manifest import DecoderSpec, DrafterSpec
from lantern_rt.engines.contracts import PlanOptions
from lantern_rt.engines.kv_cache import SPAN_STEP, round_up
from lantern_rt.engines.ort.device import OrtDeviceEngine
from lantern_rt.engines.ort.graph_bytes import model_bytes, node_bytes
from lantern_rt.engines.ort.session import import_onnxruntime, load_helper
from lantern_rt.engines.profiles import BuildOptions, Profile
from lantern_rt.engines.trt.backend import TensorRTBackend
from lantern_rt.engines.trt.cuda_driver import find_gpu
from lantern_rt.engines.trt.cuda_memory import open_gpu
from lantern_rt.engines.trt.engine import TensorRTEngine
from lantern_rt.engines.trt.library import MODULES, import_library
from lantern_rt.engines.trt.plan_errors import PlanSource
from lantern_rt.runtime.decode import Method, Model, Prompt, decode
from lantern_rt.runtime.engine import Pass
from lantern_rt.runtime.sampling import Sampling
from lantern_rt.runtime.tree_names import named_tree

NODES, PASTS, ROWS, REPEATS = (1, 2, 4, 8, 16, 32, 60, 128), (128, 600, 1100), 2, 20
SIZES = {"B": LLAMAGEN_B, "XL": LLAMAGEN_XL, "3B": LLAMAGEN_3B}
BACKENDS = ("onnxruntime", *MODULES)
STEPS = {"ar": Method("ar"), "eagle dynamic-59": Method("eagle", named_tree("dynamic-59"))}


# Makes an engine of a graph, with a table of code embeddings for a target.
Loader = Callable[[Path, DecoderSpec | DrafterSpec, np.ndarray | None], Any]


class HostEngine(OrtDeviceEngine):
    """For --smoke: the same code in host memory."""

    device = "cpu"


def main() -> None:
    """Tests, then one model after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, action="append", help="default: every size that fits")
    parser.add_argument("--precision", choices=("float16", "float32"), action="append", help="default: both")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="default: all that are installed")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--end-to-end", action="store_true", help="run end_to_end.py last; needs a CUDA build of torch")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    gpu = find_gpu()
    if gpu is None and not arguments.smoke:
        raise EngineError("found no NVIDIA GPU and driver, expected one; --smoke runs tiny shapes without")
    report: dict[str, Any] = {
        "lantern_rt": __version__,
        "onnxruntime": import_onnxruntime().__version__,
        "date": time.strftime("%Y-%m-%d"),
        "device": device_line(),
        "driver": gpu.driver if gpu else None,
        "compute_capability": gpu.compute_capability if gpu else None,
    }
    print(", ".join(f"{name} {value}" for name, value in report.items() if value), flush=True)
    if not arguments.smoke:
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"]
        report["tests"] = subprocess.run(command, cwd=Path(__file__).parent.parent, check=False).returncode
    provider = "cpu" if arguments.smoke else "cuda"
    bandwidth = device_bandwidth(provider, 1 << 22 if arguments.smoke else 1 << 28)
    print(f"reads and writes {bandwidth / 1e9:.0f} GB/s (a copy of device memory)")
    report["bandwidth"] = bandwidth
    report["models"] = []
    backends = ["onnxruntime"] if arguments.smoke else arguments.backend or installed()
    for shapes in [SMOKE] if arguments.smoke else [SIZES[name] for name in arguments.size or SIZES]:
        for precision in arguments.precision or ("float16", "float32"):
            with tempfile.TemporaryDirectory() as folder:
                model = build_random_model(shapes, Path(folder), precision)
                for backend in backends:
                    try:
                        for label, load in loaders(backend, arguments.smoke):
                            found = measure(shapes, model, f"{precision}, {label}", bandwidth, load)
                            report["models"].append({"backend": label, "precision": precision, **found})
                    except LanternError as error:
                        print(f"{shapes.name} {precision}, {backend}: left out: {error}", flush=True)
    if arguments.end_to_end:
        report["end_to_end"] = train_and_measure(arguments.smoke)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def train_and_measure(smoke: bool) -> dict[str, Any] | None:
    """The figures of `end_to_end.py`, or None with a line that says why."""
    from end_to_end import SMOKE, Plan, end_to_end

    try:
        return end_to_end(SMOKE if smoke else Plan())
    except LanternError as error:
        print(f"end to end: left out: {error}", flush=True)
        return None


def installed() -> list[str]:
    """ONNX Runtime, and those of the TensorRT libraries that can be imported."""
    found = ["onnxruntime"]
    for name in MODULES:
        try:
            print(f"{name} {import_library(name).__version__}")
            found.append(name)
        except EngineError as error:
            print(f"{name}: left out: {error}")
    return found


def loaders(backend: str, smoke: bool) -> list[tuple[str, Loader]]:
    """What makes engines of a backend, in each way it can run them; plans are built on the way, once."""
    if backend == "onnxruntime":
        engine, provider = (HostEngine, "cpu") if smoke else (OrtDeviceEngine, "cuda")
        return [(backend, lambda path, spec, table: engine(path, spec, table, provider=provider))]
    shapes, plans = profiles(), {}

    def build(path: Path) -> Path:
        bundle: Any = SimpleNamespace(path=lambda role: path)
        options = BuildOptions(backend, max_rows=ROWS, max_nodes=NODES[-1])
        began = time.perf_counter()
        built = TensorRTBackend(backend).build(
            bundle, path.stem, shapes, options, path.parent, lambda what, done, total: None
        )
        print(f"built {path.stem} in {time.perf_counter() - began:.0f} s", flush=True)
        return built.files[0]

    def load(
        options: PlanOptions, path: Path, spec: DecoderSpec | DrafterSpec, table: np.ndarray | None
    ) -> TensorRTEngine:
        plans[path] = plans.get(path) or build(path)
        plan = PlanSource(plans[path], shapes, "python benchmarks/gpu_check.py")
        return TensorRTEngine(import_library(backend), open_gpu(), plan, spec, table, options)

    plain, graphs = PlanOptions(), PlanOptions(cuda_graphs=True)
    return [(backend, partial(load, plain)), (f"{backend}, CUDA graphs", partial(load, graphs))]


def profiles() -> tuple[Profile, ...]:
    """Plain decoding and trees, as `build-engine` makes them; every pass here fits one of the two."""
    rows, past = (1, ROWS, ROWS), (SPAN_STEP, round_up(PASTS[1]), round_up(PASTS[-1]))
    return (
        Profile(name="ar", rows=rows, nodes=(2, 2, 2), past=past),
        Profile(name="tree", rows=rows, nodes=(2, 64, NODES[-1]), past=past),
    )


def measure(shapes: Shapes, model: RandomModel, label: str, bandwidth: float, load: Loader) -> dict[str, Any]:
    """Print and return one model's table."""
    before = used_memory()
    target = load(model.target, model.target_spec, model.code_embeddings)
    bound = 1e3 * model.target_bytes / bandwidth
    print(f"\n{shapes.name} {label}, {ROWS} rows; weights read once: {bound:.2f} ms")
    print("   past  nodes        ms  share of the bound")
    passes = []
    for past in shapes.pasts if shapes is SMOKE else PASTS:
        for nodes in shapes.nodes if shapes is SMOKE else NODES:
            ms = pass_ms(target, past, nodes)
            print(f"{past:7d} {nodes:6d} {ms:9.3f} {bound / ms:19.0%}", flush=True)
            passes.append({"past": past, "nodes": nodes, "ms": ms, "bound_share": bound / ms})
    drafter = load(model.drafter, model.drafter_spec, None)
    steps = [step_times(shapes, Model(target, drafter, 64, 10_000), name, method) for name, method in steps_of(shapes)]
    memory = used_memory()
    used = None if memory is None or before is None else memory - before
    if used is not None:
        print(f"  device memory {used / 2**20:.0f} MiB")
    return {"size": shapes.name, "passes": passes, "steps": steps, "memory": used}


def steps_of(shapes: Shapes) -> list[tuple[str, Method]]:
    """The decodes to time: all of them, or for tiny shapes a tree that fits."""
    return (
        [("ar", Method("ar")), ("eagle chain-3", Method("eagle", named_tree("chain-3")))]
        if shapes is SMOKE
        else list(STEPS.items())
    )


def pass_ms(engine: Any, past: int, nodes: int) -> float:
    """Median milliseconds of a pass, and of copying one node's logits back: what waits for the device."""
    spec, rng = engine.spec, np.random.default_rng(0)
    cache = engine.new_cache(ROWS, past)
    cache.lengths = np.full(ROWS, past)  # what the columns hold costs nothing
    past_length = engine.next_past_length(cache, nodes)
    attention_mask = np.ones((ROWS, nodes, past_length + nodes), bool)
    batch = Pass(
        positions=np.zeros((ROWS, nodes), np.int64),
        attention_mask=attention_mask,
        tokens=rng.integers(spec.vocabulary, size=(ROWS, nodes)),
    )
    return 1e3 * median_seconds(lambda: engine.run(batch, cache).logits[:, 0])


def step_times(shapes: Shapes, model: Model, name: str, method: Method) -> dict[str, Any]:
    """Milliseconds per decode step, and the host's share, of one guided image, after one that warms up."""
    rng = np.random.default_rng(0)
    width = model.target.spec.width  # type: ignore[attr-defined]
    prefix = rng.standard_normal((2, 1, width), np.float32)
    prompt = Prompt(prefix[0], prefix[1], np.ones(1, bool))
    positions = model.target.spec.positions  # type: ignore[attr-defined]
    sampling = Sampling(cfg_scale=4.0, top_k=min(1000, shapes.vocabulary // 2))
    model = replace(model, positions=positions, codes=shapes.codes)
    for _ in range(2):
        steps = list(decode(model, [prompt], [rng], sampling, method))
    stats = steps[-1].statistics
    assert stats is not None
    count = len(steps) - 1
    found = {"step_ms": 1e3 * stats.seconds / count, "host_ms": 1e3 * stats.host_seconds / count}
    print(f"  {name}: {found['step_ms']:.2f} ms a step, of them {found['host_ms']:.2f} ms on the host", flush=True)
    return {"method": name, **found}


def device_bandwidth(provider: str, size: int) -> float:
    """Bytes per second of copying `size` bytes of device memory, reads and writes counted."""
    runtime = import_onnxruntime()
    device = "cuda" if provider == "cuda" else "cpu"
    content = model_bytes(
        [node_bytes("Neg", ["data"], "copy")], [("data", "float32", ["n"])], [("copy", "float32", ["n"])]
    )
    session = load_helper(content, provider)
    values = [runtime.OrtValue.ortvalue_from_numpy(np.zeros(size // 4, np.float32), device, 0) for _ in range(2)]
    binding = session.io_binding()
    binding.bind_ortvalue_input("data", values[0])
    binding.bind_ortvalue_output("copy", values[1])

    def copy() -> None:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    return 2 * size / median_seconds(copy)


def median_seconds(action: Callable[[], object]) -> float:
    """Median of repeated runs after two that warm up."""
    seconds = []
    for _ in range(REPEATS + 2):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def device_line() -> str | None:
    """Name and memory of the first GPU."""
    return query("name,memory.total")


def used_memory() -> int | None:
    """Bytes of device memory in use, by anybody."""
    text = query("memory.used")
    return None if text is None else int(text.split()[0]) << 20


def query(what: str) -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else None


if __name__ == "__main__":
    try:
        main()
    except LanternError as error:
        sys.exit(f"gpu_check: {error}")
