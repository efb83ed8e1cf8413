"""Graphs of every model family in NVIDIA's tool Polygraphy, and the commands that `build-engine` prints."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from lantern_rt.bundle.files import open_bundle
from lantern_rt.engines.build import write_engine_graphs
from lantern_rt.engines.profiles import RTX, BuildOptions
from lantern_rt.engines.trt.builder import format_build_commands

for module in ("torch", "tensorrt_rtx", "onnx_graphsurgeon"):
    pytest.importorskip(module, reason="needs lantern-rt[export,tensorrt-rtx] and onnx-graphsurgeon")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1"
RTX_OPTIONS = BuildOptions("tensorrt-rtx", max_rows=2, max_nodes=8, compute_capabilities=("SM89", "SM120"))


def run_polygraphy(*arguments: object) -> int:
    """Run the command-line program of Polygraphy in this process, and return the exit code."""
    from polygraphy.tools._main import main

    status: int = main([*map(str, arguments)])
    return status


@pytest.mark.parametrize(
    "family", ["t2i_drafter", "t2i_half", "anole", "lumina", "lumina2", "glm_image", "emu3", "janus"]
)
def test_tensorrt_supports_the_graphs_of_a_family(
    family: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from polygraphy.logger import G_LOGGER

    monkeypatch.setattr(G_LOGGER, "use_python_logging_system", False)  # building engines enables Python logging
    bundle = open_bundle(request.getfixturevalue(f"{family}_bundle"))
    engine_folder = tmp_path / "engines"
    engine_folder.mkdir()
    _ = [*write_engine_graphs(bundle, RTX_OPTIONS, engine_folder)]
    hidden_size = bundle.manifest.target.hidden_size
    # The linter sets token ids to 0 and 1, so these tables need only a few entries.
    table_shapes = {"target": f"embeddings:[4,{hidden_size}]", "drafter": f"hidden:[1,4,{hidden_size}]"}
    for role in table_shapes.keys() & bundle.manifest.files.keys():
        for graph, shape_options in (
            (bundle.path(role), []),
            (engine_folder / f"{role}.onnx", ["--input-shapes", table_shapes[role]]),
        ):
            capsys.readouterr()
            with G_LOGGER.verbosity(G_LOGGER.INFO):
                assert run_polygraphy("inspect", "capability", graph) == 0
                assert "Graph is fully supported" in capsys.readouterr().out, graph
                assert (
                    run_polygraphy("check", "lint", graph, "--external-data-dir", bundle.folder, *shape_options) == 0
                ), graph


def test_the_polygraphy_commands_are_valid(float_scenes_bundle: Path, tmp_path: Path) -> None:
    """Run the Polygraphy commands without their GPU options; the commands of trtexec have the same shapes."""
    bundle = open_bundle(float_scenes_bundle)
    engine_folder = tmp_path / "engines"
    engine_folder.mkdir()
    lines = [
        line
        for role, _, inputs in write_engine_graphs(bundle, RTX_OPTIONS, engine_folder)
        for line in format_build_commands(RTX, bundle, role, inputs, RTX_OPTIONS.compute_capabilities, engine_folder)
    ]
    assert len(lines) == 2 * 3
    polygraphy_line, trtexec_line = map(shlex.split, lines[2:4])
    assert polygraphy_line[:4] == ["env", "POLYGRAPHY_USE_TENSORRT_RTX=1", "polygraphy", "run"]
    arguments = [word for word in polygraphy_line[4:] if word != "--trt"]
    assert run_polygraphy("run", *arguments) == 0
    arguments.remove("--onnxrt")
    arguments[arguments.index("--save-engine")] = "--output"
    assert run_polygraphy("convert", *arguments, "--convert-to", "trt") == 0
    assert (engine_folder / "drafter.plan").stat().st_size > bundle.manifest.files["drafter.data"].bytes
    max_shapes = [word for word in trtexec_line if word.startswith("--maxShapes=")]
    assert ",".join(max_shapes).count("token_ids:2x24,") == 1
