"""Test lantern-rt on this GPU and measure the speed, with one command and without network access.

    python benchmarks/gpu_check.py --shape GPT-B --compute float16    # the GPU tests and one model: start here
    python benchmarks/gpu_check.py                       # every size in float16 and float32
    python benchmarks/gpu_check.py --no-tests --work bundles --shape GPT-XL --backend onnxruntime --json out.json
    python benchmarks/gpu_check.py --bundle bundles/llamagen-b
    python benchmarks/gpu_check.py --smoke               # tiny sizes on the CPU, to test this program

Each step has a time limit (`--limit`). If a step fails, for example because a backend is not installed, it is reported,
and the next step runs. The steps are the tests `pytest -m gpu`, and for each model and backend:

- milliseconds of a forward pass with two rows and half an image in the KV cache, with and without CUDA graphs, beside
  the bound by the bandwidth of device memory;
- GPU time of a decoding step by kernel kind;
- images per second of each method by batch size.

Then follows a PyTorch decoder of the same size: eager, as a CUDA graph, and compiled. Models have LlamaGen's sizes and
random weights, or come from `--bundle`. A folder in `--work` keeps exported models for later runs. The acceptance rate
with random weights is meaningless, so compare the milliseconds per step. The program needs `lantern-rt[gpu,export,dev]`
and an NVIDIA driver.

Without a GPU, the work of the host can be measured on stub libraries, which compute nothing and count calls:

    tests/cuda/build.sh build/null-cuda           # needs onnxruntime-gpu, a C compiler, binutils
    python benchmarks/gpu_check.py --stubs build/null-cuda    # run on one idle core

The target then has GPT-XL's layers and codes and is narrow. Printed are the operations of a decoding step, and the
median microseconds of the host's decoding thread. Codes sampled on the device are zeros, so every draft token is
accepted; logits that the host reads are random numbers.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import gpu_profile
import torch
import torch_decoder
from decode import REPEATS, ROWS, count_target_bytes, measure_pass_seconds
from random_bundle import SHAPES, random_bundle

from lantern_rt import EngineError, LanternError, Pipeline, __version__
from lantern_rt.compare.prompts import read_bundle_prompts
from lantern_rt.engines.gpu import find_gpu
from lantern_rt.engines.host import import_onnxruntime
from lantern_rt.engines.ort import providers

BACKENDS = ("onnxruntime", "tensorrt", "tensorrt-rtx")
GPT = [name for name in SHAPES if name.startswith("GPT-")]
METHODS = ("ar", "sjd:window=7", "sjd:window=15", "sjd:window=31", "rows:window=4", "eagle:tree=chain-3", "lantern++")
PROFILED = ("ar", "sjd:window=15")
STUB_METHODS = ("ar", "sjd:window=15", "rows:window=8", "lantern++", "eagle:tree=dynamic-59-5-10")
STUB_COUNTS = ("total", "graph_launches", "h2d", "d2h", "syncs")
STUB_STEPS = 30
WARM = 12  # steps after which recurring passes have been captured as CUDA graphs


class OutOfTimeError(Exception):
    """A step exceeded its time limit."""


class CheckReport:
    """Results of all steps, and errors of failed steps.

    Args:
        max_step_seconds: time limit of a step.
        json_file: JSON file to write after every step; None writes no file.
    """

    def __init__(self, max_step_seconds: int, json_file: Path | None) -> None:
        self.max_step_seconds = max_step_seconds
        self.json_file = json_file
        self.results: dict[str, Any] = {}
        self.failures: list[str] = []

    @contextmanager
    def run_step(self, name: str) -> Iterator[dict[str, Any]]:
        """Run the context as a step and yield a dictionary for its results; an exception is printed and recorded."""
        print(f"\n== {name}", flush=True)
        results: dict[str, Any] = {}
        self.results[name] = results
        began = time.perf_counter()

        def raise_timeout(*_: object) -> None:
            raise OutOfTimeError(f"not done after {self.max_step_seconds} s")

        signal.signal(signal.SIGALRM, raise_timeout)
        signal.alarm(self.max_step_seconds)
        try:
            yield results
        except Exception as error:
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
            print(f"left out: {self.failures[-1]}", flush=True)
        finally:
            signal.alarm(0)
        print(f"   {time.perf_counter() - began:.1f} s", flush=True)
        if self.json_file:
            content = {"results": self.results, "failures": self.failures}
            self.json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=GPT, action="append", help="[default: LlamaGen's]")
    parser.add_argument("--compute", choices=("float16", "float32"), action="append", help="[default: both]")
    parser.add_argument("--bundle", type=Path, action="append", help="bundle to measure instead of random weights")
    parser.add_argument("--work", type=Path, help="folder that keeps the exported bundles")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="[default: all that are installed]")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="method strings")
    parser.add_argument("--batch", type=int, nargs="+", default=(1, 4, 16), help="images in a batch")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--modes", nargs="*", choices=torch_decoder.MODES, default=torch_decoder.MODES)
    parser.add_argument("--limit", type=int, default=600, help="time limit of a step in seconds")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--stubs", type=Path, metavar="FOLDER", help="output folder of tests/cuda/build.sh")
    arguments = parser.parse_args()
    if arguments.stubs:
        measure_on_stubs(arguments.stubs)
        return
    smoke = arguments.smoke
    if find_gpu() is None and not smoke:
        raise EngineError("no NVIDIA GPU and driver here", field="GPU", remedy="give --smoke for tiny sizes")
    provider = "cpu" if smoke else "cuda"
    report = CheckReport(arguments.limit, arguments.json)
    with report.run_step("device") as results:
        results |= describe_device()
        results["bandwidth"] = bandwidth = measure_device_bandwidth(1 << (22 if smoke else 31))
        print(", ".join(f"{name} {value}" for name, value in results.items() if value))
    gpu_profile.warm_up_profiler()
    if not arguments.no_tests:
        with report.run_step("tests") as results:
            results["exit"] = run_gpu_tests(smoke)
    shapes = ["tiny"] if smoke else arguments.shape or GPT
    computes = ["float32"] if smoke else arguments.compute or ["float16", "float32"]
    with tempfile.TemporaryDirectory() as folder:
        work = arguments.work or Path(folder)
        models = {bundle.name: partial(Path, bundle) for bundle in arguments.bundle or ()}
        for name, compute in () if models else product(shapes, computes):
            models[f"{name}-{compute}"] = partial(load_or_export_bundle, work, name, compute)
        for model, make_bundle in models.items():
            for backend in ["onnxruntime"] if smoke else arguments.backend or BACKENDS:
                check_model(report, model, make_bundle, backend, provider, bandwidth, arguments)
    for name in [] if arguments.bundle else shapes:
        for mode in arguments.modes:
            with report.run_step(f"PyTorch, {name}, {mode}") as results:
                device = "cpu" if smoke else "cuda"
                results |= torch_decoder.measure_decoder(SHAPES[name], mode, device, 1 if smoke else 3)
                print(", ".join(f"{label}: {value:.3f}" for label, value in results.items()))
    print("\n" + "\n".join(f"FAILED {failure[:300]}" for failure in report.failures))
    print(f"{len(report.failures)} steps failed")
    sys.exit(smoke and bool(report.failures))


def check_model(
    report: CheckReport,
    model: str,
    make_bundle: Callable[[], Path],
    backend: str,
    provider: str,
    bandwidth: float,
    arguments: argparse.Namespace,
) -> None:
    """Run all steps of one model on one backend. bandwidth: of device memory in bytes per second."""
    smoke = arguments.smoke
    title = f"{model}, {backend}"
    repeats = 2 if smoke else REPEATS
    pipelines: dict[str, Pipeline] = {}
    with report.run_step(f"{title}, loading"):
        bundle = make_bundle()
        is_onnxruntime = backend == "onnxruntime"
        placement = {"provider": provider} if is_onnxruntime else {"engines": build_engines(bundle, backend)}
        pipelines["with CUDA graphs"] = Pipeline.from_bundle(bundle, **placement, verify=False)
        if is_onnxruntime and not smoke:
            with disable_cuda_graphs(provider):
                pipelines["without CUDA graphs"] = Pipeline.from_bundle(bundle, **placement, verify=False)
    for label, pipeline in pipelines.items():
        bound = 1e3 * count_target_bytes(pipeline.bundle) / bandwidth
        with report.run_step(f"{title}, passes {label}") as results:
            print(f"target weights, read once: {bound:.3f} ms")
            for graph in ("target", "drafter") if pipeline.bundle.manifest.drafter else ("target",):
                results[graph] = {n: 1e3 * s for n, s in measure_pass_seconds(pipeline, graph, ROWS, repeats).items()}
                print(f"ms of {graph} by nodes: " + ", ".join(f"{n}: {ms:.3f}" for n, ms in results[graph].items()))
    pipeline = pipelines.get("with CUDA graphs")
    if pipeline is None:
        return
    with report.run_step(f"{title}, kernels") as results:
        for method in PROFILED:
            print(f"a step of {method}")
            results[method] = profile_steps(pipeline, method, repeats)
    for images in arguments.batch:
        with report.run_step(f"{title}, batches of {images}") as results:
            print(f"{'method':28} images/s  ms/image  passes  tokens/pass  ms/step")
            for method in arguments.methods:
                results[method] = row = measure_image_batches(pipeline, method, images, 1 if smoke else 3)
                print(f"{method:28}" + "{:9.3g} {:9.1f} {:7d} {:12.2f} {:8.3f}".format(*row.values()), flush=True)


def stream_steps(pipeline: Pipeline, num_images: int, method: str, **sampling: Any) -> Iterator[Any]:
    """Yield the decoding steps of one batch of images after another without end, after warm-up steps."""
    request = read_bundle_prompts(pipeline.bundle, count=1).request(0, num_images)
    batches = (pipeline.stream(**request, **sampling, method=method) for _ in iter(int, 1))  # endless: int() is never 1
    return islice((step for batch in batches for step in batch), WARM, None)


def profile_steps(pipeline: Pipeline, method: str, num_steps: int) -> dict[str, Any]:
    """Return the mean milliseconds of a decoding step: elapsed, and GPU time by kernel kind."""
    steps = stream_steps(pipeline, 1, method)
    next(steps)
    profile = gpu_profile.profile_kernels(lambda: next(steps), num_steps, max_lines=14)
    kinds = ", ".join(f"{kind} {ms:.3f}" for kind, ms in profile["kinds"].items())
    print(f"wall {profile['wall']:.3f} ms, busy {profile['busy']:.3f} in {profile['kernels']:.0f} kernels: {kinds};")
    print(f"gaps between kernels: {profile['short_gaps']:.3f} ms below 5 us, {profile['long_gaps']:.3f} ms above")
    return profile


def measure_on_stubs(libraries: Path) -> None:
    """Print the operations and the host's time of a decoding step, by method and number of images."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cuda"))
    import null_cuda

    from lantern_rt.engines.ort import backend

    null_cuda.load(libraries)  # before a session loads CUDA
    backend.check_provider = lambda provider: None  # cuDNN has no stub and is not needed, as no image is decoded
    shape = replace(SHAPES["GPT-XL"], num_heads=2, hidden_size=128, intermediate_size=192, vq_width=32)
    null_cuda.fill_copies_with_noise(4 * shape.codes)
    print(f"{'a step of':28} images" + "".join(f"{name:>15}" for name in (*STUB_COUNTS, "microseconds")))
    with tempfile.TemporaryDirectory() as folder:
        bundle = random_bundle(shape, Path(folder) / "bundle", "float16")
        pipeline = Pipeline.from_bundle(bundle, provider="cuda", verify=False)
        for method, images in product(STUB_METHODS, (1, 8)):
            steps = stream_steps(pipeline, images, method, cfg_scale=7.5, top_k=1000)
            next(steps)
            seconds = []
            with null_cuda.count_cuda_operations() as ops:
                for _ in range(STUB_STEPS):
                    start = time.thread_time()
                    next(steps)
                    seconds.append(time.thread_time() - start)
            row = [*(getattr(ops, name) / STUB_STEPS for name in STUB_COUNTS), 1e6 * statistics.median(seconds)]
            print(f"{method:28} {images:6}" + "".join(f"{value:15.1f}" for value in row), flush=True)


