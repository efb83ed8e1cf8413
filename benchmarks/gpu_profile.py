"""Measure the GPU time of a function by kernel kind, with PyTorch's profiler.

The profiler sees every kernel of the process, including kernels of ONNX Runtime. It sees kernels inside a CUDA graph if
the graph was captured after the first use of the profiler.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = (  # a kernel has the first kind whose pattern matches its name
    ("attention", r"attention|fmha|flash|mha|ZeroFullyMasked"),
    ("matmuls", r"gemm|nvjet|cutlass|cublas|gemv|MatMul|splitK"),
    ("top-k", r"[tT]op[kK]|[rR]adix|[bB]itonic|[sS]ort"),
    ("norms", r"[nN]orm"),
    ("scatter", r"[sS]catter"),
    ("copies", r"[mM]emcpy|[mM]emset|[gG]ather|Slice|Concat|Split|Expand|Pad|Tile|[tT]ranspose"),
    ("reductions", r"[rR]educe|[sS]oftmax"),
)


def warm_up_profiler() -> None:
    """Use the profiler once, so that it later sees the kernels of CUDA graphs that are captured from now on."""
    if torch.cuda.is_available():
        with profile(activities=[ProfilerActivity.CUDA]):
            torch.zeros(1, device="cuda")


def profile_kernels(run: Callable[[], object], repeats: int, max_lines: int = 0) -> dict[str, Any]:
    """Call a function repeatedly and return mean times per call in milliseconds.

    Returns:
        `wall`: elapsed time; `busy`: time of all kernels; `kernels`: number of kernels; `kinds`: time by kernel kind.
    """
    start_time = time.perf_counter()
    for _ in range(repeats):
        run()
    wall_seconds = time.perf_counter() - start_time
    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for _ in range(repeats):
            run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in read_device_events(profiler):
        times[event["name"]].append(event["dur"] / 1e3 / repeats)
    kinds: Counter[str] = Counter()
    for name, values in times.items():
        kinds[next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")] += sum(values)
    longest = sorted(times, key=lambda name: -sum(times[name]))[:max_lines]
    for name in longest:
        short_name = re.sub(r"^void |\(anonymous namespace\)::|onnxruntime::(contrib::)?(cuda::)?", "", name)[:90]
        print(f"    {sum(times[name]):8.4f} ms {len(times[name]) / repeats:6.1f} x  {short_name}")
    return {
        "wall": 1e3 * wall_seconds / repeats,
        "busy": kinds.total(),
        "kernels": sum(map(len, times.values())) / repeats,
        "kinds": dict(kinds.most_common()),
    }


def read_device_events(profiler: profile) -> list[dict[str, Any]]:
    """Return the recorded kernels, copies and memory fills of the GPU as events of a Chrome trace."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_bytes())["traceEvents"]
    return [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
