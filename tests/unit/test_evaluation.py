"""Evaluating methods: distances against closed forms, intervals that cover, features, and the command end to end."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from bundle_folder import write_manifest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from tiny_bundle import CELL, make_tiny_bundle

from lantern_rt import EngineError, Pipeline, RequestError
from lantern_rt.cli import run_program
from lantern_rt.evaluation.drawing import Subjects, draw, parse_ways
from lantern_rt.evaluation.evaluate import feature_figures
from lantern_rt.evaluation.features import GraphFeatures, Preprocessing
from lantern_rt.evaluation.report import COLUMNS
from lantern_rt.evaluation.statistics import (
    estimate,
    frechet_distance,
    mean_distance,
    on_manifold,
    pairwise_distances,
    require_scipy,
)

SIDE = 6 * CELL
PROMPTS = ("red cube", "green cube on sand", "red sphere on snow", "a green sphere")


def quiet(what: str, done: int, total: int) -> None:
    pass


def make_features(path: Path, pooled: bool = True, size: int | str = "side", pictures: int | str = "n") -> Path:
    """A graph whose features are the mean colour, or the picture itself."""
    shape = (pictures, 3, size, size)
    nodes = [helper.make_node("Identity", ["pixels"], ["features"])]
    constants = []
    if pooled:
        nodes = [helper.make_node("ReduceMean", ["pixels", "axes"], ["features"], keepdims=0)]
        constants = [numpy_helper.from_array(np.array([2, 3]), "axes")]
    axes = (pictures, 3) if pooled else shape
    graph = helper.make_graph(
        nodes,
        "features",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, axes)],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
    return path


def add_encoder(folder: Path) -> Path:
    """Give a tiny bundle a `vq_encoder`: cells are averaged to vectors of three."""
    grid = SIDE // CELL
    graph = helper.make_graph(
        [helper.make_node("AveragePool", ["images"], ["pre_quant"], kernel_shape=[CELL, CELL], strides=[CELL, CELL])],
        "vq_encoder",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ("n", 3, SIDE, SIDE))],
        [helper.make_tensor_value_info("pre_quant", TensorProto.FLOAT, ("n", 3, grid, grid))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    (folder / "vq_encoder.onnx").write_bytes(model.SerializeToString())
    manifest = json.loads((folder / "bundle.json").read_text())
    manifest["files"]["vq_encoder"] = {"path": "vq_encoder.onnx", "sha256": "0" * 64, "bytes": 0}
    write_manifest(folder, manifest)
    return folder


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


# ---------------------------------------------------------------- distances


def test_the_frechet_distance_of_a_set_to_itself_is_zero() -> None:
    features = np.random.default_rng(0).normal(size=(50, 7))
    assert frechet_distance(features, features) == pytest.approx(0, abs=1e-12)


def test_a_shift_alone_is_a_frechet_distance_of_its_square() -> None:
    features = np.random.default_rng(0).normal(size=(50, 3))
    assert frechet_distance(features, features + np.array([3.0, 0.0, 4.0])) == pytest.approx(25)


def test_the_frechet_distance_of_two_gaussians_is_the_closed_form() -> None:
    """For commuting covariances: |m1 - m2|^2 + sum of (s1 - s2)^2 over the axes."""
    rng = np.random.default_rng(1)
    turn = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    first, second = np.array([1.0, 2.0, 0.5, 3.0]), np.array([2.0, 2.0, 1.0, 0.0])
    own = (rng.normal(size=(200_000, 4)) * first) @ turn
    other = (rng.normal(size=(200_000, 4)) * second + 1) @ turn
    assert frechet_distance(own, other) == pytest.approx(4 + np.square(first - second).sum(), rel=0.01)


@pytest.mark.parametrize("width", [5, 40])
def test_the_frechet_distance_agrees_with_the_matrix_square_root(width: int) -> None:
    from scipy.linalg import sqrtm

    rng = np.random.default_rng(2)
    own, other = rng.normal(size=(60, width)), rng.normal(1, 2, size=(70, width)) @ rng.normal(size=(width, width))
    first, second = np.cov(own.T), np.cov(other.T)
    shift = own.mean(0) - other.mean(0)
    expected = shift @ shift + np.trace(first + second - 2 * np.real(sqrtm(first @ second)))
    assert frechet_distance(own, other) == pytest.approx(expected, rel=1e-6)


def test_fewer_pictures_than_features_have_a_frechet_distance_too() -> None:
    rng = np.random.default_rng(3)
    own = rng.normal(size=(6, 30))
    assert frechet_distance(own, own) == pytest.approx(0, abs=1e-12)
    assert frechet_distance(own, rng.normal(size=(8, 30))) > 1


def test_points_are_on_the_manifold_within_the_reach_of_its_points() -> None:
    line = np.arange(10.0)[:, None]  # the third neighbour is at most 3 away
    assert on_manifold(np.array([[4.5], [-2.9], [12.1]]), line).tolist() == [True, True, False]
    assert on_manifold(line, line).all()


def test_a_collapsed_set_has_precision_and_no_recall() -> None:
    rng = np.random.default_rng(4)
    reference, own = rng.normal(size=(200, 2)), rng.normal(scale=0.01, size=(200, 2))
    assert on_manifold(own, reference).mean() > 0.95
    assert on_manifold(reference, own).mean() < 0.1


def test_a_row_chosen_twice_is_no_pair_with_itself() -> None:
    features = np.array([[0.0], [1.0], [3.0]])
    distances = pairwise_distances(features)
    assert mean_distance(distances, np.array([0, 1, 2])) == pytest.approx(2)
    assert mean_distance(distances, np.array([0, 0, 2])) == pytest.approx(3)
    assert mean_distance(distances, np.array([1, 1])) == 0


# ---------------------------------------------------------------- intervals


def test_intervals_of_a_mean_cover_it_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(80):
        values = rng.normal(1, 1, size=(1, 60))
        (found,) = estimate(lambda chosen, values=values: values[:, chosen].mean(1), 60, 200).values
        covered += found.low <= 1 <= found.high
    assert 0.86 * 80 <= covered < 80


def test_differences_are_paired() -> None:
    rng = np.random.default_rng(6)
    prompts = 10 * rng.normal(size=80)
    table = np.stack([prompts, prompts + 1 + 0.1 * rng.normal(size=80)])
    figure = estimate(lambda chosen: table[:, chosen].mean(1), 80)
    assert figure.differences[0].value == figure.differences[0].high == 0
    assert 0.9 < figure.differences[1].low < 1 < figure.differences[1].high < 1.1
    assert figure.values[1].high - figure.values[1].low > 2


def test_a_figure_that_never_varies_has_an_interval_of_no_width() -> None:
    (found,) = estimate(lambda chosen: [1.0], 5).values
    assert (found.value, found.low, found.high) == (1, 1, 1)


def test_the_same_distribution_is_within_the_floor_and_another_is_not() -> None:
    rng = np.random.default_rng(7)
    sets = [rng.normal(size=(120, 4)), rng.normal(size=(120, 4)), rng.normal(0.8, 1, size=(120, 4))]
    figures = feature_figures(sets, rng.normal(size=(120, 4)), 2, quiet)
    frechet = figures["frechet"]
    assert not frechet.above_first(1)
    assert frechet.above_first(2)
    assert frechet.differences[1].low < 0 < frechet.differences[1].high
    assert frechet.differences[2].low > 1
    assert all(one.low <= one.value <= one.high for figure in figures.values() for one in figure.values)


# ---------------------------------------------------------------- ways


def test_parameters_of_a_way_reach_its_options_and_ar_comes_first(folder: Path) -> None:
    manifest = Pipeline.from_bundle(folder, threads=1).bundle.manifest
    ways = parse_ways("lantern++:lambda=3:drafter-cfg-scale=1, sjd", {"temperature": 0.5}, manifest)
    assert [way.label for way in ways] == ["ar", "lantern++:lambda=3:drafter-cfg-scale=1", "sjd"]
    assert ways[1].options == {"method": "lantern++", "lambda_": 3.0, "drafter_cfg_scale": 1, "temperature": 0.5}
    assert parse_ways("sjd,ar", {}, manifest) == parse_ways("ar,sjd", {}, manifest)


def test_pictures_depend_on_prompt_and_seed_alone_and_no_seed_comes_twice(folder: Path) -> None:
    pipeline = Pipeline.from_bundle(folder, threads=1)
    (way,) = parse_ways("ar", {}, pipeline.bundle.manifest)
    subjects = Subjects(PROMPTS[:3], None, 3, 100)
    drawn = [draw(pipeline, way, subjects, images, quiet) for images in (1, 2, 8)]
    other = draw(pipeline, way, subjects, 4, quiet, other_seeds=True)
    assert [picture.seed for picture in drawn[0].pictures] == list(range(100, 109))
    assert [picture.seed for picture in other.pictures] == list(range(109, 118))
    for one in drawn[1:]:
        assert [p.image.tobytes() for p in one.pictures] == [p.image.tobytes() for p in drawn[0].pictures]
        assert [p.seed for p in one.pictures] == [p.seed for p in drawn[0].pictures]
    alone = pipeline(PROMPTS[2], seed=107, method="ar")
    assert drawn[0].pictures[7].image.tobytes() == alone.images[0].tobytes()


def test_figures_of_a_picture_are_those_of_the_pipeline(folder: Path) -> None:
    pipeline = Pipeline.from_bundle(folder, threads=1)
    way = parse_ways("lantern++", {}, pipeline.bundle.manifest)[1]
    drawn = draw(pipeline, way, Subjects(PROMPTS[:2], None, 1, 0), 2, quiet)
    result = pipeline(PROMPTS[:2], seed=[0, 1], method="lantern++")
    tvd, speed = ([getattr(picture, name) for picture in drawn.pictures] for name in ("tvd", "codes_per_pass"))
    assert np.mean(tvd) * 36 == pytest.approx(result.stats.realised_tvd)
    assert np.mean(speed) == pytest.approx(result.stats.tokens_per_target_pass)
    scores = pipeline.negative_log_likelihoods(result.codes, PROMPTS[:2], seed=[0, 1], method="lantern++")
    found = [picture.likelihood.nats for picture in drawn.pictures if picture.likelihood is not None]
    assert found == pytest.approx(scores)


# ---------------------------------------------------------------- features


@pytest.mark.parametrize("pictures", ["n", 1, 3])
def test_features_of_a_graph_do_not_depend_on_its_batch(tmp_path: Path, pictures: int | str) -> None:
    images = [Image.new("RGB", (8, 8), (shade, 0, 255)) for shade in (0, 51, 102, 153)]
    extract = GraphFeatures(make_features(tmp_path / "f.onnx", pictures=pictures), Preprocessing(), "colour", 1)
    assert extract(images) == pytest.approx(np.array([[i / 5, 0, 1] for i in range(4)]), abs=1e-6)


def test_pictures_are_resized_and_normalised_and_maps_are_averaged(tmp_path: Path) -> None:
    path = make_features(tmp_path / "f.onnx", pooled=False, size=5)
    extract = GraphFeatures(path, Preprocessing(None, (0.5, 0, 0), (0.5, 1, 2)), "picture", 1)
    assert extract([Image.new("RGB", (9, 7), (255, 51, 0))]) == pytest.approx(np.array([[1, 0.2, 0]]), abs=1e-6)


def test_a_file_that_is_no_image_model_is_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no graph")
    with pytest.raises(RequestError, match=r"bad\.onnx: no ONNX graph"):
        GraphFeatures(tmp_path / "bad.onnx", Preprocessing(), "bad", 1)
    with pytest.raises(RequestError, match=r"found inputs codes .*, expected one float"):
        GraphFeatures(folder / "vq_decoder.onnx", Preprocessing(), "bad", 1)
    with pytest.raises(RequestError, match=r"feature-size: found 4, but .* takes 5 x 5"):
        GraphFeatures(make_features(tmp_path / "f.onnx", size=5), Preprocessing(4), "f", 1)


# ---------------------------------------------------------------- the command


def test_eval_writes_a_page_that_needs_nothing_else_and_its_figures(
    evaluate: Any, folder: Path, tmp_path: Path
) -> None:
    code, out, err = evaluate("--methods", "sjd,lantern++:lambda=4", "--seeds", "2", "--output", "found")
    assert code == 0
    assert out.splitlines()[-1] == "found/report.html"
    assert "codes a target pass" in out
    assert "ar, other seeds" in err
    assert sorted(path.name for path in (tmp_path / "found").iterdir()) == ["eval.json", "report.html"]
    found = json.loads((tmp_path / "found/eval.json").read_text())
    assert found["bundle_digest"] == Pipeline.from_bundle(folder, threads=1).bundle.digest
    assert found["features"]["name"] == "VQ encoder features"
    assert found["features"]["width"] == 15
    assert (found["prompts"], found["pictures_per_method"]) == (list(PROMPTS), 8)
    plain, jacobi, relaxed = found["methods"]
    assert [one["method"] for one in found["methods"]] == ["ar", "sjd", "lantern++:lambda=4"]
    assert list(plain["figures"]) == list(COLUMNS)
    assert plain["figures"]["codes_per_pass"]["value"] == 1
    assert plain["figures"]["tvd"]["value"] == jacobi["figures"]["tvd"]["value"] == 0
    assert relaxed["figures"]["tvd"]["value"] > 0
    assert relaxed["settings"]["lambda"] == 4
    assert any("8 pictures for 15 features" in note for note in found["notes"])
    page = (tmp_path / "found/report.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 8 * 4
    assert "<svg" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)


def test_json_is_one_object_and_features_may_be_a_graph(evaluate: Any, tmp_path: Path) -> None:
    make_features(tmp_path / "colour.onnx")
    code, out, _ = evaluate("--methods", "ar", "--features", "colour.onnx", "--feature-mean", "0.5", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["features"]["name"] == "colour"
    assert report["output"] == "eval-tiny"


def test_a_bundle_without_an_encoder_is_compared_without_features(evaluate: Any, tmp_path: Path) -> None:
    bundle = make_tiny_bundle(tmp_path / "classes", "class")
    code, out, _ = evaluate("--methods", "sjd", "--count", "3", "--json", bundle=bundle, prompts=False)
    assert code == 0
    report = json.loads(out)
    assert report["prompts"] == ["class 0", "class 3", "class 6"]
    assert list(report["methods"][1]["figures"]) == ["codes_per_pass", "tvd", "surprise", "nll", "nll_ratio"]
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

    monkeypatch.setattr("lantern_rt.cli_eval.html_report", interrupt)
    assert evaluate("--methods", "ar", "--count", "2")[0] == 130
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "sjd,sjd"], "methods: found 'sjd' twice, expected different ones"),
        (["--methods", "sgd"], "method: found 'sgd', expected auto"),
        (["--methods", "sjd:windows=3"], "methods: found 'windows=3' in 'sjd:windows=3', expected NAME=VALUE, of tree"),
        (["--methods", "sjd:window=x"], "methods: found 'window=x' in 'sjd:window=x', expected a whole number"),
        (["--methods", "sjd:tree=chain-3"], "tree: method sjd drafts no tree"),
        (["--count", "1"], "prompts: found 1, expected at least 2 to compare"),
        (["--count", "9"], "count: found 9, expected a whole number 1 .. 4"),
        (["--seeds", "0"], "seeds: found 0, expected"),
        (["--images", "0"], "images: found 0, expected"),
        (["--feature-size", "9"], "feature-size: says how pictures are prepared for --features, which is not given"),
        (["--features", "no.onnx"], "features no.onnx: no ONNX graph that can be loaded"),
        (
            ["--features", "colour.onnx", "--feature-std", "0,1,1"],
            "feature-std: found '0,1,1', expected numbers above 0",
        ),
        (
            ["--features", "colour.onnx", "--feature-mean", "1,2"],
            "feature-mean: found '1,2', expected a number, or three",
        ),
        (["--prompts", "none.txt"], "prompts none.txt: cannot be read"),
        (["--output", "no/where"], "where: the folder"),
    ],
)
def test_what_cannot_be_done_is_one_line(evaluate: Any, tmp_path: Path, arguments: list[str], message: str) -> None:
    make_features(tmp_path / "colour.onnx")
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


def test_without_scipy_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"pip install 'lantern-rt\[eval\]'"):
        require_scipy()