def measure_image_batches(pipeline: Pipeline, method: str, batch_size: int, num_batches: int) -> dict[str, Any]:
    """Generate batches of images after a warm-up batch; return the median speed, and counts of the last batch."""
    prompts = read_bundle_prompts(pipeline.bundle, count=1)
    stats = [pipeline(**prompts.request(i, batch_size), method=method).stats for i in range(num_batches + 1)]
    seconds = statistics.median(batch_stats.seconds for batch_stats in stats[1:])
    last = stats[-1]
    return {
        "images/s": batch_size / seconds,
        "ms/image": 1e3 * seconds / batch_size,
        "passes": last.target_passes,
        "tokens/pass": last.tokens_per_forward_pass,
        "ms/step": 1e3 * last.seconds / last.target_passes,
    }


@contextmanager
def disable_cuda_graphs(provider: str) -> Iterator[None]:
    """Disable CUDA graphs for pipelines that are loaded within this context."""
    original = providers.PROVIDERS[provider]
    providers.PROVIDERS[provider] = original._replace(graph_capture_options={}, max_captured_graphs=0)
    try:
        yield
    finally:
        providers.PROVIDERS[provider] = original


def load_or_export_bundle(work_folder: Path, shape_name: str, compute: str) -> Path:
    """Return the folder of a bundle with random weights; export the bundle if the folder does not exist."""
    bundle = work_folder / f"{shape_name}-{compute}"
    if not bundle.exists():
        work_folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=work_folder) as folder:
            shape = replace(SHAPES[shape_name], vq_width=32, dtype=torch.bfloat16)
            random_bundle(shape, Path(folder) / shape_name, compute).rename(bundle)
    return bundle


