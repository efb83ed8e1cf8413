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
from collections.abc import Callable, Mapping, Sequence
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


LONG_GAP = 5.0  # microseconds; a longer gap between kernels is probably a wait for the host


def warm_up_profiler() -> None:
    """Use the profiler once, so that it later sees the kernels of CUDA graphs that are captured from now on."""
    if torch.cuda.is_available():
        with profile(activities=[ProfilerActivity.CUDA]):
            torch.zeros(1, device="cuda")


def profile_kernels(run: Callable[[], object], repeats: int, max_lines: int = 0) -> dict[str, Any]:
    """Call a function repeatedly and return mean times per call in milliseconds.

    Returns:
        `wall`: elapsed time; `busy`: time of all kernels; `kernels`: number of kernels; `kinds`: time by kernel kind;
        `short_gaps`, `long_gaps`: time between kernels, in gaps below and above `LONG_GAP`.
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
    events = sorted(read_device_events(profiler), key=lambda event: event["ts"])
    for event in events:
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
        **{name: gap / 1e3 / repeats for name, gap in sum_gaps(events).items()},
    }


def sum_gaps(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the microseconds in which no event runs, in short and in long gaps; `events` are in order of `ts`."""
    gaps = {"short_gaps": 0.0, "long_gaps": 0.0}
    last_end = events[0]["ts"] if events else 0.0
    for event in events:
        gap = max(0.0, event["ts"] - last_end)
        gaps["short_gaps" if gap < LONG_GAP else "long_gaps"] += gap
        last_end = max(last_end, event["ts"] + event["dur"])
    return gaps


def read_device_events(profiler: profile) -> list[dict[str, Any]]:
    """Return the recorded kernels, copies and memory fills of the GPU as events of a Chrome trace."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_bytes())["traceEvents"]
    return [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
