"""What this host offers and what is wrong with it, as `lantern-rt doctor` prints it."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass

from ..errors import EngineError
from .gpu import CUDA, OLDEST_DRIVER, find_gpu
from .host import RUNTIMES, available_memory, cpu_quota, import_onnxruntime, installed, runtime_conflict, usable_cores
from .ort.providers import DEFAULT_PROVIDER, PROVIDERS, automatic
from .ort.session import check_provider
from .system import host_memory

_PACKAGES = ("numpy", "pillow", "pydantic", "tokenizers", "rich", "typer", "torch", "onnx")
_FOR_ACCELERATORS = ("nvidia-cu", "tensorrt", "onnxruntime-ep-")  # how distributions' names begin


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
    conflict = runtime_conflict()
    problems = [str(conflict)] if conflict else []
    providers, main = list[str](), DEFAULT_PROVIDER
    try:
        runtime = import_onnxruntime()
        providers, main = runtime.get_available_providers(), automatic(runtime)
    except EngineError as error:
        problems = problems or [str(error)]
    versions, gpu = _installed(), find_gpu()
    quota, cores = cpu_quota(), usable_cores()
    if not problems:
        for provider in PROVIDERS.values():
            if not provider.rounds_to_bfloat16 and provider.package.partition("[")[0] in versions:
                try:
                    check_provider(provider.name)
                except EngineError as error:
                    problems.append(str(error))
    needed = f"CUDA {CUDA}, driver {OLDEST_DRIVER} or newer"
    if gpu and float(gpu.driver) < CUDA and any(name.startswith(("onnxruntime-gpu", "tensorrt")) for name in versions):
        problems.append(f"NVIDIA driver: found one for CUDA {gpu.driver}, expected {needed}; update it")
    usable = "CPUExecutionProvider" in providers and (main == DEFAULT_PROVIDER or not problems)
    listed = [name for name in versions if name in _PACKAGES or name.startswith(_FOR_ACCELERATORS)]
    facts = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "onnxruntime": ", ".join(f"{name} {versions[name]}" for name in installed(*RUNTIMES)) or "none installed",
        "providers": ", ".join(providers) or "none",
        "cores": f"{cores} physical usable" + ("" if quota is None else f", quota {quota:g}"),
        "memory": f"{_gib(available_memory())} available of {_gib(host_memory('total'))}",
        "will use": f"ONNX Runtime, provider {main}, threads: {cores}" if usable else "nothing: see the problems",
        "gpu": f"{gpu.compute_capability}, driver for CUDA {gpu.driver}" if gpu else "none found",
        "for GPUs": f"`lantern-rt[gpu]` in place of `[cpu]`: {needed}",
        "packages": ", ".join(f"{name} {versions[name]}" for name in listed),
    }
    return HostReport(facts, tuple(problems))


def _installed() -> dict[str, str]:
    names = ((one.metadata["Name"], one.version) for one in importlib.metadata.distributions())
    return {str(name).lower().replace("_", "-"): version for name, version in sorted(names, key=str) if name}


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
