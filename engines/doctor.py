"""Report on the hardware and installed packages of this host, which `lantern-rt doctor` prints."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass

from ..errors import EngineError
from .gpu import CUDA, OLDEST_DRIVER, find_gpu
from .host import (
    RUNTIMES,
    available_memory,
    count_usable_cores,
    find_onnxruntime_conflict,
    import_onnxruntime,
    list_installed_packages,
    read_cpu_quota,
)
from .ort.providers import DEFAULT_PROVIDER, PROVIDERS, detect_provider
from .ort.session import check_provider
from .system import read_host_memory

_PACKAGES = ("numpy", "pillow", "pydantic", "tokenizers", "rich", "typer", "torch", "onnx")
_ACCELERATOR_PACKAGES = ("nvidia-cu", "tensorrt", "onnxruntime-ep-")  # prefixes of names of packages


@dataclass(frozen=True)
class HostReport:
    """Properties of a host, and problems that prevent generation."""

    facts: dict[str, str]  # values of properties such as `cores` or `gpu`, as text, by name
    problems: tuple[str, ...]  # messages that state a problem and how to solve it


def make_host_report() -> HostReport:
    """Make a report on this host. A query that fails becomes a problem in the report."""
    conflict = find_onnxruntime_conflict()
    problems = [str(conflict)] if conflict else []
    providers: list[str] = []
    main = DEFAULT_PROVIDER
    try:
        runtime = import_onnxruntime()
        providers = runtime.get_available_providers()
        main = detect_provider(runtime)
    except EngineError as error:
        problems = problems or [str(error)]  # a conflict of packages already explains the error
    versions = _list_package_versions()
    gpu = find_gpu()
    quota = read_cpu_quota()
    cores = count_usable_cores()
    if not problems:  # otherwise every check would repeat that ONNX Runtime cannot be imported
        for provider in PROVIDERS.values():
            if not provider.rounds_to_bfloat16 and provider.package.partition("[")[0] in versions:
                try:
                    check_provider(provider.name)
                except EngineError as error:
                    problems.append(str(error))
    needed = f"CUDA {CUDA}, driver {OLDEST_DRIVER} or newer"
    if (
        gpu
        and float(gpu.cuda_version) < CUDA
        and any(name.startswith(("onnxruntime-gpu", "tensorrt")) for name in versions)
    ):
        problems.append(f"NVIDIA driver: found one for CUDA {gpu.cuda_version}, expected {needed}; update it")
    usable = "CPUExecutionProvider" in providers and (main == DEFAULT_PROVIDER or not problems)
    listed = [name for name in versions if name in _PACKAGES or name.startswith(_ACCELERATOR_PACKAGES)]
    facts = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "onnxruntime": ", ".join(f"{name} {versions[name]}" for name in list_installed_packages(*RUNTIMES))
        or "none installed",
        "providers": ", ".join(providers) or "none",
        "cores": f"{cores} physical usable" + ("" if quota is None else f", quota {quota:g}"),
        "memory": f"{_format_gib(available_memory())} available of {_format_gib(read_host_memory('total'))}",
        "will use": f"ONNX Runtime, provider {main}, threads: {cores}" if usable else "nothing: see the problems",
        "gpu": f"{gpu.compute_capability}, driver for CUDA {gpu.cuda_version}" if gpu else "none found",
        "for GPUs": f"`lantern-rt[gpu]` in place of `[cpu]`: {needed}",
        "packages": ", ".join(f"{name} {versions[name]}" for name in listed),
    }
    return HostReport(facts, tuple(problems))


def _list_package_versions() -> dict[str, str]:
    names = ((package.metadata["Name"], package.version) for package in importlib.metadata.distributions())
    return {str(name).lower().replace("_", "-"): version for name, version in sorted(names, key=str) if name}


def _format_gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
