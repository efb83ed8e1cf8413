"""`lantern-rt verify` and `export --precision`, from the command line, on small published-layout checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llamagen_golden import DATA
from safetensors.torch import load_file, save_file

from lantern_rt import Pipeline
from lantern_rt.bundle.files import open_bundle
from lantern_rt.cli.main import run_program
from lantern_rt.engines.device_graph import MASKED
from lantern_rt.export.verify import agree, divergence

C2I, T2I, VQ = (
    DATA / name for name in ("llamagen-c2i/c2i_tiny.pt", "llamagen-t2i/t2i_tiny.pt", "llamagen-vq/vq_tiny.pt")
)
DRAFTER = DATA / "lantern-drafter-llamagen"


def program(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run_program([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def rounded_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text-conditional, its target in 8-bit and its drafter in 4-bit integers."""
    folder = tmp_path_factory.mktemp("rounded") / "bundle"
    arguments: list[object] = ["export", "--target", T2I, "--vq", VQ, "--config", T2I.with_name("config.json")]
    arguments += ["--drafter", DRAFTER, "--output", folder]
    arguments += ["--precision", "int8-weights", "--drafter-precision", "int4-weights"]
    assert run_program([str(argument) for argument in arguments]) == 0
    return folder


def test_the_divergence_of_distributions_is_in_nats() -> None:
    expected, found = np.log([[0.5, 0.5], [0.25, 0.75]]), np.log([[0.5, 0.5], [0.5, 0.5]])
    np.testing.assert_allclose(
        divergence(expected, found + 7), [0, 0.25 * np.log(0.5) + 0.75 * np.log(1.5)], atol=1e-12
    )


