"""Requests that are rejected, each with its reason; and defaults of options."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from refusals import error_of
from tiny_bundle import CAPTION, PREFIX, K, make_tiny_bundle

from lantern_rt import Pipeline, RequestError, TreeError
from lantern_rt.bundle.files import open_bundle
from lantern_rt.methods import METHODS, Eagle, MethodConfig, SpeculativeJacobi
from lantern_rt.prompts import load_bundle_tokenizer
from lantern_rt.requests import Request, check_request, resolve_settings
from lantern_rt.runtime.drafters import count_draft_nodes

NAN = float("nan")
INF = float("inf")


class Checker:
    """Checks requests against a bundle without loading it."""

    def __init__(self, folder: Path) -> None:
        self.bundle = open_bundle(folder)
        self.tokenizer = load_bundle_tokenizer(self.bundle)

    def __call__(self, prompts: Any = None, **request: Any) -> Request:
        return check_request(self.bundle.manifest, self.tokenizer, prompts, **request)

    def method(self, **options: Any) -> Any:
        return resolve_settings(self.bundle.manifest, options).method


@pytest.fixture(scope="session")
def words(words_bundle: Path) -> Checker:
    return Checker(words_bundle)


@pytest.fixture(scope="session")
def classes(class_bundle: Path) -> Checker:
    return Checker(class_bundle)


@pytest.fixture(scope="session")
def embeds(embeddings_bundle: Path) -> Checker:
    return Checker(embeddings_bundle)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Checker:
    return Checker(make_tiny_bundle(tmp_path_factory.mktemp("plain") / "tiny", drafter=False))


def option_cases(name: str, *values: Any, **others: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return, for each wrong value of an option, the name that the error has, and the request."""
    return [(name.rstrip("_"), {name: value, **others}) for value in values]


