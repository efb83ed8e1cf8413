"""Requests that are refused, each with its reason; and defaults where nothing was said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_bundle import CAPTION, CODES, PREFIX, K, make_tiny_bundle

from lantern_rt import BundleError, Pipeline, RequestError, TreeError
from lantern_rt.bundle.files import open_bundle
from lantern_rt.methods import Eagle, Lantern, MethodConfig, Sjd
from lantern_rt.prompts import bundle_tokenizer
from lantern_rt.requests import check_request, resolve_settings

NAN, INF = float("nan"), float("inf")


class Checker:
    """Checks requests against a bundle without loading it."""

    def __init__(self, folder: Path) -> None:
        self.bundle = open_bundle(folder)
        self.tokenizer = bundle_tokenizer(self.bundle)

    def __call__(self, prompts: Any = None, **request: Any) -> None:
        check_request(self.bundle.manifest, self.tokenizer, prompts, **request)

    def method(self, **options: Any) -> Any:
        return resolve_settings(self.bundle.manifest, options).method


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Checker:
    return Checker(make_tiny_bundle(tmp_path_factory.mktemp("words") / "tiny"))


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Checker:
    return Checker(make_tiny_bundle(tmp_path_factory.mktemp("class") / "tiny", "class"))


@pytest.fixture(scope="module")
def embeds(tmp_path_factory: pytest.TempPathFactory) -> Checker:
    return Checker(make_tiny_bundle(tmp_path_factory.mktemp("embeds") / "tiny", "embeddings"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Checker:
    return Checker(make_tiny_bundle(tmp_path_factory.mktemp("plain") / "tiny", drafter=False))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"method": "lantern", "delta": 0.2, "lambda_": 2.0}, "lambda: method lantern does not take it"),
        (
            {"method": "lantern++", "delta": 0.2},
            r"delta: method lantern\+\+ .* use method lantern or sjd",
        ),
        ({"lambda_": 2.0}, r"lambda: method lantern \(the bundle's default\) .* use method lantern\+\+ or sjd"),
        ({"method": "ar", "delta": 0.2}, "delta: method ar does not take it; leave delta out"),
        ({"method": "ar", "neighbors": 3}, "neighbors: method ar does not take it"),
        ({"method": "eagle", "residual": "aggregated"}, "residual: method eagle does not take it"),
        ({"method": "ar", "tree": "mc-25"}, "tree: method ar .* use method eagle or lantern"),
        ({"method": "sjd", "tree": "chain-4"}, "tree: method sjd does not take it"),
        ({"method": "eagle", "window": 4}, "window: method eagle does not take it; .* use method sjd"),
        ({"method": "auto", "window": 4}, "window: method auto does not take it"),
        ({"method": "auto", "quality": "superb"}, "quality: found 'superb', expected strict, balanced, fast"),
        ({"method": "eagle", "quality": "fast"}, "quality: method eagle .* use method auto"),
        ({"method": "magic"}, r"method: found 'magic', expected ar, eagle, lantern, lantern\+\+, sjd, rows or auto"),
        ({"method": ["ar"]}, "method: found .*, expected ar, eagle"),
        ({"method": "eagle:three=chain-4"}, "found 'three=chain-4' .* expected PARAMETER=VALUE, of tree"),
        ({"method": "sjd", "neighbors": 3}, "neighbors: method sjd .* unless bounded; give delta or lambda"),
        ({"method": "sjd", "residual": "aggregated"}, "residual: method sjd aggregates nothing"),
        ({"method": "sjd", "delta": 0.1, "lambda_": 2}, "two bounds"),
        *(({"method": "sjd", "window": value}, "window: found") for value in (0, 129, 2.0, True, "4")),
        ({"residual": "all"}, "residual: found 'all', expected 'aggregated' or 'neighborhood'"),
        *(({"delta": value}, f"delta: found {value}, expected (greater|less) than") for value in (0, 1, -0.1, 1.5)),
        *(({"delta": value}, "delta: found .* expected .*number") for value in (NAN, INF, "0.2", True)),
        *(({"method": "lantern++", "lambda_": value}, "lambda: found .* greater than 1") for value in (1, 0.5, -2)),
        ({"method": "lantern++", "lambda_": INF}, "lambda: found inf, expected a finite number"),
        *(({"neighbors": value}, f"neighbors: found .*, expected .* 1 .. {K}") for value in (0, -1, K + 1, 2.0, NAN)),
        *(({"temperature": value}, "temperature: found") for value in (-1, NAN, INF, 1e-9, 1e9, "1")),
        *(({"top_p": value}, "top_p: found") for value in (0, -0.5, 1.01, NAN)),
        *(({"top_k": value}, "top_k: found") for value in (-1, 2.5, NAN, True)),
        *(({"cfg_scale": value}, "cfg_scale: found") for value in (-1, NAN, INF)),
    ],
)
def test_a_parameter_that_makes_no_sense_is_refused_with_the_reason(
    words: Checker, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        words("red cube", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompts", "reason"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        ([], "empty list"),
        (["red cube", ""], "empty"),
        ("red " * 2500, "10,000 characters"),
        ("red green red green red", "5 words, expected at most 4"),
        ("a purple sphere", "'purple'"),
        ("!?", "no word"),
        ([3], "found 3, expected text"),
        (3, "found 3, expected text or a list"),
        (None, "expected a prompt"),
    ],
)
def test_a_prompt_that_cannot_be_drawn_is_refused(words: Checker, prompts: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        words(prompts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"num_images": 0}, "num_images: found 0"),
        ({"num_images": -3}, "num_images: found -3"),
        ({"num_images": 1.5}, "num_images: found 1.5"),
        ({"num_images": 5000}, "num_images: found 5000"),
        ({"prompts": ["red"] * 3, "num_images": 1000}, "3 x 1000 images"),
        ({"seed": -1}, "seed: found -1"),
        ({"seed": 2**63}, "seed: found"),
        ({"seed": 2**63 - 1, "num_images": 2}, "seed: found"),
        ({"seed": 1.0}, "seed: found 1.0"),
        ({"seed": "1"}, "seed: found '1'"),
        ({"seed": [1, 2]}, "found 2 seeds for 1 prompts"),
        ({"class_ids": 3, "prompts": None}, "found class ids, expected a prompt"),
        ({"class_ids": 3}, "found class ids, expected a prompt"),
        ({"embeddings": np.zeros((2, 3)), "prompts": None}, "found text embeddings .*, expected a prompt"),
    ],
)
def test_counts_seeds_and_kinds_are_checked(words: Checker, arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        words(**({"prompts": "red cube"} | arguments))


@pytest.mark.parametrize(
    ("class_ids", "reason"),
    [
        (10, r"class id: found 10, expected a whole number 0 \.\. 9"),
        (-1, "class id: found -1"),
        ([1, 400], "class id 2 of 2: found 400"),
        ([], "empty list"),
        (1.5, "found 1.5"),
        ("3", "found '3'"),
        (True, "found True"),
        (None, "expected class ids"),
    ],
)
def test_a_class_out_of_range_is_refused(classes: Checker, class_ids: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        classes(class_ids=class_ids)


def test_a_prompt_for_a_class_bundle_is_refused(classes: Checker) -> None:
    with pytest.raises(RequestError, match="found a prompt, expected class ids"):
        classes("red cube")


@pytest.mark.parametrize(
    ("embeddings", "reason"),
    [
        (np.zeros((2, CAPTION + 1)), "expected"),
        (np.zeros((PREFIX + 1, CAPTION)), "expected"),
        (np.zeros((0, PREFIX, CAPTION)), "expected"),
        (np.zeros(CAPTION), "expected"),
        ((np.zeros((2, CAPTION)), [1, 1, 1]), "with mask"),
        ((np.zeros((2, CAPTION)), [0, 1]), "gaps"),
        ((np.zeros((2, CAPTION)), [0, 0]), "gaps"),
        (np.full((2, CAPTION), np.nan), "NaN"),
        ("red cube", "array of numbers"),
        ([[1.0], [1.0, 2.0]], "array of numbers"),
    ],
)
def test_embeddings_that_do_not_fit_are_refused(embeds: Checker, embeddings: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        embeds(embeddings=embeddings)


def test_methods_that_a_bundle_cannot_run_are_refused(plain: Checker) -> None:
    for method in ("eagle", "lantern", "lantern++"):
        with pytest.raises(RequestError, match="has no drafter; use method ar"):
            plain("red cube", method=method)
    assert plain.method().method == "ar"
    with pytest.raises(RequestError, match="has no neighbour table"):
        plain("red cube", method="sjd", lambda_=2.0)


def test_sjd_is_exact_unless_relaxation_is_asked_for(words: Checker) -> None:
    exact = words.method(method="sjd")
    assert (exact, exact.exact) == (Sjd(window=8), True)
    bounded = words.method(method="sjd", lambda_=3)
    assert bounded == Sjd(window=8, neighbors=4, lambda_=3.0, residual="aggregated")
    assert words.method(method="sjd", delta=0.1, neighbors=2).neighbors == 2


def test_a_bundle_may_say_how_a_method_drafts(words: Checker) -> None:
    assert resolve_settings(with_methods(words, Sjd(window=3)), {"method": "sjd"}).method == Sjd(window=3)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "ar"},
        {"method": "eagle", "tree": "chain-2"},
        {"method": "lantern", "delta": 0.3},
        {"method": "lantern++", "residual": "neighborhood", "lambda_": 1.5},
        {"method": "sjd", "window": 3, "lambda_": 2.0},
    ],
)
def test_a_method_is_the_same_by_name_by_string_as_an_object_and_through_json(
    words: Checker, options: dict[str, Any]
) -> None:
    method = words.method(**options)
    assert words.method(method=str(method)) == words.method(method=method) == method
    assert type(method).model_validate_json(method.model_dump_json()) == method


def with_methods(words: Checker, *methods: MethodConfig) -> Any:
    """The manifest with other defaults of methods."""
    manifest = words.bundle.manifest
    return manifest.model_copy(update={"decoding": manifest.decoding.model_copy(update={"methods": methods})})


@pytest.mark.parametrize(
    ("paths", "reason"),
    [
        ([[0, 0]], "expected its parent"),
        ([[1]], "expected its sibling 0"),
        ([], "no paths"),
        ({"a": 1}, "expected a list of paths"),
    ],
)
def test_a_malformed_tree_file_is_refused(words: Checker, tmp_path: Path, paths: Any, reason: str) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(paths))
    with pytest.raises(TreeError, match=reason):
        words("red cube", tree=str(file))


@pytest.mark.parametrize("tree", ["oak", "missing.json", "chain-0", "dynamic-1", 7])
def test_a_tree_that_is_not_there_is_refused(words: Checker, tree: Any) -> None:
    with pytest.raises(TreeError):
        words("red cube", tree=tree)


def test_a_node_with_more_children_than_codes_is_refused(words: Checker, tmp_path: Path) -> None:
    file = tmp_path / "wide.json"
    file.write_text(json.dumps([[i] for i in range(CODES + 1)]))
    with pytest.raises(TreeError, match=f"{CODES + 1} children"):
        words("red cube", tree=str(file))


def test_a_user_tree_is_used_and_named_by_its_shape(words: Checker, tmp_path: Path) -> None:
    file = tmp_path / "fork.json"
    file.write_text(json.dumps([[0], [1], [0, 0]]))
    assert words.method(method="eagle", tree=str(file)) == Eagle(tree="tree-2-10")
    pipe = Pipeline.from_bundle(words.bundle, threads=1)
    trees = [part.tree for step in pipe.stream("red", method="eagle", tree=str(file)) for part in step.step.parts]
    assert all(tree is None or tree.parents.tolist() == [-1, 0, 0, 1] for tree in trees)


def test_an_unknown_keyword_is_a_type_error(words: Checker) -> None:
    with pytest.raises(TypeError, match="'lamda'"):
        words("red cube", lamda=2)


def test_what_is_left_out_comes_from_the_bundle(words: Checker) -> None:
    manifest = words.bundle.manifest
    told = {"method": "lantern", "tree": "dynamic-6-3-2", "neighbors": 4, "delta": 0.2}
    sampling = {"cfg_scale": 2, "temperature": 1, "top_k": 24, "top_p": 1}
    assert resolve_settings(manifest, {}) == resolve_settings(manifest, told | sampling)


def test_a_bundle_that_says_nothing_about_a_method_gets_small_trees_and_a_fitting_k(words: Checker) -> None:
    silent = with_methods(words)
    assert resolve_settings(silent, {"method": "eagle"}).method == Eagle(tree="chain-3")
    relaxed: Any = resolve_settings(silent, {"method": "lantern"}).method
    assert (relaxed.neighbors, relaxed.delta) == (K, 0.2)


def test_a_bundle_cannot_point_to_a_tree_file(words: Checker) -> None:
    with pytest.raises(BundleError, match="default tree"):
        resolve_settings(with_methods(words, Lantern(tree="/etc/tree.json")), {})
