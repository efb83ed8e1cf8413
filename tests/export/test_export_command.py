"""`lantern-rt export` from the command line: what it says, and what it refuses before anything is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_copies import ANOLE, ANOLE_DRAFTER, C2I, LUMINA, VQ, VQGAN, config_of

from lantern_rt import Pipeline
from lantern_rt.bundle.files import open_bundle
from lantern_rt.cli.main import run_program
from lantern_rt.errors import CheckpointError
from lantern_rt.export.registry import check_family


def test_an_export_says_what_it_took_and_how_to_get_presets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "b"
    files = ["--target", C2I, "--vq", VQ, "--config", config_of(C2I), "--output", bundle]
    command = ["export", *map(str, files)]
    assert run_program([*command, "--compute", "float16"]) == 0
    out, err = capsys.readouterr()
    manifest = open_bundle(bundle).manifest
    assert (manifest.target.dtype, manifest.target.precision, manifest.presets) == ("float16", "fp16", {})
    assert out.strip() == str(bundle)
    sizes = "llamagen: 3 layers, hidden size 64, 4 heads, grid 4 x 4, 64 x 64 pixels, vocabulary 128, "
    assert f"{sizes}condition: 10 classes, no drafter" in err.splitlines()
    assert "writing target.onnx" in err
    assert "GB of memory besides mapped files" in err
    assert f"`lantern-rt eval {bundle} --write-presets`" in err.splitlines()[-1]
    assert run_program([*command, "--precision", "fp8", "--force"]) == 2
    assert "precision: found 'fp8', expected one of fp32, fp16" in capsys.readouterr().err


def test_an_anole_bundle_is_exported_and_draws(tmp_path: Path) -> None:
    files = ["--target", ANOLE, "--vq", VQGAN, "--drafter", ANOLE_DRAFTER, "--output", tmp_path / "anole"]
    assert run_program(["export", "--family", "anole", *map(str, files)]) == 0
    result = Pipeline.from_bundle(tmp_path / "anole", threads=1)("tok145 tok146", method="lantern++")
    assert len(result.codes[0]) == 64


def test_a_lumina_bundle_is_exported_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = str(tmp_path / "lumina")
    files = ["--target", str(LUMINA), "--vq", str(VQGAN), "--grid", "4", "--output", bundle]
    assert run_program(["export", "--family", "lumina", *files]) == 0
    assert run_program(["verify", bundle, str(LUMINA), str(VQGAN)]) == 0
    assert "passed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "options", "field"),
    [
        ("anole", {"vq": "v", "config": "c"}, "config"),
        ("janus", {"vq": "v"}, "vq"),
        ("anole", {}, "vq"),
        ("llama", {}, "family"),
    ],
)
def test_options_that_a_family_does_not_take_or_lacks_are_refused(
    family: str, options: dict[str, str], field: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_family(family, {"target": "t"} | options)
    assert caught.value.field == field
