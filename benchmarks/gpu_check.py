"""Does lantern-rt run on this GPU, and how fast? One command, no network.

    python benchmarks/gpu_check.py --shape GPT-B --compute float16    # the gpu tests, then one model: start here
    python benchmarks/gpu_check.py                       # every size, both precisions
    python benchmarks/gpu_check.py --shape GPT-XL --backend onnxruntime --json out.json
    python benchmarks/gpu_check.py --smoke               # tiny sizes on the CPU: does the script itself run?

Runs `pytest -m gpu`, then bundles of LlamaGen's sizes with random weights through ONNX Runtime's CUDA provider, and as
engines of TensorRT and TensorRT-RTX: what `decode.py` prints, the bound being the bandwidth of device memory, the
memory taken, and `lantern-rt bench`. Needs `lantern-rt[gpu,export,dev]` and an NVIDIA driver. What is not installed,
does not fit the GPU's memory, or is not built by a library, is left out, and said so.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from decode import REPEATS, bench, measure_passes
from random_bundle import SHAPES, random_bundle

from lantern_rt import EngineError, LanternError, Pipeline, __version__
from lantern_rt.engines.gpu import find_gpu
from lantern_rt.engines.host import import_onnxruntime
from lantern_rt.engines.ort.session import load_session

BACKENDS = ("onnxruntime", "tensorrt", "tensorrt-rtx")
GPT = [name for name in SHAPES if name.startswith("GPT-")]


def main() -> None:
    """Tests, then one model after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=GPT, action="append", help="default: LlamaGen's")
    parser.add_argument("--compute", choices=("float16", "float32"), action="append", help="default: both")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="default: all that are installed")
    parser.add_argument("--methods", nargs="+", default=(), help="method strings [default: all]")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    gpu = find_gpu()
    if gpu is None and not arguments.smoke:
        raise EngineError("no NVIDIA GPU and driver here", field="GPU", remedy="give --smoke for tiny sizes")
    provider = "cpu" if arguments.smoke else "cuda"
    report: dict[str, Any] = {
        "lantern_rt": __version__,
        "onnxruntime": import_onnxruntime().__version__,
        "device": query("name,memory.total"),
        "driver": gpu.driver if gpu else None,
        "compute_capability": gpu.compute_capability if gpu else None,
    }
    print(", ".join(f"{name} {value}" for name, value in report.items() if value), flush=True)
    if not arguments.smoke:
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"]
        report["tests"] = subprocess.run(command, cwd=Path(__file__).parent.parent, check=False).returncode
    report["bandwidth"] = bandwidth = device_bandwidth(provider, 1 << (22 if arguments.smoke else 28))
    report["models"] = []
    backends = ["onnxruntime"] if arguments.smoke else arguments.backend or BACKENDS
    repeats = 2 if arguments.smoke else REPEATS
    for name in ["tiny"] if arguments.smoke else arguments.shape or GPT:
        for compute in arguments.compute or ("float16", "float32"):
            with tempfile.TemporaryDirectory() as folder:
                shape = replace(SHAPES[name], vq_width=32, dtype=torch.bfloat16)
                bundle = random_bundle(shape, Path(folder) / name, compute)
                for backend in backends:
                    try:
                        place = (
                            {"provider": provider} if backend == "onnxruntime" else {"engines": build(bundle, backend)}
                        )
                        pipeline = Pipeline.from_bundle(bundle, **place)
                        print(f"\n{name} {compute}, {backend}", end="")
                        figures = measure_passes(pipeline, bandwidth, repeats)
                        figures |= {"memory": query("memory.used"), "backend": backend, "compute": compute}
                        print(f"  device memory in use, by anybody: {figures['memory']}")
                        del pipeline  # makes room for the next
                        options = [f"--{option}={value}" for option, value in place.items()]
                        report["models"].append(figures | {"methods": bench(bundle, arguments.methods, 3, *options)})
                    except (LanternError, subprocess.CalledProcessError) as error:
                        print(f"{name} {compute}, {backend}: left out: {error}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def build(bundle: Path, backend: str) -> Path:
    """Build an engine folder of the bundle and return its path."""
    engines, began = bundle.with_name(f"{bundle.name}-{backend}"), time.perf_counter()
    command = [sys.executable, "-m", "lantern_rt", "build-engine", bundle, "--backend", backend, "--max-rows", "2"]
    subprocess.run([*command, "--output", engines], check=True)  # Polygraphy is for one library in a process
    print(f"built engines in {time.perf_counter() - began:.0f} s", flush=True)
    return engines


def device_bandwidth(provider: str, size: int) -> float:
    """Bytes per second of copying `size` bytes of device memory, reads and writes counted; median of 20 runs."""
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n"]) for name in ("data", "copy")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["data"], ["copy"])], "copy", values[:1], values[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    session, zeros = load_session(model.SerializeToString(), 1, provider), np.zeros(size // 4, np.float32)
    data, copy = (import_onnxruntime().OrtValue.ortvalue_from_numpy(zeros, provider, 0) for _ in range(2))
    binding = session.io_binding()
    binding.bind_ortvalue_input("data", data)
    binding.bind_ortvalue_output("copy", copy)
    seconds = []
    for _ in range(22):
        began = time.perf_counter()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        seconds.append(time.perf_counter() - began)
    return 2 * size / statistics.median(seconds[2:])


def query(what: str) -> str | None:
    """What nvidia-smi says of the first GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else None


if __name__ == "__main__":
    try:
        main()
    except LanternError as error:
        sys.exit(f"gpu_check.py: {error}")
