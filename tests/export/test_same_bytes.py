"""Reproducible exports: a checkpoint, a precision and a name give the same bytes on every processor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from checkpoint_copies import VQ, config_path
from goldens import DATA
from published_host import SMALL_CHECKPOINTS

from lantern_rt.export.graph.precision import parse_precisions
from lantern_rt.export.registry import FAMILIES, read_family_checkpoints
from lantern_rt.export.writer import export_model

# Program that exports a model. Argument: a JSON list of family, output path, checkpoints and options, precisions.
EXPORT_PROGRAM = """
import json, sys
from pathlib import Path
from lantern_rt.export.graph.precision import parse_precisions
from lantern_rt.export.registry import read_family_checkpoints
from lantern_rt.export.writer import export_model
family, output, options, choice = json.loads(sys.argv[1])
model = read_family_checkpoints(family, options, lambda *_: None)
export_model(model, Path(output), name="same", precisions=parse_precisions(**choice))
"""
# Environment variables that imitate two processors: number of threads, and vector instructions of the libraries.
PROCESSOR_VARIABLES = (
    {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"},
    {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "OPENBLAS_CORETYPE": "Nehalem",
        "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3",
    },
)
PAR = DATA / "par/4x/par_4x.pt"
NAR = DATA / "nar/c2i/nar_c2i.pt"
SOURCES = SMALL_CHECKPOINTS | {
    "par": lambda _: ({"target": PAR, "config": config_path(PAR), "vq": VQ}, {}),
    "nar": lambda _: ({"target": NAR, "config": config_path(NAR), "vq": VQ}, {}),
}
PRECISIONS = {"int8": {"target": "int8"}, "fp16": {"compute": "float16", "vq": "fp16"}}


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", SOURCES)
def test_threads_and_vector_instructions_change_no_byte(tmp_path: Path, family: str, precision: str) -> None:
    sources, other_options = SOURCES[family](tmp_path)
    options = {name: str(path) for name, path in sources.items()} | other_options
    name = "llamagen" if family == "text" else family
    files_by_processor = []
    for i, variables in enumerate(PROCESSOR_VARIABLES):
        output = tmp_path / str(i)
        argument = json.dumps([name, str(output), options, PRECISIONS[precision]])
        process = subprocess.run(
            [sys.executable, "-c", EXPORT_PROGRAM, argument],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        files_by_processor.append({path.name: path.read_bytes() for path in output.iterdir()})
    files, other_files = files_by_processor
    assert files.keys() == other_files.keys()
    assert [name for name in files if files[name] != other_files[name]] == []


def export_llamagen(output: Path) -> dict[str, bytes]:
    sources, options = SOURCES["llamagen"](output)
    model = read_family_checkpoints("llamagen", {name: str(path) for name, path in sources.items()} | options)
    export_model(model, output, name="same", precisions=parse_precisions(target="int8"))
    return {path.name: path.read_bytes() for path in output.iterdir()}


@pytest.fixture(scope="module")
def llamagen_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return export_llamagen(tmp_path_factory.mktemp("plain") / "bundle")


@contextmanager
def set_default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
        assert torch.get_default_dtype() is dtype  # the export restored it
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def set_matmul_precision(precision: str) -> Iterator[None]:
    torch.set_float32_matmul_precision(precision)
    try:
        yield
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")


@contextmanager
def flush_denormals() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
        assert (torch.tensor(1e-40) * 1).item() == 0
    finally:
        torch.set_flush_denormal(False)


HOST_SETTINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "default dtype bfloat16": lambda: set_default_dtype(torch.bfloat16),
    "default dtype float64": lambda: set_default_dtype(torch.float64),
    "default device meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "low matmul precision": lambda: set_matmul_precision("medium"),
    "flushed denormals": flush_denormals,
}


@pytest.mark.parametrize("setting", HOST_SETTINGS)
def test_an_export_does_not_depend_on_settings_of_the_calling_program(
    tmp_path: Path, llamagen_files: dict[str, bytes], setting: str
) -> None:
    with HOST_SETTINGS[setting]():
        files = export_llamagen(tmp_path / "bundle")
    assert files.keys() == llamagen_files.keys()
    assert [name for name in files if files[name] != llamagen_files[name]] == []


def test_the_comparison_of_exports_includes_every_family() -> None:
    assert {*SOURCES} - {"text"} == {*FAMILIES}