def build_engines(bundle: Path, backend: str) -> Path:
    """Build the TensorRT engines of a bundle and return the engine folder."""
    engines = bundle.with_name(f"{bundle.name}-{backend}")
    began = time.perf_counter()
    command = [sys.executable, "-m", "lantern_rt", "build-engine", bundle, "--backend", backend, "--max-rows", "2"]
    subprocess.run(
        [*command, "--output", engines], check=True
    )  # a new process, as Polygraphy supports one TensorRT library per process
    print(f"built engines in {time.perf_counter() - began:.0f} s", flush=True)
    return engines


def run_gpu_tests(smoke: bool) -> int:
    """Run the tests that need a GPU and return the exit code; a smoke run only collects the tests."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-rfEs"]
    command += ["--collect-only"] if smoke else []
    done = subprocess.run(command, cwd=Path(__file__).parents[1], check=False)
    if done.returncode:
        raise AssertionError(f"pytest -m gpu exits with {done.returncode}")
    return done.returncode


def describe_device() -> dict[str, Any]:
    gpu = find_gpu()
    return {
        "lantern_rt": __version__,
        "onnxruntime": import_onnxruntime().__version__,
        "torch": torch.__version__,
        "device": gpu.name if gpu else None,
        "driver": gpu.cuda_version if gpu else None,
        "compute capability": gpu.compute_capability if gpu else None,
    }


def measure_device_bandwidth(num_bytes: int) -> float:
    """Return the bandwidth of device memory in bytes per second: the median of ten copies of `num_bytes` bytes.

    A copy reads and writes all bytes, so that its bandwidth is twice `num_bytes` divided by the time. Without a GPU,
    the result is an arbitrary 20 GB/s.
    """
    if not torch.cuda.is_available():
        return 20e9
    data = torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_()  # zeros would be faster than weights
    copy = torch.empty_like(data)
    milliseconds = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        copy.copy_(data)
        end.record()
        end.synchronize()
        milliseconds.append(start.elapsed_time(end))
    del data, copy
    torch.cuda.empty_cache()
    return 2 * num_bytes / statistics.median(milliseconds[2:]) * 1e3


if __name__ == "__main__":
    try:
        main()
    except LanternError as error:
        sys.exit(f"gpu_check.py: {error}")