def test_near_ties_count_as_agreement_and_nothing_else() -> None:
    expected = np.log([[0.5, 0.45, 0.05], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    found = np.log([[0.45, 0.5, 0.05], [0.45, 0.5, 0.05], [0.6, 0.3, 0.1]])
    assert agree(expected, found).tolist() == [True, False, True]


def test_a_bundle_agrees_with_its_checkpoint(
    c2i_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    code, out, err = program(capsys, "verify", c2i_bundle, "--against", C2I, "--vq", VQ, "--report", page)
    assert code == 0, out
    assert out.strip().endswith("passed")
    for name in ("logits", "prefix_embeds", "images", "pre_quant", "new_key_values.2.value"):
        assert name in out
        assert name in page.read_text()
    assert "comparing target.onnx" in err
    code, _, err = program(capsys, "verify", c2i_bundle, "--report", page)
    assert code == 2
    assert "report.html: found a file" in err


def test_a_device_layout_that_differs_is_found(
    c2i_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(MASKED, "float32", 0.0)  # every node sees every column
    code, out, _ = program(capsys, "verify", c2i_bundle, "--against", C2I, "--vq", VQ, "--json")
    failed = {(row["graph"], row["tensor"]) for row in json.loads(out)["tensors"] if not row["passed"]}
    assert code == 2
    assert ("target", "logits") in failed
    assert {graph for graph, _ in failed} == {"target"}


def test_an_anole_bundle_agrees_with_its_folders_and_with_no_others(
    anole_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--vq", DATA / "chameleon-vqgan", "--drafter", DATA / "anole/drafter", "--json"]
    code, out, err = program(capsys, "verify", anole_bundle, "--against", DATA / "anole/target", *files)
    assert code == 0, err
    report = json.loads(out)
    graphs = {"target", "drafter", "condition", "vq_decoder", "vq_encoder"}
    assert {row["graph"] for row in report["tensors"]} == graphs | {"code_embeddings", "neighbors", "tokenizer"}
    assert [row["agreement"] for row in report["distributions"]] == [1.0, 1.0]
    other = shutil.copytree(DATA / "anole/target", tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["lm_head.weight"][4] += 0.1  # the row of code 0
    save_file(weights, other / "model.safetensors")
    code, out, _ = program(capsys, "verify", anole_bundle, "--against", other, *files)
    assert code == 2
    failed = {(row["graph"], row["tensor"]) for row in json.loads(out)["tensors"] if not row["passed"]}
    assert failed == {("target", "logits"), ("drafter", "logits")}
    code, _, err = program(capsys, "verify", anole_bundle, "--against", other, *files[:2])
    assert code == 2
    assert "--drafter: found nothing, expected the folder of the bundle's drafter" in err


def test_another_checkpoint_fails_with_exit_code_2(
    c2i_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = torch.load(C2I, weights_only=True)["model"]
    weights["layers.1.feed_forward.w2.weight"][:, 0] += 0.1
    torch.save(weights, tmp_path / "other.pt")
    code, out, _ = program(capsys, "verify", c2i_bundle, "--against", tmp_path / "other.pt", "--vq", VQ, "--json")
    assert code == 2
    report = json.loads(out)
    assert report["passed"] is False
    failed = {row["tensor"] for row in report["tensors"] if not row["passed"]}
    assert {"logits", "hidden_states", "new_key_values.2.key"} <= failed
    assert "new_key_values.1.key" not in failed


def test_without_a_checkpoint_the_reference_evaluator_is_the_measure(
    rounded_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = program(capsys, "verify", rounded_bundle, "--json")
    report = json.loads(out)
    assert code == 0, report
    assert report["against"] == "ONNX reference evaluator"
    assert {row["graph"] for row in report["tensors"]} == {
        "target",
        "drafter",
        "condition",
        "vq_decoder",
        "vq_encoder",
    }
    assert [row["graph"] for row in report["distributions"]] == ["target", "drafter"]


def test_without_a_checkpoint_bundles_of_varying_pictures_are_measured_too(
    emu3_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = program(capsys, "verify", emu3_bundle, "--json")
    assert code == 0, out
    assert {"target", "condition", "vq_decoder", "vq_encoder"} == {row["graph"] for row in json.loads(out)["tensors"]}


def test_rounded_bundles_are_judged_by_their_distributions(
    rounded_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = program(
        capsys, "verify", rounded_bundle, "--against", T2I, "--vq", VQ, "--drafter", DRAFTER, "--json"
    )
    report = json.loads(out)
    assert code == 0, report["distributions"]
    target, drafter = report["distributions"]
    assert 0 < target["mean_divergence"] < target["divergence_limit"] < drafter["divergence_limit"]
    assert all(row["limit"] is None for row in report["tensors"] if row["graph"] == "target")


def test_a_rounded_bundle_says_so_and_makes_pictures(rounded_bundle: Path) -> None:
    manifest = open_bundle(rounded_bundle).manifest
    assert manifest.target.precision == "int8-weights"
    assert manifest.drafter is not None
    assert manifest.drafter.precision == "int4-weights"
    width = manifest.condition.caption_dim or 0
    embeddings = np.random.default_rng(0).standard_normal((5, width), np.float32)
    pipeline = Pipeline.from_bundle(rounded_bundle, threads=1)
    exact, plain = (
        pipeline(embeddings=embeddings, seed=3, method=method, temperature=0.0) for method in ("eagle", "ar")
    )
    assert np.array_equal(np.asarray(exact.images[0]), np.asarray(plain.images[0]))


def test_an_export_says_what_it_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = C2I.with_name("config.json")
    arguments = ["export", "--target", C2I, "--vq", VQ, "--config", config, "--output", tmp_path / "b"]
    code, out, err = program(capsys, *arguments, "--compute", "float16")
    assert code == 0
    target = open_bundle(tmp_path / "b").manifest.target
    assert (target.dtype, target.precision) == ("float16", "fp16")
    assert out.strip() == str(tmp_path / "b")
    found = "found llamagen: 3 layers, hidden size 64, 4 heads, grid 4 x 4, 64 x 64 pixels, vocabulary 128, "
    assert f"{found}condition: 10 classes, no drafter" in err.splitlines()
    assert "writing target.onnx" in err
    assert "GB of memory besides mapped files" in err
    code, _, err = program(capsys, *arguments, "--precision", "fp8", "--force")
    assert code == 2
    assert "--precision: found 'fp8', expected one of fp32, fp16" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vq", VQ], "found checkpoint options without --against"),
        (["--against", C2I], "--vq: found nothing, expected the VQ tokenizer"),
        (["--against", C2I, "--vq", VQ, "--drafter", DRAFTER], "expected none: the bundle has none"),
        (["--against", DATA / "absent.pt", "--vq", VQ], "absent.pt: no such file"),
    ],
)
def test_what_does_not_fit_is_refused(
    c2i_bundle: Path, capsys: pytest.CaptureFixture[str], arguments: list[Any], words: str
) -> None:
    code, _, err = program(capsys, "verify", c2i_bundle, *arguments)
    assert code == 2
    assert words in err


def test_a_bundle_without_a_known_family_has_no_checkpoint_to_compare_with(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = program(capsys, "verify", "scenes", "--against", C2I)
    assert code == 2
    assert "found a bundle of family 'scenes', expected llamagen or anole or lumina or janus or emu3" in err
