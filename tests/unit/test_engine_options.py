"""What commands decode with: options that all of them pass on, and engines in place of graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_bundle import make_tiny_bundle

from lantern_rt import Pipeline
from lantern_rt.cli.main import run_program


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--threads", "0"], "--threads: found 0, expected 1 .. "),
        (["--provider", "abacus"], "--provider: found 'abacus', expected one of cpu, "),
        (["--provider", "cpu", "--provider", "vq=cpu"], "--provider: found graph 'vq', expected condition or vq_dec"),
        (["--provider", "vq_decoder=abacus"], "--provider: found 'abacus', expected one of cpu, "),
        (["--engines", "nowhere"], "nowhere: no engine.json in it; "),
        (["--expand-weights"], "--expand-weights: found a target with fp32 weights, expected int8-weights or int4-"),
    ],
)
@pytest.mark.parametrize("command", ["run", "bench", "tune", "eval"])
def test_all_commands_pass_on_what_decodes(
    capsys: pytest.CaptureFixture[str], bundle: Path, command: str, arguments: list[str], expected: str
) -> None:
    prompts = bundle.parent / "prompts.txt"
    prompts.write_text("red cube\ngreen sphere\n")
    what = ["--bundle", bundle, "--prompt", "red cube"] if command == "run" else [bundle, "--prompts", prompts]
    code = run_program([str(argument) for argument in (command, *what, *arguments)])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"lantern-rt: {expected}")


@pytest.mark.usefixtures("even_clock")
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
