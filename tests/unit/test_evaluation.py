"""Evaluation of methods: images, figures, reports, and the `eval` command."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_graphs import add_vq_encoder, ignore_progress, make_agreement_graph, make_feature_graph
from PIL import Image, ImageOps
from tiny_bundle import make_tiny_bundle

from lantern_rt import Pipeline
from lantern_rt.cli.main import run_program
from lantern_rt.compare.evaluate import evaluate_methods
from lantern_rt.compare.image_graph import EncoderFeatureModel, ImageFeatureModel, Preprocessing, PromptAgreementModel
from lantern_rt.compare.prompts import Prompts
from lantern_rt.compare.report import COLUMNS
from lantern_rt.compare.statistics import Floats, compute_frechet_distance, fit_gaussian
from lantern_rt.compare.turns import ComparedMethod, parse_methods
from lantern_rt.subjects.prompts import Text

PROMPTS = ("red cube", "green cube on sand", "red sphere on snow", "a green sphere")
AR_METHOD = ComparedMethod("ar", {"method": "ar"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_vq_encoder(make_tiny_bundle(tmp_path_factory.mktemp("evaluation") / "tiny"))


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Pipeline:
    return Pipeline.from_bundle(folder, threads=1)


@pytest.fixture
def run_eval(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs `lantern-rt eval` on four prompts and returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n\n")

    def run(*arguments: str, bundle: Path = folder, prompts: bool = True) -> tuple[int, str, str]:
        options = ["--threads", "1", *(["--prompts", "prompts.txt"] if prompts else [])]
        code = run_program(["eval", str(bundle), *options, *arguments])
        return code, *capsys.readouterr()

    return run


def read_report(folder: str = "eval-tiny") -> dict[str, Any]:
    report: dict[str, Any] = json.loads((Path(folder) / "eval.json").read_text())
    return report


def test_evaluated_images_depend_only_on_prompt_and_seed(pipeline: Pipeline) -> None:
    prompts = Prompts(Text, PROMPTS[:2])
    features = EncoderFeatureModel(pipeline.bundle, 1)
    _, images_by_method = evaluate_methods(pipeline, prompts, 6, [AR_METHOD], ignore_progress, features)
    assert list(images_by_method) == ["ar", "ar, other seeds"]
    expected = [pipeline(PROMPTS[n // 6 % 2], seed=n, method="ar").images[0].tobytes() for n in range(24)]
    assert [image.tobytes() for images in images_by_method.values() for image in images] == expected
    report, images_by_method = evaluate_methods(pipeline, prompts, 1, [AR_METHOD], ignore_progress)
    assert list(images_by_method) == ["ar"]
    assert "frechet" not in report["methods"][0]["figures"]


def test_figures_agree_with_the_pipelines_statistics(pipeline: Pipeline) -> None:
    methods = parse_methods(["lantern++:lambda=4"], {}, pipeline.bundle)
    report, _ = evaluate_methods(pipeline, Prompts(Text, PROMPTS[:2]), 2, methods, ignore_progress)
    figures = {name: figure["value"] for name, figure in report["methods"][1]["figures"].items()}
    seeds: dict[str, Any] = {"seed": [0, 2], "num_images": 2}
    relaxed = pipeline(PROMPTS[:2], **seeds, method="lantern++:lambda=4")
    ar_codes = pipeline(PROMPTS[:2], **seeds, method="ar").codes
    assert figures["tvd"] * 36 == pytest.approx(relaxed.stats.realised_tvd)
    assert figures["tvd"] > 0
    assert figures["tokens_per_forward_pass"] == pytest.approx(relaxed.stats.tokens_per_forward_pass)
    scores = pipeline.likelihoods(relaxed.codes, PROMPTS[:2], **seeds)
    assert figures["excess_nll"] == pytest.approx(np.mean([score.nats - score.entropy for score in scores]))
    is_same = [(codes == expected).tolist() for codes, expected in zip(relaxed.codes, ar_codes, strict=True)]
    assert figures["same_tokens"] == pytest.approx(np.mean(is_same))


def test_agreement_is_measured_for_every_image_and_prompt(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[bytes, str]] = []

    def record_images(_: PromptAgreementModel, images: Sequence[Image.Image], prompts: Sequence[str]) -> Floats:
        measured.extend((image.tobytes(), prompt) for image, prompt in zip(images, prompts, strict=True))
        return np.arange(len(images)) / 10.0

    graph = make_agreement_graph(tmp_path / "g.onnx")
    agreement_model = PromptAgreementModel(graph, Preprocessing(), pipeline.bundle, 1)
    monkeypatch.setattr(PromptAgreementModel, "__call__", record_images)
    methods = parse_methods(["rows", "sjd"], {}, pipeline.bundle)
    prompts = Prompts(Text, PROMPTS[:2])
    report, _ = evaluate_methods(pipeline, prompts, 2, methods, ignore_progress, agreement_model=agreement_model)
    expected = [
        (pipeline(prompt, seed=2 * i + k, method=method).images[0].tobytes(), prompt)
        for method in ("ar", "rows")  # sjd generates the images of ar
        for i, prompt in enumerate(PROMPTS[:2])
        for k in range(2)
    ]
    assert measured[1:] == expected  # the first call is a check of the graph
    assert [method["figures"]["agreement"]["value"] for method in report["methods"][:2]] == pytest.approx([0.15, 0.15])


def test_eval_writes_a_report_and_files_with_the_figures(run_eval: Any, pipeline: Pipeline, tmp_path: Path) -> None:
    graph = str(make_agreement_graph(tmp_path / "words.onnx"))
    exact = ["--method", "sjd:window=3", "--method", "eagle"]
    arguments = [*exact, "--method", "lantern++:lambda=4", "--count", "8", "--agreement", graph, "--output", "found"]
    code, out, err = run_eval(*arguments)
    assert code == 0
    assert out.splitlines()[-2:] == ["found/eval.json", "found/report.html"]
    assert re.search(r"  eagle +[\d.]+ +exact: same images", out)
    assert "good: an interval of excess NLL within +- 0.04 for balanced, 0.12 for fast\n" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "images of ar, other seeds" in err
    assert sorted(path.name for path in Path("found").iterdir()) == ["eval.csv", "eval.json", "report.html"]
    report = read_report("found")
    assert report["bundle_digest"] == pipeline.bundle.digest
    assert report["features"]["name"] == "VQ encoder features"
    assert report["features"]["num_features"] == 15
    assert (report["prompts"], report["seeds_per_prompt"], report["images_per_method"]) == (list(PROMPTS), 2, 8)
    ar, jacobi, eagle, relaxed = report["methods"]
    assert list(ar["figures"]) == list(COLUMNS)
    for method in (jacobi, eagle):
        assert (method["exact"], method["same_images"], method["figures"]) == (True, True, None)
        interval = method["tokens_per_forward_pass_interval"]
        assert 1.2 < interval["low"] < method["tokens_per_forward_pass"] < interval["high"]
    table = list(csv.DictReader(io.StringIO(Path("found/eval.csv").read_text("utf-8"))))
    assert [row["method"] for row in table] == [method["method"] for method in report["methods"]]
    assert float(table[1]["tokens_per_forward_pass_interval.low"]) == jacobi["tokens_per_forward_pass_interval"]["low"]
    assert float(table[3]["figures.tvd.difference_to_ar.high"]) == relaxed["figures"]["tvd"]["difference_to_ar"]["high"]
    assert table[1]["figures.tvd.value"] == ""
    assert ar["tokens_per_forward_pass"] == pytest.approx(1, abs=0.03)  # near-equal logits need extra passes
    assert report["agreement"]["tokenizer"] == "the tokenizer of tiny"
    ids = {"red": 3, "green": 4, "sphere": 5, "cube": 6, "on": 7, "sand": 8, "snow": 9, "a": 2}
    words = 10 * np.mean([sum(ids[word] for word in prompt.split()) for prompt in PROMPTS])
    for method in (ar, relaxed):  # brightness is 0 .. 1
        assert words < method["figures"]["agreement"]["value"] < words + 1
    figures = {name: figure["value"] for name, figure in relaxed["figures"].items()}
    assert ar["figures"]["tvd"]["value"] == 0 < figures["tvd"]
    assert 0 < figures["same_tokens"] < 1
    assert relaxed["settings"]["lambda"] == 4
    assert any("8 images for 15 features" in note for note in report["notes"])
    page = Path("found/report.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 8 * 3  # exact methods have the images of ar
    assert page.count("exact: same images") == 2
    assert not re.search(r"(src|href)=\"(?!data:|#)", page)
    assert run_eval(*arguments)[0] == 2  # the folder exists already


def test_eval_computes_features_and_writes_new_folders(run_eval: Any, tmp_path: Path) -> None:
    make_feature_graph(tmp_path / "colour.onnx")
    for folder in ("eval-tiny", "eval-tiny-2"):
        assert run_eval("--method", "ar", "--features", "colour.onnx", "--count", "2")[0] == 0
        assert read_report(folder)["features"]["name"] == "colour"
    assert read_report()["agreement"] is None
    assert len(read_report()["prompts"]) == 2


def test_eval_reports_the_distance_to_real_images(run_eval: Any, pipeline: Pipeline, tmp_path: Path) -> None:
    make_feature_graph(tmp_path / "colour.onnx")
    (tmp_path / "real").mkdir()
    generated_images = []
    real_images = []
    for i, prompt in enumerate(PROMPTS):
        generated_images += pipeline(prompt, seed=i, method="ar").images
        wide = generated_images[i].resize((48, 24), Image.Resampling.NEAREST)
        wide.save(tmp_path / f"real/{i}.png")
        (tmp_path / f"real/._{i}.png").write_bytes(b"\0\5\x16\7")  # macOS writes these files next to copied files
        real_images.append(ImageOps.fit(wide, (24, 24), Image.Resampling.BICUBIC))
    arguments = ["--features", "colour.onnx", "--method", "rows:window=2", "--reference", "real"]
    code, out, _ = run_eval(*arguments)
    assert (code, out.splitlines()[1].split()[-2:]) == (0, ["Frechet", "distance"])
    report = read_report()
    assert report["reference"] == "real, 4 images"
    features = ImageFeatureModel(tmp_path / "colour.onnx", Preprocessing(), 1)
    expected = compute_frechet_distance(fit_gaussian(features(generated_images)), fit_gaussian(features(real_images)))
    assert report["methods"][0]["figures"]["frechet"]["value"] == pytest.approx(expected)
    assert f"  {expected:.3f} +- " in out.splitlines()[2]
    assert max(map(len, out.splitlines())) <= 80
    # Four images of two methods, without a second set of seeds.
    assert Path("eval-tiny/report.html").read_text().count("data:image/jpeg;base64,") == 8


def test_without_a_vq_encoder_no_image_features_are_evaluated(run_eval: Any, tmp_path: Path) -> None:
    bundle = make_tiny_bundle(tmp_path / "classes", "class")
    assert run_eval("--count", "3", "--temperature", "0", bundle=bundle, prompts=False)[0] == 0
    report = read_report()
    assert report["prompts"] == ["class 0", "class 3", "class 6"]
    methods = ["ar", "sjd:window=7:lambda=1.5", "sjd:window=7:lambda=2"]
    assert [method["method"] for method in report["methods"]][:3] == methods
    figures = ["tokens_per_forward_pass", "tvd", "same_tokens", "excess_nll"]
    assert list(report["methods"][1]["figures"]) == figures
    assert any("no vq_encoder" in note for note in report["notes"])
    assert any("rows:window=2:drafts=1: TVD covers relaxed acceptance only" in note for note in report["notes"])


def test_an_interrupted_evaluation_leaves_no_output_folder(
    run_eval: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lantern_rt.cli.evaluate.format_html_report", interrupt)
    assert run_eval("--method", "ar", "--count", "2")[0] == 130
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "sjd", "--method", "sjd"], "found 'sjd' twice, expected each method once"),
        (["--method", "sgd"], "method: found 'sgd', expected ar, eagle"),
        (["--method", "sjd:windows=3"], "found 'windows=3' in 'sjd:windows=3', expected PARAMETER=VALUE, of neighbors"),
        (["--count", "1"], "prompts: found 1, expected at least 2 to compare"),
        (["--count", "0"], "count: found 0, expected"),
        (["--reference", "odd"], "reference odd: found 0 images, expected at least 2"),
        (["--reference", "pipes"], "pipes/a.png: a pipe or a device"),
        (["--reference", "damaged"], "a.png: cannot be read (cannot identify image file), expected an image"),
        (["--agreement", "colour.onnx"], "agreement colour.onnx: found inputs pixels"),
        (["--agreement", "short.onnx"], "agreement short.onnx: failed on pixels"),
        (["--features", "no.onnx"], "features no.onnx: cannot be loaded as an ONNX graph"),
        (["--features", "odd/colour.onnx"], "odd/preprocessor_config.json: field"),
        (["--prompts", "none.txt"], "none.txt: cannot be read"),
        (["--prompts", "long.txt"], "long.txt:5: found unknown word 'beneath'"),
        (["--output", "/dev/null/where"], "where: cannot be written (Not a directory)"),
        (["--write-presets", "--temperature", "0"], "temperature: presets need the bundle's sampling settings"),
    ],
)
def test_eval_rejects_invalid_input(run_eval: Any, tmp_path: Path, arguments: list[str], message: str) -> None:
    for folder in ("odd", "pipes", "damaged"):
        (tmp_path / folder).mkdir()
    for path in ("colour.onnx", "odd/colour.onnx"):
        make_feature_graph(tmp_path / path)
    (tmp_path / "odd/preprocessor_config.json").write_text("[]")
    make_agreement_graph(tmp_path / "short.onnx", length=3)
    for name in ("a.png", "b.png"):
        os.mkfifo(tmp_path / "pipes" / name)
        (tmp_path / "damaged" / name).write_bytes(b"no image")
    (tmp_path / "long.txt").write_text("\n".join([*PROMPTS, "red cube beneath sand"]))
    code, out, err = run_eval(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


def test_prompt_agreement_for_a_bundle_of_class_ids_is_rejected(run_eval: Any, tmp_path: Path) -> None:
    bundle = make_tiny_bundle(tmp_path / "classes", "class")
    code, _, err = run_eval("--agreement", str(make_agreement_graph(tmp_path / "g.onnx")), bundle=bundle, prompts=False)
    assert code == 2
    assert "agreement: bundle tiny takes class_ids" in err
