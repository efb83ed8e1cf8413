"""`lantern-rt export` from the command line: what it says, and what it refuses before anything is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_copies import ANOLE, ANOLE_DRAFTER, C2I, DRAFTER, LUMINA, T2I, VQ, VQGAN, config_of, copied

from lantern_rt import Pipeline
from lantern_rt.bundle.files import open_bundle
from lantern_rt.cli.main import run_program
from lantern_rt.errors import CheckpointError
from lantern_rt.export.families.lumina import read_lumina
from lantern_rt.export.registry import check_family


def test_an_export_says_what_it_wrote_and_how_to_get_presets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "b"
    files = ["--target", C2I, "--vq", VQ, "--config", config_of(C2I), "--output", bundle]
    command = ["export", *map(str, files)]
    assert run_program([*command, "--compute", "float16"]) == 0
    out, err = capsys.readouterr()
    manifest = open_bundle(bundle).manifest
    assert (manifest.target.dtype, manifest.target.precision, manifest.presets) == ("float16", "fp16", {})
    assert out.strip() == str(bundle)
    assert "writing target.onnx" in err
    assert "GB of memory besides mapped files" in err
    assert any(line.startswith("wrote ") and " MB in " in line for line in err.splitlines())
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


def test_a_path_named_like_an_option_is_reported_as_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_program(["export", "--target", "vq", "--vq", "model", "--output", "b"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "lantern-rt: vq: no such file"


def test_a_drafter_of_other_weights_of_the_same_shape_is_exported_with_a_warning(
    t2i_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = open_bundle(t2i_bundle).manifest.files
    own = files.get("target.data", files["target"]).sha256
    for i, learned_from in enumerate((own, "0" * 64)):
        drafter = copied(DRAFTER, tmp_path / f"drafter{i}", training={"target_sha256": learned_from})
        command = ["--target", T2I, "--vq", VQ, "--config", config_of(T2I), "--drafter", drafter]
        assert run_program(["export", *map(str, [*command, "--output", tmp_path / f"b{i}"])]) == 0
        warning = f"warning: the drafter learned from target weights 000000000000..., not {own[:12]}..."
        assert (warning in capsys.readouterr().err) == bool(i)


def test_a_picture_may_have_more_codes_than_lumina_mgpts_configuration_has_positions(tmp_path: Path) -> None:
    model = read_lumina(copied(LUMINA, tmp_path / "short", max_position_embeddings=20), VQGAN, grid=6)
    assert model.fields["condition"].prefix == 2048


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
