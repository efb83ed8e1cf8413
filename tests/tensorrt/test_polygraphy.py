"""NVIDIA's tools accept the graphs in both layouts of every family, and the printed command lines."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from lantern_rt.bundle.files import open_bundle
from lantern_rt.engines.build import build_engines
from lantern_rt.engines.profiles import BuildOptions

for needed in ("torch", "tensorrt_rtx", "onnx_graphsurgeon"):
    pytest.importorskip(needed, reason="needs lantern-rt[export,tensorrt-rtx] and onnx-graphsurgeon")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1"
RTX = BuildOptions("tensorrt-rtx", max_rows=2, max_nodes=8, compute_capabilities=("SM89", "SM120"))


def polygraphy(*arguments: object) -> int:
    """Run Polygraphy's program in this process."""
    from polygraphy.tools._main import main

    status: int = main([*map(str, arguments)])
    return status


@pytest.fixture
def janus_bundle(tmp_path: Path) -> Path:
    pytest.importorskip("transformers")
    from family_readers import read_janus
    from small_janus import random_janus, write_janus

    from lantern_rt.export.writer import export_model

    write_janus(random_janus(), tmp_path / "janus")
    return export_model(read_janus(tmp_path / "janus"), tmp_path / "bundle")


@pytest.mark.parametrize(
    "family", ["t2i_drafter", "t2i_half", "anole", "lumina", "lumina2", "glm_image", "emu3", "janus"]
)
def test_both_layouts_are_valid_and_fully_supported(
    family: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from polygraphy.logger import G_LOGGER

    monkeypatch.setattr(G_LOGGER, "use_python_logging_system", False)  # builds enable it
    bundle = open_bundle(request.getfixturevalue(f"{family}_bundle"))
    built = tmp_path / "engines"
    build_engines(bundle, "it", RTX, built, False, lambda stage, done, total: None, dry_run=True)
    width = bundle.manifest.target.hidden_size
    tables = {
        "target": f"embeddings:[4,{width}]",
        "drafter": f"hidden:[1,4,{width}]",
    }  # tables for ids, which the tool sets to 0 and 1
    for role in tables.keys() & bundle.manifest.files.keys():
        for graph, sizes in ((bundle.path(role), []), (built / f"{role}.onnx", ["--input-shapes", tables[role]])):
            capsys.readouterr()
            with G_LOGGER.verbosity(G_LOGGER.INFO):
                assert polygraphy("inspect", "capability", graph) == 0
                assert "Graph is fully supported" in capsys.readouterr().out, graph
                assert polygraphy("check", "lint", graph, "--external-data-dir", bundle.folder, *sizes) == 0, graph


def test_the_command_lines_of_a_dry_run_are_valid(float_scenes_bundle: Path, tmp_path: Path) -> None:
    """Run Polygraphy's lines without their GPU options; the line of the other tool has the same shapes."""
    bundle = open_bundle(float_scenes_bundle)
    built = tmp_path / "engines"
    _, lines = build_engines(bundle, "scenes", RTX, built, False, lambda stage, done, total: None, dry_run=True)
    assert len(lines) == 2 * 3
    polygraphy_line, other_line = map(shlex.split, lines[2:4])
    assert polygraphy_line[:4] == ["env", "POLYGRAPHY_USE_TENSORRT_RTX=1", "polygraphy", "run"]
    arguments = [word for word in polygraphy_line[4:] if word != "--trt"]
    assert polygraphy("run", *arguments) == 0
    arguments.remove("--onnxrt")
    arguments[arguments.index("--save-engine")] = "--output"
    assert polygraphy("convert", *arguments, "--convert-to", "trt") == 0
    assert (built / "drafter.plan").stat().st_size > bundle.manifest.files["drafter.data"].bytes
    largest = [word for word in other_line if word.startswith("--maxShapes=")]
    assert ",".join(largest).count("token_ids:2x24,") == 1
