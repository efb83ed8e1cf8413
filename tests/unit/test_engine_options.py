"""What commands decode with: engines in place of graphs, and what only plans of TensorRT can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_bundle import make_tiny_bundle

from lantern_rt import EngineError, Pipeline, open_bundle
from lantern_rt.cli.main import run_program
from lantern_rt.engines.build import build_engines
from lantern_rt.engines.profiles import BuildOptions


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny")


def silent(what: str, done: int, total: int) -> None:
    pass


@pytest.mark.parametrize(("option", "value"), [("cuda-graphs", True), ("weight-budget", 0)])
def test_what_only_plans_can_do_is_refused_by_onnxruntime(bundle: Path, option: str, value: Any) -> None:
    built = bundle.parent / f"engines-{option}"
    build_engines(open_bundle(bundle), str(bundle), BuildOptions("onnxruntime"), built, False, silent)
    for engines in (None, built):
        with pytest.raises(EngineError) as caught:
            Pipeline.from_bundle(bundle, engines=engines, **{option.replace("-", "_"): value})
        assert str(caught.value) == (
            f"{option}: found ONNX Runtime with provider cpu, expected an engine folder of tensorrt or tensorrt-rtx; "
            f"leave {option} out"
        )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--cuda-graphs"],
            "cuda-graphs: found ONNX Runtime with provider cpu, expected an engine folder of tensorrt or "
            "tensorrt-rtx; leave cuda-graphs out",
        ),
        (
            ["--cuda-graphs", "--weight-budget", "3"],
            "weight-budget: found with cuda-graphs, but a pass that streams weights is no CUDA graph; leave one out",
        ),
        (
            ["--weight-budget", "-1"],
            "weight-budget: found -1048576, expected a whole number 0 .. 1125899906842624",
        ),
    ],
)
@pytest.mark.parametrize("command", ["run", "bench", "tune", "eval"])
def test_all_commands_pass_on_what_is_for_plans(
    capsys: pytest.CaptureFixture[str], bundle: Path, command: str, arguments: list[str], expected: str
) -> None:
    prompts = bundle.parent / "prompts.txt"
    prompts.write_text("red cube\ngreen sphere\n")
    what = ["--bundle", bundle, "--prompt", "red cube"] if command == "run" else [bundle, "--prompts", prompts]
    code = run_program([str(argument) for argument in (command, *what, *arguments)])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == f"lantern-rt: {expected}"


def test_tuning_engines_stores_what_they_then_decode_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, bundle: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("LANTERN_RT_CACHE", str(tmp_path / "cache"))
    engines, prompts = tmp_path / "engines", tmp_path / "prompts.txt"
    prompts.write_text("red cube\ngreen sphere\n")
    assert run_program(["build-engine", str(bundle), "--output", str(engines)]) == 0
    (altered := engines / "drafter.onnx").write_bytes(b"")
    arguments = ["tune", str(bundle), "--minutes", "0.01", "--prompts", str(prompts), "--engines", str(engines)]
    assert run_program(arguments) == 2
    assert f"{altered}: " in capsys.readouterr().err  # so the engines are what is measured
    assert run_program(["build-engine", str(bundle), "--output", str(engines), "--force"]) == 0
    assert run_program(arguments) == 0
    pipeline = Pipeline.from_bundle(bundle, engines=engines)
    assert "here when tuned" in str(pipeline("red cube", method="auto").settings.choice)
