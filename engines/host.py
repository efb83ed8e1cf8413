"""Processor cores, free memory and installed ONNX Runtime of this host."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import EngineError, OutputError, RequestError
from ..inputs import format_error, format_value, make_install_command
from ..output.files import find_existing_ancestor
from .gpu import find_gpu
from .system import check_thread_count, read_host_memory

_CPU = Path("/sys/devices/system/cpu")
_CPU_INFO = Path("/proc/cpuinfo")
_CGROUP = Path("/sys/fs/cgroup")
_CONTROLLERS = ("cpu", "memory")  # folders in `_CGROUP`, for version 1 of control groups
# Instruction sets by which ONNX Runtime chooses kernels and memory layouts.
_INSTRUCTION_SETS = (
    "avx",
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "asimddp",
    "i8mm",
    "sve",
)
EXPORT_BYTES = 2_200_000_000  # measured peak memory of an export with a small codebook (docs/measurements.md)
RUNTIMES = ("onnxruntime", "onnxruntime-gpu")  # packages of ONNX Runtime, which overwrite each other's files
_import_lock = threading.Lock()


def import_onnxruntime() -> Any:
    """Import onnxruntime with telemetry disabled; raise EngineError if it cannot be imported."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # only the first import reads this variable
    with _import_lock:
        try:
            import onnxruntime  # type: ignore[import-untyped]

            _ = onnxruntime.InferenceSession  # missing if the installation is damaged
            onnxruntime.set_default_logger_severity(4)  # errors arrive as exceptions; do not print them as well
        except (ImportError, AttributeError) as error:
            if isinstance(error.__cause__, KeyboardInterrupt):  # onnxruntime converts Ctrl-C
                raise KeyboardInterrupt from error
            if conflict := find_onnxruntime_conflict():
                raise conflict from error
            needs_gpu = find_gpu() or list_installed_packages("tensorrt", "tensorrt-rtx")  # TensorRT runs on GPUs
            command = make_install_command("gpu" if needs_gpu else "cpu", reinstall=not isinstance(error, ImportError))
            problem = f"onnxruntime cannot be imported ({format_error(error, 200)})"
            raise EngineError(problem, remedy=f"install it with `{command}`") from error
    return onnxruntime


def describe_processor() -> str:
    """Return the architecture and the instruction sets by which ONNX Runtime chooses kernels: `x86_64 avx avx2`."""
    lines = (line.partition(":") for line in _read_text(_CPU_INFO).splitlines())
    flags = next((rest.split() for name, _, rest in lines if name.strip() in ("flags", "Features")), None)
    if flags is None:  # systems other than Linux: NumPy detects some of the instruction sets
        flags = [name.lower() for name, present in _read_numpy_cpu_features().items() if present]
        if sys.platform == "darwin" and platform.machine() == "arm64":
            flags.append("asimddp")  # all arm64 processors of Apple have asimddp
    known = (name for name in _INSTRUCTION_SETS if name in flags or name.replace("_", "") in flags)
    return " ".join([platform.machine(), *known])


def _read_numpy_cpu_features() -> dict[str, bool]:
    """Return which CPU features NumPy detected, by names such as `AVX512VNNI`; empty if NumPy does not expose them."""
    try:
        from numpy._core._multiarray_umath import __cpu_features__ as features  # type: ignore[import-not-found]
    except ImportError:
        return {}
    return dict(features)


def count_usable_cores() -> int:
    """Return the number of physical cores that the CPU affinity and the CPU quota of this process allow."""
    import psutil  # type: ignore[import-untyped]

    cores = _usable_cpus()
    # Hardware threads of one core have the same list of siblings.
    siblings = {_read_text(_CPU / f"cpu{cpu}" / "topology" / "thread_siblings_list") for cpu in cores}
    count = len(siblings)
    if "" in siblings:  # the system is not Linux, or a container hides the topology
        count = len(cores)
        with suppress(OSError):  # no /proc
            count = min(count, psutil.cpu_count(logical=False) or count)
    return max(1, min(count, int(read_cpu_quota() or count)))


def choose_thread_count(threads: int | None) -> int:
    """Return `threads`, or the number of usable cores. Raises EngineError unless 1 .. 1024 threads can start."""
    if threads is not None and (type(threads) is not int or not 1 <= threads <= 1024):
        raise EngineError(field="threads", found=format_value(threads), expected="1 .. 1024")
    count = threads or count_usable_cores()
    check_thread_count(count)
    return count


