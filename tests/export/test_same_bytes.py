"""Exports of the same checkpoint with the same precision and name are the same bytes on every processor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from published_host import SMALL, Sources

from lantern_rt.export.registry import FAMILIES

EXPORT = """
import json, sys
from pathlib import Path
from lantern_rt.export.graph.precision import read_precisions
from lantern_rt.export.registry import read_family
from lantern_rt.export.writer import export_model
family, output, options, choice = json.loads(sys.argv[1])
model = read_family(family, options, lambda *_: None)
export_model(model, Path(output), name="same", precisions=read_precisions(**choice))
"""
# Two processors: the number of threads, and the vector instructions of PyTorch, oneDNN and MKL.
PROCESSORS = (
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


def small_grouped(target: str) -> Sources:
    """Return a model that is not among the published names."""
    path = DATA / target
    return {"target": path, "config": path.with_name("config.json"), "vq": DATA / "llamagen-vq/vq_tiny.pt"}, {}


READERS = SMALL | {
    "par": lambda _: small_grouped("par/4x/par_4x.pt"),
    "nar": lambda _: small_grouped("nar/c2i/nar_c2i.pt"),
}
CHOICES = {"int8": {"target": "int8"}, "fp16": {"compute": "float16", "vq": "fp16"}}


@pytest.mark.slow
@pytest.mark.parametrize("precision", CHOICES)
@pytest.mark.parametrize("family", READERS)
def test_a_bundle_does_not_depend_on_the_exporting_processor(tmp_path: Path, family: str, precision: str) -> None:
    sources, other_options = READERS[family](tmp_path)
    options = {name: str(path) for name, path in sources.items()} | other_options
    name = "llamagen" if family == "text" else family
    files_by_processor = []
    for i, processor in enumerate(PROCESSORS):
        output = tmp_path / str(i)
        words = json.dumps([name, str(output), options, CHOICES[precision]])
        process = subprocess.run(
            [sys.executable, "-c", EXPORT, words],
            env=os.environ | processor,
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        files_by_processor.append({path.name: path.read_bytes() for path in output.iterdir()})
    first, second = files_by_processor
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_every_family_is_exported_twice() -> None:
    assert {*READERS} - {"text"} == {*FAMILIES}
