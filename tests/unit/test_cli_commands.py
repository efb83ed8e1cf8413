"""The commands of `lantern-rt` besides `run`: what they print, their help, and what they import."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from bundle_folder import make_bundle
from tiny_bundle import make_tiny_bundle
from typer.testing import CliRunner

import lantern_rt
from lantern_rt.bundle.files import open_bundle
from lantern_rt.cli.app import COMMANDS, app
from lantern_rt.cli.inspect import describe
from lantern_rt.cli.main import run_program

PROGRAM = [sys.executable, "-m", "lantern_rt"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("words") / "tiny")


def test_inspect_prints_the_manifest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "codebook_size" in text
    assert run_program(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["manifest"]["name"] == "tiny"


def test_a_description_has_a_section_for_every_part_and_names_every_set_value(tmp_path: Path) -> None:
    bundle = open_bundle(make_bundle(tmp_path / "tiny"))
    facts = describe("bundle", {"digest": bundle.digest, **bundle.manifest.model_dump(mode="json")})
    assert next(iter(facts)) == "bundle"
    assert facts["bundle"]["digest"] == bundle.digest
    assert facts["target"]["hidden_size"] == "8"
    assert facts["decoding"]["methods.0.delta"] == "0.1"
    assert facts["provenance"]["sources.0.name"] == "w.pt"
    assert facts["files"]["neighbors"].startswith("neighbors.npz  ")


def test_doctor_says_what_will_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    code = run_program(["doctor"])
    text = capsys.readouterr().out
    assert "lantern-rt" in text
    assert "will use" in text
    assert run_program(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["lantern_rt"] == lantern_rt.__version__
    assert (code == 0) == (report["problems"] == [])


def test_export_without_torch_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    code = run_program(["export", "--target", "a.pt", "--vq", "b.pt", "--output", "out"])
    assert code == 2
    assert "pip install 'lantern-rt[cpu,export]'" in capsys.readouterr().err


def test_export_refuses_an_unknown_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["export", "--family", "magic", "--target", "a", "--vq", "b", "--output", "c"]) == 2
    assert "family: found 'magic', expected llamagen" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_every_help_shows_examples(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert f"  lantern-rt {' '.join(command)}" in result.output.partition("Examples:\n")[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_list_of_commands_says_what_a_command_says(command: str) -> None:
    first = " ".join(CliRunner().invoke(app, [command, "--help"]).output.partition("\n\n")[2].split())
    assert first.startswith(COMMANDS[command][1].rstrip("."))


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], {"numpy", "pydantic", "torch", "onnx", "onnxruntime", "scipy"}),
        (["doctor", "--help"], {"torch", "onnx", "scipy"}),
        (["run", "--help"], {"numpy", "torch", "onnx", "onnxruntime", "scipy", "matplotlib"}),
        (["run", "--prompt", "a red sphere", "--output", "x.png"], {"torch", "onnx", "scipy", "matplotlib", "ftfy"}),
        (["bench", "--help"], {"torch", "onnx", "onnxruntime", "scipy"}),
    ],
)
def test_commands_start_without_what_they_do_not_need(tmp_path: Path, arguments: list[str], heavy: set[str]) -> None:
    code = (
        "import sys; from lantern_rt.cli.main import run_program; "
        f"print(run_program({arguments!r}), *({heavy!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0"


def test_the_version_is_printed_without_loading_a_model() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"lantern-rt {lantern_rt.__version__}\n")


@pytest.mark.parametrize("arguments", [["dance"], ["inspect"], ["run", "--seed"]])
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(arguments) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "--help" in err