def method_cases(text: str, *values: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return, for each wrong value of the last parameter of a method string, its name, and the request."""
    return [(text.rpartition(":")[2], {"method": f"{text}={value}"}) for value in values]


OPTIONS = [
    *method_cases("lantern++:lambda", 1, 0.5, -2, INF),
    *method_cases("lantern:delta=0.2:lambda", 2.0),
    *method_cases("lantern:delta", 0, 1, -0.1, 1.5, NAN, INF, "much", True),
    *method_cases("lantern++:delta", 0.2),
    *method_cases("ar:delta", 0.2),
    *method_cases("lantern:neighbors", 0, -1, K + 1, 2.5, NAN),
    *method_cases("ar:neighbors", 3),
    *method_cases("sjd:neighbors", 3),  # without a bound
    *method_cases("eagle:drafter", "any"),
    *method_cases("lantern:residual", "all"),
    *method_cases("eagle:residual", "aggregated"),
    *method_cases("sjd:residual", "aggregated"),
    *method_cases("ar:tree", "mc-25"),
    *method_cases("eagle:tree", 7),
    *method_cases("sjd:tree", "chain-4"),
    *method_cases("eagle:window", 4),
    *method_cases("sjd:window", 0, 129, 2.5, True, "four"),
    *option_cases("tree", "chain-3"),  # without a method
    *option_cases("drafter", "heads"),
    *option_cases("neighbors", 5),
    *option_cases("lambda", 2.0),
    *option_cases("window", 4, method="sjd"),
    *option_cases("quality", "superb", "fast", "", ["strict"]),
    *option_cases("quality", "strict", method="eagle"),
    *option_cases("method", "magic", "auto", "auto:quality=strict", ["ar"]),
    *option_cases("temperature", -1, NAN, INF, 1e-9, 1e9, "1"),
    *option_cases("top_p", 0, -0.5, 1.01, NAN),
    *option_cases("top_k", -1, 2.5, NAN, True),
    *option_cases("cfg_scale", -1, 1001, NAN, INF),
    *option_cases("repetition_penalty", 1e-300, 0.009, 101, NAN, INF),
    *option_cases("cfg_tokens", -1, 37, "37", 10**5000, "9" * 5000, 2.5, NAN, True, [3]),
    *option_cases("cfg_tokens", "half", "-1%", "101%", "5e1%", "%", "", f"0.{'9' * 30}%"),
    *option_cases("cfg_tokens", 3, "0%", cfg_scale=1),
    *option_cases("cfg_schedule", "cosine", 2),
    *option_cases("cfg_schedule", "linear", cfg_scale=1),
    *option_cases("num_images", 0, -3, 1.5, 5000),
    *option_cases("num_images", 1000, prompts=["red"] * 3),
    *option_cases("seed", -1, 2**64, 10**5000, 1.0, "1", [1, 2]),
    *option_cases("seed", 2**64 - 1, num_images=2),
    ("method", {"method": "eagle:three=chain-4"}),
    ("prompts", {"class_ids": 3}),
    ("prompts", {"class_ids": 3, "prompts": None}),
    ("prompts", {"embeddings": np.zeros((2, 3)), "prompts": None}),
    ("prompts", {"prompts": None}),
    ("prompts", {"prompts": []}),
    *(
        ("prompt", {"prompts": value})
        for value in ("", "  \n", 3, [3], "red " * 2500, "red " * 5, "a purple one", "!?")
    ),
    ("prompt 2 of 2", {"prompts": ["red cube", ""]}),
    ("prompt", {"prompts": b"red cube"}),
    *(("negative_prompt", {"prompts": "red cube", "negative_prompt": value}) for value in (3, "a purple one", " ")),
    ("negative_prompt", {"prompts": "red cube", "negative_prompt": "a sphere", "cfg_scale": 1}),
]
CLASSES = [
    *(("class id", value) for value in (10, -1, 1.5, "3", True)),
    ("class id 2 of 2", [1, 400]),
    ("class_ids", []),
    ("class_ids", None),
]
EMBEDDINGS = [
    np.zeros((2, CAPTION + 1)),
    np.zeros((PREFIX + 1, CAPTION)),
    np.zeros((0, PREFIX, CAPTION)),
    np.zeros(CAPTION),
    (np.zeros((2, CAPTION)), [1, 1, 1]),
    (np.zeros((2, CAPTION)), [0, 1]),
    (np.zeros((2, CAPTION)), [0, 0]),
    np.full((2, CAPTION), np.nan),
    np.full((2, CAPTION), 1e300),
    np.ones((2, CAPTION), np.complex64),
    np.full((2, CAPTION), "1"),
    "red cube",
    [[1.0], [1.0, 2.0]],
]


def check_rejected(checker: Checker, field: str, request: dict[str, Any]) -> None:
    error = error_of(RequestError, checker, **request)
    assert error.field == field
    assert "\n" not in str(error)


@pytest.mark.parametrize(("field", "request_"), OPTIONS)
def test_errors_name_the_parameter_at_fault(words: Checker, field: str, request_: dict[str, Any]) -> None:
    check_rejected(words, field, {"prompts": "red cube"} | request_)


@pytest.mark.parametrize(("field", "class_ids"), CLASSES)
def test_a_class_out_of_range_is_rejected(classes: Checker, field: str, class_ids: Any) -> None:
    check_rejected(classes, field, {"class_ids": class_ids})


def test_classes_have_no_negative_prompt(classes: Checker) -> None:
    check_rejected(classes, "negative_prompt", {"class_ids": 1, "negative_prompt": "a cube"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int32"])
@pytest.mark.parametrize("gradients", [False, True])
def test_tensors_of_an_encoder_are_accepted_like_arrays(embeds: Checker, dtype: str, gradients: bool) -> None:
    torch = pytest.importorskip("torch")
    rows = np.arange(2 * CAPTION, dtype=np.float32).reshape(1, 2, CAPTION) % 8  # exact in every dtype
    mask = torch.tensor([[1.0, 0.0]], requires_grad=gradients)
    tensor = torch.from_numpy(rows).to(getattr(torch, dtype))
    (expected,) = embeds(embeddings=(rows, [[1, 0]])).images
    (image,) = embeds(embeddings=(tensor.requires_grad_(gradients and tensor.is_floating_point()), mask)).images
    for name, value in expected.condition_inputs.items():
        np.testing.assert_array_equal(image.condition_inputs[name], value)


@pytest.mark.parametrize("kind", ["meta", "sparse", "complex", "list", "nested"])
def test_tensors_that_cannot_become_arrays_are_rejected(embeds: Checker, kind: str) -> None:
    torch = pytest.importorskip("torch")
    rows = torch.ones(2, CAPTION)
    tensors = {
        "meta": lambda: rows.to("meta"),
        "sparse": rows.to_sparse,
        "complex": lambda: torch.complex(rows, rows).conj(),
        "list": lambda: [row.requires_grad_() for row in torch.ones(2, CAPTION)],
        "nested": lambda: torch.nested.nested_tensor([rows, rows[:1]], layout=torch.jagged),
    }
    check_rejected(embeds, "embeddings", {"embeddings": tensors[kind]()})


@pytest.mark.parametrize("embeddings", EMBEDDINGS)
def test_embeddings_that_do_not_fit_are_rejected(embeds: Checker, embeddings: Any) -> None:
    check_rejected(embeds, "embeddings", {"embeddings": embeddings})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"method": "lantern:lambda=2"},
            "lambda: method lantern does not take it; omit lambda, or use method lantern++ or sjd",
        ),
        (
            {"lambda_": 2.0},
            "lambda: a parameter without its method; write it into a method that takes it (lantern++, sjd), "
            "such as method='lantern++:lambda=2.0'",
        ),
        ({"method": f"lantern:neighbors={K + 1}"}, f"neighbors: found {K + 1}, expected a whole number 1 .. {K}"),
        ({"method": "magic"}, "method: found 'magic', expected ar, eagle, lantern, lantern++, sjd, rows or groups"),
        ({"quality": "fast", "method": "ar"}, "quality: a quality and a method; give one of them"),
    ],
)
def test_errors_of_wrong_options_name_the_cure(words: Checker, options: dict[str, Any], sentence: str) -> None:
    assert str(error_of(RequestError, words, "red cube", **options)) == sentence


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        ("eagle", "has no drafter of the kind heads or eagle"),
        ("lantern:drafter=heads", "has no drafter of the kind heads"),
        ("sjd:lambda=2", "has 0 neighbors per code, but the method's bound reads 10"),
        ("groups", "draws one token after another"),
        (Eagle(), "has no drafter of the kind heads or eagle"),
        (SpeculativeJacobi(neighbors=3, delta=0.1), "has 0 neighbors per code, but the method's bound reads 3"),
    ],
)
def test_the_error_of_an_unsupported_method_names_what_is_missing_and_the_supported_methods(
    plain: Checker, method: Any, problem: str
) -> None:
    error = error_of(RequestError, plain, "red cube", method=method)
    assert (error.problem, error.remedy) == (f"bundle tiny {problem}", "use method ar, sjd or rows")
    assert plain.method() == SpeculativeJacobi(window=7)


def test_sjd_is_exact_unless_relaxation_is_requested(words: Checker) -> None:
    exact = words.method(method="sjd")
    assert (exact, exact.exact) == (SpeculativeJacobi(window=8), True)
    bounded = words.method(method="sjd:lambda=3")
    assert bounded == SpeculativeJacobi(window=8, neighbors=4, lambda_=3.0, residual="aggregated")
    assert words.method(method="sjd:delta=0.1:neighbors=2").neighbors == 2


def test_a_bundle_may_set_defaults_of_a_method(words: Checker) -> None:
    assert resolve_settings(
        with_methods(words, SpeculativeJacobi(window=3)), {"method": "sjd"}
    ).method == SpeculativeJacobi(window=3)


@pytest.mark.parametrize(
    "text",
    [
        "ar",
        "eagle:tree=chain-2",
        "lantern:delta=0.3",
        "lantern++:residual=neighborhood:lambda=1.5",
        "sjd:window=3:lambda=2",
    ],
)
def test_a_method_is_the_same_by_string_as_an_object_and_through_json(words: Checker, text: str) -> None:
    method = words.method(method=text)
    assert words.method(method=str(method)) == words.method(method=method) == method
    assert type(method).model_validate_json(method.model_dump_json()) == method


def with_methods(words: Checker, *methods: MethodConfig) -> Any:
    """Return the manifest with other defaults of methods."""
    manifest = words.bundle.manifest
    return manifest.model_copy(update={"decoding": manifest.decoding.model_copy(update={"methods": methods})})


@pytest.mark.parametrize("tree", ["oak", "tree.json", "chain-0", "tree-z"])
def test_an_unknown_tree_is_rejected(words: Checker, tree: Any) -> None:
    with pytest.raises(TreeError):
        words("red cube", method=f"eagle:tree={tree}")


def test_a_tree_spelled_out_in_the_request_is_used(words: Checker) -> None:
    pipe = Pipeline.from_bundle(words.bundle, threads=1)
    trees = [part.tree for step in pipe.stream("red", method="eagle:tree=tree-2-10") for part in step.parts]
    assert all(tree is None or tree.parents.tolist() == [-1, 0, 0, 1] for tree in trees)


def test_an_unknown_keyword_is_a_type_error(words: Checker) -> None:
    with pytest.raises(TypeError, match="'qualty'; did you mean 'quality'"):
        words("red cube", qualty="fast")
    with pytest.raises(TypeError, match="'prompt'; did you mean 'prompts'"):
        words(prompt="red cube")


def test_omitted_options_come_from_the_bundle(words: Checker) -> None:
    manifest = words.bundle.manifest
    method = {"method": "lantern:tree=dynamic-6-3-2:neighbors=4:delta=0.2"}
    sampling = {"cfg_scale": 2, "temperature": 1, "top_k": 24, "top_p": 1}
    assert resolve_settings(manifest, {"method": "lantern"}) == resolve_settings(manifest, method | sampling)
    assert resolve_settings(manifest, {}) == resolve_settings(manifest, {"quality": "strict"})
    assert resolve_settings(manifest, {}).method.exact


def test_guidance_of_a_part_of_the_image_may_come_from_the_bundle(words: Checker) -> None:
    manifest = words.bundle.manifest
    half = manifest.model_copy(update={"sampling": manifest.sampling.model_copy(update={"cfg_tokens": "50%"})})
    assert resolve_settings(manifest, {}).sampling.cfg_tokens is None
    assert resolve_settings(half, {}).sampling.count_guided_tokens(36) == 18
    assert resolve_settings(half, {"cfg_tokens": "7"}).sampling.cfg_tokens == 7
    assert "cfg_tokens" not in resolve_settings(half, {"cfg_scale": 1}).as_dict()


def test_without_defaults_of_the_bundle_trees_are_small_and_neighbors_fit(words: Checker) -> None:
    manifest = with_methods(words)
    assert resolve_settings(manifest, {"method": "eagle"}).method == Eagle(tree="chain-3")
    relaxed: Any = resolve_settings(manifest, {"method": "lantern"}).method
    assert (relaxed.neighbors, relaxed.delta) == (K, 0.2)


def test_every_method_has_a_number_of_nodes_and_an_unknown_method_is_an_error() -> None:
    class Unknown(MethodConfig):
        method: Literal["unknown"] = "unknown"

    methods = [kind(method=name) for name, kind in METHODS.items()]
    assert [count_draft_nodes(method) for method in methods] == [1, 4, 8, 5, 9, 64, 1]
    with pytest.raises(TypeError, match="method unknown"):
        count_draft_nodes(Unknown())