def read_cpu_quota() -> float | None:
    """Return the smallest CPU quota of this process in cores, such as 1.5; None if there is no quota."""
    return min(
        (quota for folder in _list_control_groups() if (quota := _read_group_quota(folder)) is not None), default=None
    )


def available_memory() -> int:
    """Return the bytes that the host, resource limits and control groups (containers) let this process allocate."""
    import psutil

    free = [read_host_memory("available")]
    with suppress(ImportError, AttributeError, psutil.Error):  # systems without resource limits or /proc
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            free.append(limit - int(psutil.Process().memory_info().vms))
    for folder in _list_control_groups():
        free += _read_free_memory(folder, "memory.max", "memory.current", "inactive_file")
        free += _read_free_memory(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return max(0, min(free))


def check_space(memory_bytes: int, disk_bytes: Sequence[tuple[Path, int]]) -> None:
    """Raise RequestError or OutputError if memory or a disk has too little free space.

    Folders of `disk_bytes` need not exist; folders on one disk are added up.
    """
    free = available_memory()
    if free < memory_bytes:
        remedy = "close other programs, or use a smaller model or precision"
        found = f"{free / 1e9:.1f} GB free"
        raise RequestError(field="memory", found=found, expected=f"{memory_bytes / 1e9:.1f} GB", remedy=remedy)
    places = [find_existing_ancestor(folder) for folder, _ in disk_bytes]
    disks = [place.stat().st_dev for place in places]
    for (folder, _), place, disk in zip(disk_bytes, places, disks, strict=True):
        needed = sum(size for (_, size), other in zip(disk_bytes, disks, strict=True) if other == disk)
        free = shutil.disk_usage(place).free
        if free < needed:
            remedy = "free some, or use another disk: HF_HOME is the folder of downloads, LANTERN_RT_CACHE of exports"
            found = f"{free / 1e9:.2f} GB free on the disk"
            raise OutputError(field=str(folder), found=found, expected=f"{needed / 1e9:.2f} GB", remedy=remedy)


def list_installed_packages(*names: str) -> list[str]:
    distributions = []
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            distributions.append(name)
    return distributions


def find_onnxruntime_conflict() -> EngineError | None:
    """Return an error if both packages of ONNX Runtime are installed; otherwise None."""
    names = list_installed_packages(*RUNTIMES)
    if len(names) < 2:
        return None
    problem = f"{' and '.join(names)} are both installed and overwrite each other's files"
    return EngineError(problem, remedy=f"run `pip uninstall -y {' '.join(names)}`, then install the one you need")


def _usable_cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _list_control_groups() -> list[Path]:
    """Return the folders of the control groups of this process and of all parents, for versions 1 and 2."""
    folders = [_CGROUP, *(_CGROUP / name for name in _CONTROLLERS)]
    for line in _read_text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)  # version 2 has no controllers
        parts = [part for part in path.split("/") if part not in ("", "..")]
        roots = (
            [_CGROUP / name for name in _CONTROLLERS if name in controllers.split(",")] if controllers else [_CGROUP]
        )
        folders += [root.joinpath(*parts[: i + 1]) for root in roots for i in range(len(parts))]
    return folders


def _read_free_memory(folder: Path, limit_file: str, usage_file: str, cache_field: str) -> list[int]:
    """Return the free bytes of a control group in a list, which is empty if the group has no limit."""
    limit = _read_text(folder / limit_file)
    used = _read_text(folder / usage_file)
    if not (limit.isdigit() and used.isdigit()):
        return []
    stat = dict(line.split() for line in _read_text(folder / "memory.stat").splitlines() if len(line.split()) == 2)
    cached_files = int(stat.get(cache_field, 0))  # the kernel frees these when memory is short
    return [int(limit) - int(used) + cached_files]


def _read_group_quota(folder: Path) -> float | None:
    limit, _, period = _read_text(folder / "cpu.max").partition(" ")
    if not period:
        limit = _read_text(folder / "cpu.cfs_quota_us")
        period = _read_text(folder / "cpu.cfs_period_us")
    try:
        quota = int(limit) / int(period)
    except (ValueError, ZeroDivisionError):
        return None  # the limit is "max", or the file does not exist
    return quota if quota > 0 else None  # version 1 writes -1 for no limit


def _read_text(path: Path) -> str:
    """Return the text of a file; an empty text if the file cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
