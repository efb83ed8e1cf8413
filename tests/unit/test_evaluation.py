"""Evaluating methods: drawing, features, and the command end to end."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_graphs import add_encoder, make_agreement, make_features, quiet
from PIL import Image
from tiny_bundle import make_tiny_bundle

from lantern_rt import Pipeline, RequestError
from lantern_rt.cli.main import run_program
from lantern_rt.compare.evaluate import Images, draw
from lantern_rt.compare.evaluate import evaluate as evaluate_methods
from lantern_rt.compare.image_graph import Agreement, Features, Preprocessing
from lantern_rt.compare.report import COLUMNS
from lantern_rt.compare.statistics import Floats
from lantern_rt.compare.turns import Contender, Subjects, parse_contenders

PROMPTS = ("red cube", "green cube on sand", "red sphere on snow", "a green sphere")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_encoder(make_tiny_bundle(tmp_path_factory.mktemp("evaluation") / "tiny"))


@pytest.fixture
def evaluate(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `lantern-rt eval` on four prompts in an empty folder; exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n\n")

    def run(*arguments: str, bundle: Path = folder, prompts: bool = True) -> tuple[int, str, str]:
        given = ["--prompts", "prompts.txt"] if prompts else []
        code = run_program(["eval", str(bundle), "--threads", "1", *given, *arguments])
        return code, *capsys.readouterr()

    return run


# ---------------------------------------------------------------- drawing


def test_images_depend_on_prompt_and_seed_alone_and_no_seed_comes_twice(folder: Path) -> None:
    pipeline = Pipeline.from_bundle(folder, threads=1)
    subjects, plain = Subjects("prompts", PROMPTS[:3]), Contender("ar", {"method": "ar"})
    drawn = [draw(pipeline, plain, Images(subjects, 3, 100, batch), quiet) for batch in (1, 2, 8)]
    images = [[image.tobytes() for run in one for image in run.images] for one in drawn]
    assert images[0] == images[1] == images[2]
    assert images[0] == [pipeline(PROMPTS[n // 3], seed=100 + n, method="ar").images[0].tobytes() for n in range(9)]


def test_the_reference_has_seeds_of_its_own(folder: Path) -> None:
    pipeline = Pipeline.from_bundle(folder, threads=1)
    images = Images(Subjects("prompts", PROMPTS[:2]), 2, 5, 3)
    found, drawn = evaluate_methods(pipeline, images, [Contender("ar", {"method": "ar"})], quiet)
    others = [pipeline(PROMPTS[n // 2], seed=9 + n, method="ar").images[0].tobytes() for n in range(4)]
    assert list(drawn) == ["ar", "ar, other seeds"]
    assert [image.tobytes() for image in drawn["ar, other seeds"]] == others
    assert "frechet" not in found["methods"][0]["figures"]


def test_figures_of_images_are_those_of_the_pipeline(folder: Path) -> None:
    pipeline = Pipeline.from_bundle(folder, threads=1)
    images = Images(Subjects("prompts", PROMPTS[:2]), 1, 0, 2)
    found, _ = evaluate_methods(pipeline, images, parse_contenders("lantern++", {}, pipeline.bundle), quiet)
    figures = {name: figure["value"] for name, figure in found["methods"][1]["figures"].items()}
    result = pipeline(PROMPTS[:2], seed=[0, 1], method="lantern++")
    assert figures["tvd"] * 36 == pytest.approx(result.stats.realised_tvd)
    assert figures["tvd"] > 0
    assert figures["tokens_per_forward_pass"] == pytest.approx(result.stats.tokens_per_forward_pass)
    scores = pipeline.likelihoods(result.codes, PROMPTS[:2], seed=[0, 1])
    assert figures["nll"] == pytest.approx(np.mean([score.nats for score in scores]))
    assert figures["excess_nll"] == pytest.approx(np.mean([score.nats - score.entropy for score in scores]))


def test_exact_methods_have_the_figures_of_plain_decoding_and_relaxed_ones_are_less_near(evaluate: Any) -> None:
    exact = ("eagle", "eagle:tree=chain-2", "sjd:window=3", "sjd:window=8")
    relaxed = ("lantern++:lambda=4", "sjd:omega=3")
    code, out, _ = evaluate("--methods", ",".join([*exact, *relaxed]), "--seeds", "2", "--json")
    assert code == 0
    figures = {one["method"]: one["figures"] for one in json.loads(out)["methods"]}
    values = {label: {name: one["value"] for name, one in own.items()} for label, own in figures.items()}
    for label in exact:
        differences = [one["difference_to_ar"] for one in figures[label].values()][1:]  # but for the passes
        assert differences == [{"value": 0, "low": 0, "high": 0}] * (len(COLUMNS) - 2)  # no prompt agreement
        assert (values[label]["same_tokens"], values[label]["same_start"]) == (1, 1)
        assert (values[label]["distance_to_exact"], values[label]["nll_ratio"]) == (0, 1)
    for label in relaxed:
        assert 0 < values[label]["same_start"] < values[label]["same_tokens"] < 1
        assert 0 < values[label]["distance_to_exact"] < 2


def test_nearness_is_counted_image_by_image_against_the_same_seed(folder: Path) -> None:
    pipeline = Pipeline.from_bundle(folder, threads=1)
    images = Images(Subjects("prompts", PROMPTS[:2]), 2, 7, 3)
    found, _ = evaluate_methods(pipeline, images, parse_contenders("lantern++:lambda=4", {}, pipeline.bundle), quiet)
    figures = {name: figure["value"] for name, figure in found["methods"][1]["figures"].items()}
    plain, relaxed = (
        pipeline(PROMPTS[:2], seed=[7, 9], num_images=2, method=method, **options).codes
        for method, options in (("ar", {}), ("lantern++", {"lambda_": 4}))
    )
    same = [(own == other).tolist() for own, other in zip(relaxed, plain, strict=True)]
    assert figures["same_tokens"] == pytest.approx(np.mean(same))
    assert figures["same_start"] == pytest.approx(np.mean([[*one, False].index(False) / len(one) for one in same]))
    others = pipeline(PROMPTS[:2], seed=[11, 13], num_images=2, method="ar").codes
    shared = f"{np.mean([own == other for own, other in zip(plain, others, strict=True)]):.0%}"
    assert any(f"other seeds share {shared} of the tokens" in note for note in found["notes"])


def test_at_temperature_0_there_is_no_other_seed_to_measure_distances_by(evaluate: Any) -> None:
    code, out, _ = evaluate("--methods", "sjd,lantern++:lambda=4", "--temperature", "0", "--json")
    assert code == 0
    report = json.loads(out)
    assert not any("distance_to_exact" in one["figures"] for one in report["methods"])
    assert [one["figures"]["same_tokens"]["value"] for one in report["methods"][:2]] == [1, 1]
    assert any("distances to its image of a seed have no measure" in note for note in report["notes"])


def test_a_target_that_is_certain_has_a_likelihood_ratio_of_1(evaluate: Any) -> None:
    code, out, _ = evaluate("--methods", "sjd", "--temperature", "0.001", "--count", "2", "--json")
    assert code == 0
    figures = json.loads(out)["methods"][1]["figures"]
    assert figures["nll"]["value"] < 1e-6
    assert [figures["nll_ratio"][key] for key in ("value", "low", "high")] == [1, 1, 1]


def test_prompt_agreement_is_asked_of_every_image_and_the_prompt_it_was_drawn_from(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[bytes, str]] = []

    def record(_: Agreement, images: Sequence[Image.Image], prompts: Sequence[str]) -> Floats:
        asked.extend((image.tobytes(), prompt) for image, prompt in zip(images, prompts, strict=True))
        return np.arange(len(images)) / 10.0

    pipeline = Pipeline.from_bundle(folder, threads=1)
    agreement = Agreement(make_agreement(tmp_path / "g.onnx"), Preprocessing(), pipeline.bundle, 1)
    monkeypatch.setattr(Agreement, "__call__", record)
    contenders = parse_contenders("sjd", {}, pipeline.bundle)
    images = Images(Subjects("prompts", PROMPTS[:2]), 2, 5, 8)
    found, _ = evaluate_methods(pipeline, images, contenders, quiet, agreement=agreement)
    drawn = [
        (pipeline(prompt, seed=5 + 2 * i + k, method=one.label).images[0].tobytes(), prompt)
        for one in contenders
        for i, prompt in enumerate(PROMPTS[:2])
        for k in range(2)
    ]
    assert asked[1:] == drawn  # the first is a trial
    assert [one["figures"]["agreement"]["value"] for one in found["methods"]] == pytest.approx([0.15, 0.15])


# ---------------------------------------------------------------- features


@pytest.mark.parametrize("batch", ["n", 1, 3])
def test_features_of_a_graph_do_not_depend_on_its_batch(tmp_path: Path, batch: int | str) -> None:
    images = [Image.new("RGB", (8, 8), (shade, 0, 255)) for shade in (0, 51, 102, 153)]
    extract = Features(make_features(tmp_path / "f.onnx", pictures=batch), Preprocessing(), 1)
    assert extract(images) == pytest.approx(np.array([[i / 5, 0, 1] for i in range(4)]), abs=1e-6)


def test_images_are_resized_and_normalised_and_maps_are_averaged(tmp_path: Path) -> None:
    path = make_features(tmp_path / "f.onnx", pooled=False, size=5)
    extract = Features(path, Preprocessing(None, (0.5, 0, 0), (0.5, 1, 2)), 1)
    assert extract([Image.new("RGB", (9, 7), (255, 51, 0))]) == pytest.approx(np.array([[1, 0.2, 0]]), abs=1e-6)


def test_a_file_that_is_no_image_model_is_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no graph")
    with pytest.raises(RequestError, match=r"bad\.onnx: no ONNX graph"):
        Features(tmp_path / "bad.onnx", Preprocessing(), 1)
    with pytest.raises(RequestError, match=r"found inputs codes .*, expected one float"):
        Features(folder / "vq_decoder.onnx", Preprocessing(), 1)
    with pytest.raises(RequestError, match=r"feature-size: found 4, but .* takes 5 x 5"):
        Features(make_features(tmp_path / "f.onnx", size=5), Preprocessing(4), 1)


# ---------------------------------------------------------------- the command


def test_eval_writes_a_page_that_needs_nothing_else_and_its_figures(
    evaluate: Any, folder: Path, tmp_path: Path
) -> None:
    graph = str(make_agreement(tmp_path / "words.onnx"))
    methods = ("--methods", "sjd,lantern++:lambda=4", "--seeds", "2")
    code, out, err = evaluate(*methods, "--agreement", graph, "--output", "found")
    assert code == 0
    assert out.splitlines()[-1] == "found/report.html"
    assert "tokens per forward pass" in out
    assert "ar, other seeds" in err
    assert sorted(path.name for path in (tmp_path / "found").iterdir()) == ["eval.json", "report.html"]
    found = json.loads((tmp_path / "found/eval.json").read_text())
    assert found["bundle_digest"] == Pipeline.from_bundle(folder, threads=1).bundle.digest
    assert found["features"]["name"] == "VQ encoder features"
    assert found["features"]["num_features"] == 15
    assert (found["prompts"], found["images_per_method"]) == (list(PROMPTS), 8)
    plain, jacobi, relaxed = found["methods"]
    assert [one["method"] for one in found["methods"]] == ["ar", "sjd", "lantern++:lambda=4"]
    assert list(plain["figures"]) == list(COLUMNS)
    assert found["agreement"]["tokenizer"] == "the tokenizer of tiny"
    ids = {"red": 3, "green": 4, "sphere": 5, "cube": 6, "on": 7, "sand": 8, "snow": 9, "a": 2}
    words = 10 * np.mean([sum(ids[word] for word in prompt.split()) for prompt in PROMPTS])
    for one in found["methods"]:  # brightness is 0 .. 1
        assert words < one["figures"]["agreement"]["value"] < words + 1
        difference = one["figures"]["agreement"]["value"] - plain["figures"]["agreement"]["value"]
        assert one["figures"]["agreement"]["difference_to_ar"]["value"] == pytest.approx(difference)
    assert plain["figures"]["tokens_per_forward_pass"]["value"] == pytest.approx(1, abs=0.03)  # ties cost passes
    assert plain["figures"]["tvd"]["value"] == jacobi["figures"]["tvd"]["value"] == 0
    assert relaxed["figures"]["tvd"]["value"] > 0
    assert relaxed["settings"]["lambda"] == 4
    assert any("8 images for 15 features" in note for note in found["notes"])
    page = (tmp_path / "found/report.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 8 * 4
    assert "<svg" in page
    assert not re.search(r"(src|href)=\"(?!data:|#)", page)


def test_json_is_one_object_and_features_may_be_a_graph(evaluate: Any, tmp_path: Path) -> None:
    make_features(tmp_path / "colour.onnx")
    code, out, _ = evaluate(
        "--methods", "ar", "--features", "colour.onnx", "--feature-mean", "0.5", "--bandwidth", "10", "--json"
    )
    assert code == 0
    report = json.loads(out)
    assert report["features"]["name"] == "colour"
    assert report["features"]["bandwidth"] == 10
    assert report["agreement"] is None
    assert report["output"] == "eval-tiny"


def test_a_bundle_without_an_encoder_is_compared_without_features(evaluate: Any, tmp_path: Path) -> None:
    bundle = make_tiny_bundle(tmp_path / "classes", "class")
    code, out, _ = evaluate("--methods", "sjd", "--count", "3", "--json", bundle=bundle, prompts=False)
    assert code == 0
    report = json.loads(out)
    assert report["prompts"] == ["class 0", "class 3", "class 6"]
    figures = ["tokens_per_forward_pass", "tvd", "same_tokens", "same_start", "excess_nll", "nll", "nll_ratio"]
    assert list(report["methods"][1]["figures"]) == figures
    assert any("no vq_encoder" in note for note in report["notes"])


def test_an_evaluation_is_replaced_by_force_only(evaluate: Any, tmp_path: Path) -> None:
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "eval.json").write_text("{}")
    code, _, err = evaluate("--methods", "ar", "--output", "found")
    assert (code, err) == (2, "lantern-rt: found: is there already; choose another name, or --force to replace it\n")
    assert evaluate("--methods", "ar", "--output", "found", "--force")[0] == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear")
    code, _, err = evaluate("--methods", "ar", "--output", "mine", "--force")
    assert code == 2
    assert "is no folder of an evaluation" in err


def test_ctrl_c_leaves_no_folder(evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lantern_rt.cli.evaluate.html_report", interrupt)
    assert evaluate("--methods", "ar", "--count", "2")[0] == 130
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "sjd,sjd"], "methods: found 'sjd' twice, expected different ones"),
        (["--methods", "sgd"], "method: found 'sgd', expected ar, eagle"),
        (["--methods", "sjd:windows=3"], "found 'windows=3' in 'sjd:windows=3', expected PARAMETER=VALUE, of tree"),
        (["--methods", "sjd:window=x"], "window: found 'x', expected integer"),
        (["--methods", "sjd:tree=chain-3"], "tree: method sjd does not take it; leave tree out"),
        (["--count", "1"], "prompts: found 1, expected at least 2 to compare"),
        (["--count", "9"], "count: found 9, expected a whole number 1 .. 4"),
        (["--seeds", "0"], "seeds: found 0, expected"),
        (["--images", "0"], "images: found 0, expected"),
        (["--feature-size", "9"], "feature-size: says how images are prepared for --features, which is not given"),
        (["--agreement-std", "2"], "agreement-std: says how images are prepared for --agreement, which is not given"),
        (["--agreement-tokenizer", "t.json"], "agreement-tokenizer: makes tokens for --agreement, which is not given"),
        (["--agreement", "colour.onnx"], "agreement colour.onnx: found inputs pixels"),
        (["--agreement", "short.onnx"], "prompt: found 4 words, expected at most 3"),
        (["--bandwidth", "0"], "bandwidth: found 0, expected"),
        (["--features", "no.onnx"], "features no.onnx: no ONNX graph that can be loaded"),
        (
            ["--features", "colour.onnx", "--feature-std", "0,1,1"],
            "feature-std: found '0,1,1', expected numbers above 0",
        ),
        (
            ["--features", "colour.onnx", "--feature-mean", "1,2"],
            "feature-mean: found '1,2', expected a number, or three",
        ),
        (["--prompts", "none.txt"], "none.txt: cannot be read"),
        (["--output", "/dev/null/where"], "where: cannot be written (Not a directory)"),
    ],
)
def test_what_cannot_be_done_is_one_line(evaluate: Any, tmp_path: Path, arguments: list[str], message: str) -> None:
    make_features(tmp_path / "colour.onnx")
    make_agreement(tmp_path / "short.onnx", length=3)
    code, out, err = evaluate(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


def test_a_prompt_that_cannot_be_drawn_is_found_before_any_is(evaluate: Any, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("\n".join([*PROMPTS, "red cube beneath sand"]))
    code, out, err = evaluate("--prompts", "long.txt")
    assert (code, out) == (2, "")
    assert "beneath" in err
    assert err.count("\n") == 1  # no line of progress


def test_prompts_that_a_bundle_cannot_draw_are_refused(evaluate: Any, tmp_path: Path) -> None:
    bundle = make_tiny_bundle(tmp_path / "embeddings", "embeddings")
    assert "takes text embeddings" in evaluate(bundle=bundle)[2]
    bundle = make_tiny_bundle(tmp_path / "classes", "class")
    assert "takes class ids; leave --prompts out" in evaluate(bundle=bundle)[2]
    bundle = make_tiny_bundle(tmp_path / "words")
    assert "has no prompts to draw; give --prompts FILE" in evaluate(bundle=bundle, prompts=False)[2]


def test_class_ids_agree_with_nothing_and_have_no_features(evaluate: Any, tmp_path: Path) -> None:
    bundle = make_tiny_bundle(tmp_path / "classes", "class")
    graph = str(make_agreement(tmp_path / "g.onnx"))
    _, _, err = evaluate("--agreement", graph, bundle=bundle, prompts=False)
    assert "bundle tiny takes class ids" in err
    assert err.endswith("leave --agreement out\n")
    _, _, err = evaluate("--bandwidth", "10", bundle=bundle, prompts=False)
    assert "bandwidth: bundle tiny has no features of its own; give --features" in err
