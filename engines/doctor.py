"""What this host offers and what is wrong with it, as `lantern-rt doctor` prints it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from ..checks import brief
from ..errors import EngineError
from .gpu import find_gpu
from .host import (
    available_memory,
    cpu_quota,
    import_onnxruntime,
    installed_runtimes,
    logical_cores,
    runtime_conflict,
    usable_cores,
)
from .ort.providers import PROVIDERS, Provider, plugin_devices, preload

_LIBRARIES = ("nvidia-cuda-runtime", "nvidia-cublas", "nvidia-curand", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
_BUILDERS = ("tensorrt", "tensorrt-rtx")
_PLUGIN = "onnxruntime-ep-"  # how distributions of plugin providers are named


@dataclass(frozen=True)
class HostReport:
    """One host.

    Args:
        facts: what was found, by name, as text.
        problems: lines that say what to do.
    """

    facts: dict[str, str]
    problems: tuple[str, ...]


def host_report() -> HostReport:
    """What this host offers. Never fails: what cannot be found out is a problem."""
    import psutil  # type: ignore[import-untyped]

    problems = [str(conflict)] if (conflict := runtime_conflict()) else []
    providers: list[str] = []
    try:
        providers = import_onnxruntime().get_available_providers()
    except EngineError as error:
        problems = problems or [str(error)]
    gpu, installed = find_gpu(), _installed()
    quota, cores = cpu_quota(), usable_cores()
    usable = "CPUExecutionProvider" in providers
    runtimes = {name: installed[name] for name in installed_runtimes()}
    plugins = {name: installed[name] for name in sorted(installed) if name.startswith(_PLUGIN)}
    facts = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "onnxruntime": _listed(runtimes),
        "providers": ", ".join(providers) or "none",
        "cores": f"{cores} physical usable of {logical_cores()} logical",
        "cpu quota": "none" if quota is None else f"{quota:g} cores",
        "memory": f"{_gib(available_memory())} available of {_gib(psutil.virtual_memory().total)}",
        "will use": f"ONNX Runtime on the CPU, threads: {cores}" if usable else "nothing: no backend is usable",
        "gpu": f"{gpu.compute_capability}, driver for CUDA {gpu.driver}" if gpu else "none found",
        "gpu libraries": _listed({name: installed[name] for name in _LIBRARIES if name in installed}),
        "gpu builders": _listed({name: installed[name] for name in _BUILDERS if name in installed}),
        "plugin providers": _listed(plugins),
    }
    if "onnxruntime-gpu" in installed and "onnxruntime" not in installed:
        problems += cuda_problems(installed, gpu is not None)
    present = [one for one in PROVIDERS.values() if one.plugin and not one.rounds and one.package in installed]
    problems += [problem for one in present if (problem := _missing_device(one))]
    return HostReport(facts, tuple(problems))


def cuda_problems(installed: dict[str, str], gpu: bool) -> list[str]:
    """What provider cuda lacks here, a line each with its remedy. installed: distributions and their versions."""
    found = []
    if missing := _missing_library():
        remedy = "run `pip install 'lantern-rt[gpu]'`, which brings CUDA's and cuDNN's libraries"
        found.append(f"provider cuda: its libraries do not load ({missing}); {remedy}")
    if not gpu:
        found.append("provider cuda: found no NVIDIA GPU and driver; install the driver, or use provider cpu")
    elif not any(name.startswith("nvidia-cudnn") for name in installed):
        found.append("provider cuda: cuDNN is not among the packages; run `pip install 'lantern-rt[gpu]'`")
    return found


def _installed() -> dict[str, str]:
    """Versions of all installed distributions by name."""
    names = ((one.metadata["Name"], one.version) for one in importlib.metadata.distributions())
    return {str(name).lower().replace("_", "-"): version for name, version in names if name}


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or "none installed"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _missing_device(provider: Provider) -> str | None:
    """Why an installed plugin provider cannot run; None if it can."""
    try:
        plugin_devices(provider, import_onnxruntime())
    except EngineError as error:
        return str(error)
    return None


def _missing_library() -> str | None:
    """Why the library of ONNX Runtime's CUDA provider does not load; None if it does, or there is none here."""
    try:
        runtime = import_onnxruntime()
        preload(PROVIDERS["cuda"], runtime)
        folder = Path(runtime.__file__).parent / "capi"
        if sys.platform == "linux" and (folder / "libonnxruntime_providers_cuda.so").is_file():
            ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), mode=ctypes.RTLD_GLOBAL)
            ctypes.CDLL(str(folder / "libonnxruntime_providers_cuda.so"))
    except (EngineError, OSError) as error:
        return brief(error, 200)
    return None
