"""What `lantern-rt doctor` says of GPUs: the device, its driver, libraries and providers, and what is missing."""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..checks import brief
from ..errors import EngineError
from .host import import_onnxruntime
from .ort.providers import PROVIDERS, Provider, plugin_devices, preload

_LIBRARIES = ("nvidia-cuda-runtime", "nvidia-cublas", "nvidia-curand", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
_BUILDERS = ("tensorrt", "tensorrt-rtx")
_PLUGIN = "onnxruntime-ep-"  # how distributions of plugin providers are named


DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


class Gpu(NamedTuple):
    """The first GPU: the CUDA version its driver supports, such as `13.0`, and its capability, such as `SM89`."""

    driver: str
    compute_capability: str


def find_gpu() -> Gpu | None:
    """The first GPU, or None where there is no driver or no device; allocates nothing."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return None
    version, device, major, minor = (ctypes.c_int() for _ in range(4))
    failed = (  # each call returns 0 for success
        driver.cuInit(0)
        or driver.cuDriverGetVersion(ctypes.byref(version))
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    )
    number = version.value
    return None if failed else Gpu(f"{number // 1000}.{number % 1000 // 10}", f"SM{major.value}{minor.value}")


@dataclass(frozen=True)
class GpuReport:
    """Versions by name of distribution; gpu and driver are None where there is none. `problems`: lines with a cure."""

    gpu: str | None
    driver: str | None
    libraries: dict[str, str]
    builders: dict[str, str]
    plugin_providers: dict[str, str]
    problems: tuple[str, ...]

    def rows(self) -> list[tuple[str, str]]:
        """Name and text of every finding."""
        device = f"{self.gpu}, driver for CUDA {self.driver}" if self.gpu else "none found"
        listed = {
            "gpu libraries": self.libraries,
            "gpu builders": self.builders,
            "plugin providers": self.plugin_providers,
        }
        texts = {
            name: ", ".join(f"{one} {version}" for one, version in found.items()) for name, found in listed.items()
        }
        rows = [("gpu", device), *((name, text or "none installed") for name, text in texts.items())]
        return [*rows, *(("problem", problem) for problem in self.problems)]


def gpu_report() -> GpuReport:
    """What there is for GPUs. Never fails."""
    gpu = find_gpu()
    installed = {str(one.metadata["Name"]).lower().replace("_", "-"): one.version for one in _distributions()}
    problems = []
    if "onnxruntime-gpu" in installed and "onnxruntime" not in installed:
        if missing := _missing_library():
            cure = "run `pip install 'lantern-rt[gpu]'`, which brings CUDA's and cuDNN's libraries"
            problems.append(f"provider cuda: its libraries do not load ({missing}); {cure}")
        if gpu is None:
            problems.append("provider cuda: found no NVIDIA GPU and driver; install the driver, or use provider cpu")
        elif not any(name.startswith("nvidia-cudnn") for name in installed):
            problems.append("provider cuda: cuDNN is not among the packages; run `pip install 'lantern-rt[gpu]'`")
    plugins = [one for one in PROVIDERS.values() if one.plugin and not one.rounds and one.package in installed]
    problems += [problem for one in plugins if (problem := _missing_device(one))]
    return GpuReport(
        gpu=gpu.compute_capability if gpu else None,
        driver=gpu.driver if gpu else None,
        libraries={name: installed[name] for name in _LIBRARIES if name in installed},
        builders={name: installed[name] for name in _BUILDERS if name in installed},
        plugin_providers={name: installed[name] for name in sorted(installed) if name.startswith(_PLUGIN)},
        problems=tuple(problems),
    )


def _distributions() -> list[importlib.metadata.Distribution]:
    return [one for one in importlib.metadata.distributions() if one.metadata["Name"]]


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
