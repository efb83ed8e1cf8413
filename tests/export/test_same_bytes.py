"""Reproducible exports: a checkpoint, a precision and a name give the same bytes on every processor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from published_host import SMALL_CHECKPOINTS, ExportSources

from lantern_rt.export.registry import FAMILIES

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
DATA = Path(__file__).parent.parent / "data"


def list_llamagen_sources(target: str) -> ExportSources:
    """Return the checkpoints and export options for a small model of PAR or NAR."""
    path = DATA / target
    return {"target": path, "config": path.with_name("config.json"), "vq": DATA / "llamagen-vq/vq_tiny.pt"}, {}


SOURCES = SMALL_CHECKPOINTS | {
    "par": lambda _: list_llamagen_sources("par/4x/par_4x.pt"),
    "nar": lambda _: list_llamagen_sources("nar/c2i/nar_c2i.pt"),
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


def test_the_comparison_of_exports_includes_every_family() -> None:
    assert {*SOURCES} - {"text"} == {*FAMILIES}
