"""Requests with wrong options are rejected with a clear error; omitted options get the defaults of the bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from refusals import catch_error
from tiny_bundle import CAPTION, NUM_NEIGHBORS, PREFIX, make_tiny_bundle

from lantern_rt import Pipeline, RequestError, TreeError
from lantern_rt.bundle.files import open_bundle
from lantern_rt.methods import METHODS, Eagle, MethodConfig, SpeculativeJacobi
from lantern_rt.requests import Request, check_request, resolve_settings
from lantern_rt.runtime.drafters import count_draft_nodes
from lantern_rt.text.tokenizers import load_bundle_tokenizer

NAN = float("nan")
INF = float("inf")


class RequestChecker:
    """Callable object that checks requests against the manifest of a bundle, without loading graphs."""

    def __init__(self, folder: Path) -> None:
        self.bundle = open_bundle(folder)
        self.tokenizer = load_bundle_tokenizer(self.bundle)

    def __call__(self, prompts: Any = None, **request: Any) -> Request:
        return check_request(self.bundle.manifest, self.tokenizer, {"prompts": prompts, **request})

    def method(self, **options: Any) -> Any:
        return resolve_settings(self.bundle.manifest, options).method


@pytest.fixture(scope="session")
def words_checker(words_bundle: Path) -> RequestChecker:
    return RequestChecker(words_bundle)


@pytest.fixture(scope="session")
def class_checker(class_bundle: Path) -> RequestChecker:
    return RequestChecker(class_bundle)


@pytest.fixture(scope="session")
def embeddings_checker(embeddings_bundle: Path) -> RequestChecker:
    return RequestChecker(embeddings_bundle)


@pytest.fixture(scope="session")
def no_drafter_checker(tmp_path_factory: pytest.TempPathFactory) -> RequestChecker:
    return RequestChecker(make_tiny_bundle(tmp_path_factory.mktemp("plain") / "tiny", drafter=False))


def make_option_cases(name: str, *values: Any, **other_options: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return a pair for each wrong value of an option: field of the expected error, and request with this value."""
    return [(name.rstrip("_"), {name: value, **other_options}) for value in values]


def make_method_cases(text: str, *values: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return pairs as `make_option_cases` does, for wrong values of the last parameter in the method string `text`."""
    return [(text.rpartition(":")[2], {"method": f"{text}={value}"}) for value in values]


WRONG_PROMPTS = ("", "  \n", 3, [3], b"red cube", "red " * 2500, "red " * 5, "a purple one", "!?")
WRONG_OPTIONS = [
    *make_method_cases("lantern++:lambda", 1, 0.5, -2, INF),
    *make_method_cases("lantern:delta=0.2:lambda", 2.0),
    *make_method_cases("lantern:delta", 0, 1, -0.1, 1.5, NAN, INF, "much", True),
    *make_method_cases("lantern++:delta", 0.2),
    *make_method_cases("ar:delta", 0.2),
    *make_method_cases("lantern:neighbors", 0, -1, NUM_NEIGHBORS + 1, 2.5, NAN),
    *make_method_cases("ar:neighbors", 3),
    *make_method_cases("sjd:neighbors", 3),  # `neighbors` needs `delta` or `lambda`
    *make_method_cases("eagle:drafter", "any"),
    *make_method_cases("lantern:residual", "all"),
    *make_method_cases("eagle:residual", "aggregated"),
    *make_method_cases("sjd:residual", "aggregated"),
    *make_method_cases("ar:tree", "mc-25"),
    *make_method_cases("eagle:tree", 7),
    *make_method_cases("sjd:tree", "chain-4"),
    *make_method_cases("eagle:window", 4),
    *make_method_cases("sjd:window", 0, 129, 2.5, True, "four"),
    *make_option_cases("tree", "chain-3"),  # a parameter of a method, but the request names no method
    *make_option_cases("drafter", "heads"),
    *make_option_cases("neighbors", 5),
    *make_option_cases("lambda", 2.0),
    *make_option_cases("window", 4, method="sjd"),
    *make_option_cases("quality", "superb", "fast", "", ["strict"]),
    *make_option_cases("quality", "strict", method="eagle"),
    *make_option_cases("method", "magic", "auto", "auto:quality=strict", ["ar"], "sjd:window=" + "9" * 20_000),
    *make_option_cases("temperature", -1, NAN, INF, 1e-9, 1e9, "1"),
    *make_option_cases("top_p", 0, -0.5, 1.01, NAN),
    *make_option_cases("top_k", -1, 2.5, NAN, True),
    *make_option_cases("cfg_scale", -1, 1001, NAN, INF),
    *make_option_cases("repetition_penalty", 1e-300, 0.009, 101, NAN, INF),
    *make_option_cases("cfg_tokens", -1, 37, "37", 10**5000, "9" * 5000, 2.5, NAN, True, [3]),
    *make_option_cases("cfg_tokens", "half", "-1%", "101%", "5e1%", "%", "", f"0.{'9' * 30}%"),
    *make_option_cases("cfg_tokens", 3, "0%", cfg_scale=1),
    *make_option_cases("cfg_schedule", "cosine", "cosine-", "cosine-1e3", "cosine--1", "0.7,linear", "2x4,", 2),
    *make_option_cases("cfg_schedule", "linear", cfg_scale=1),
    *make_option_cases("num_images", 0, -3, 1.5, 5000),
    *make_option_cases("num_images", 1000, prompts=["red"] * 3),
    *make_option_cases("seed", -1, 2**64, 10**5000, 1.0, "1", [1, 2]),
    *make_option_cases("seed", 2**64 - 1, num_images=2),
    ("method", {"method": "eagle:three=chain-4"}),
    ("prompts", {"class_ids": 3}),
    ("prompts", {"class_ids": 3, "prompts": None}),
    ("prompts", {"embeddings": np.zeros((2, 3)), "prompts": None}),
    ("prompts", {"prompts": None}),
    ("prompts", {"prompts": []}),
    *(
        ("prompt", {"prompts": value})
        for value in ("", "  \n", 3, [3], b"red", "red " * 2500, "red " * 5, "purple", "!?")
    ),
    ("prompt 2 of 2", {"prompts": ["red cube", ""]}),
    *(("negative_prompt", {"prompts": "red cube", "negative_prompt": value}) for value in (3, "a purple one", " ")),
    ("negative_prompt", {"prompts": "red cube", "negative_prompt": "a sphere", "cfg_scale": 1}),
]
WRONG_CLASS_IDS = [
    *(("class id", value) for value in (10, -1, 1.5, "3", True)),
    ("class id 2 of 2", [1, 400]),
    ("class_ids", []),
    ("class_ids", None),
]
WRONG_EMBEDDINGS = [
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


def expect_rejection(checker: RequestChecker, field: str, request: dict[str, Any]) -> None:
    error = catch_error(RequestError, checker, **request)
    assert error.field == field
    assert "\n" not in str(error)


@pytest.mark.parametrize(("field", "request_"), WRONG_OPTIONS)
def test_a_wrong_option_is_named(words_checker: RequestChecker, field: str, request_: dict[str, Any]) -> None:
    expect_rejection(words_checker, field, {"prompts": "red cube"} | request_)


@pytest.mark.parametrize(("field", "class_ids"), WRONG_CLASS_IDS)
def test_wrong_class_ids_are_rejected(class_checker: RequestChecker, field: str, class_ids: Any) -> None:
    expect_rejection(class_checker, field, {"class_ids": class_ids})


def test_a_negative_prompt_for_a_class_id_is_rejected(class_checker: RequestChecker) -> None:
    expect_rejection(class_checker, "negative_prompt", {"class_ids": 1, "negative_prompt": "a cube"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int32"])
@pytest.mark.parametrize("gradients", [False, True])
def test_pytorch_tensors_are_accepted_as_embeddings(
    embeddings_checker: RequestChecker, dtype: str, gradients: bool
) -> None:
    torch = pytest.importorskip("torch")
    rows = np.arange(2 * CAPTION, dtype=np.float32).reshape(1, 2, CAPTION) % 8  # exact in every dtype
    mask = torch.tensor([[1.0, 0.0]], requires_grad=gradients)
    tensor = torch.from_numpy(rows).to(getattr(torch, dtype))
    (expected,) = embeddings_checker(embeddings=(rows, [[1, 0]])).images
    tensor.requires_grad_(gradients and tensor.is_floating_point())
    (image,) = embeddings_checker(embeddings=(tensor, mask)).images
    for name, value in expected.prefix.cond.inputs.items():
        np.testing.assert_array_equal(image.prefix.cond.inputs[name], value)


@pytest.mark.parametrize("kind", ["meta", "sparse", "complex", "list", "nested"])
def test_tensors_that_numpy_cannot_hold_are_rejected(embeddings_checker: RequestChecker, kind: str) -> None:
    torch = pytest.importorskip("torch")
    rows = torch.ones(2, CAPTION)
    tensors = {
        "meta": lambda: rows.to("meta"),
        "sparse": rows.to_sparse,
        "complex": lambda: torch.complex(rows, rows).conj(),
        "list": lambda: [row.requires_grad_() for row in torch.ones(2, CAPTION)],
        "nested": lambda: torch.nested.nested_tensor([rows, rows[:1]], layout=torch.jagged),
    }
    expect_rejection(embeddings_checker, "embeddings", {"embeddings": tensors[kind]()})


@pytest.mark.parametrize("embeddings", WRONG_EMBEDDINGS)
def test_embeddings_of_wrong_shape_or_values_are_rejected(embeddings_checker: RequestChecker, embeddings: Any) -> None:
    expect_rejection(embeddings_checker, "embeddings", {"embeddings": embeddings})


@pytest.mark.parametrize(
    ("options", "expected_message"),
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
        (
            {"method": f"lantern:neighbors={NUM_NEIGHBORS + 1}"},
            f"neighbors: found {NUM_NEIGHBORS + 1}, expected a whole number 1 .. {NUM_NEIGHBORS}; "
            f"the bundle's table has {NUM_NEIGHBORS} neighbours of each code",
        ),
        ({"method": "sjd:window=300"}, "window: found 300, expected at most 128; correct method 'sjd:window=300'"),
        ({"method": "magic"}, "method: found 'magic', expected ar, eagle, lantern, lantern++, sjd, rows or groups"),
        ({"quality": "fast", "method": "ar"}, "quality: a quality and a method; give one of them"),
    ],
)
def test_a_wrong_options_error_says_how_to_correct_it(
    words_checker: RequestChecker, options: dict[str, Any], expected_message: str
) -> None:
    assert str(catch_error(RequestError, words_checker, "red cube", **options)) == expected_message


@pytest.mark.parametrize(
    ("method", "expected_problem"),
    [
        ("eagle", "has no drafter of the kind heads or eagle"),
        ("lantern:drafter=heads", "has no drafter of the kind heads"),
        ("sjd:lambda=2", "has 0 neighbors per code, but the method's bound reads 10"),
        ("groups", "generates one token after another"),
        (Eagle(), "has no drafter of the kind heads or eagle"),
        (SpeculativeJacobi(neighbors=3, delta=0.1), "has 0 neighbors per code, but the method's bound reads 3"),
    ],
)
def test_an_unsupported_method_lists_the_supported_ones(
    no_drafter_checker: RequestChecker, method: Any, expected_problem: str
) -> None:
    error = catch_error(RequestError, no_drafter_checker, "red cube", method=method)
    assert (error.problem, error.remedy) == (f"bundle tiny {expected_problem}", "use method ar, sjd or rows")
    assert no_drafter_checker.method() == SpeculativeJacobi(window=7)


def test_sjd_is_exact_unless_the_request_relaxes_it(words_checker: RequestChecker) -> None:
    exact_method = words_checker.method(method="sjd")
    assert (exact_method, exact_method.exact) == (SpeculativeJacobi(window=8), True)
    relaxed_method = words_checker.method(method="sjd:lambda=3")
    assert relaxed_method == SpeculativeJacobi(window=8, neighbors=4, lambda_=3.0, residual="aggregated")
    assert words_checker.method(method="sjd:delta=0.1:neighbors=2").neighbors == 2


def test_a_bundle_may_set_the_default_parameters_of_a_method(words_checker: RequestChecker) -> None:
    manifest = replace_default_methods(words_checker, SpeculativeJacobi(window=3))
    assert resolve_settings(manifest, {"method": "sjd"}).method == SpeculativeJacobi(window=3)


METHOD_TEXTS = ["ar", "eagle:tree=chain-2", "lantern:delta=0.3", "sjd:window=3:lambda=2"]


@pytest.mark.parametrize("text", [*METHOD_TEXTS, "lantern++:residual=neighborhood:lambda=1.5"])
def test_a_method_can_be_given_as_a_string_an_object_or_json(words_checker: RequestChecker, text: str) -> None:
    method = words_checker.method(method=text)
    assert words_checker.method(method=str(method)) == words_checker.method(method=method) == method
    assert type(method).model_validate_json(method.model_dump_json()) == method


def replace_default_methods(words_checker: RequestChecker, *methods: MethodConfig) -> Any:
    manifest = words_checker.bundle.manifest
    return manifest.model_copy(update={"decoding": manifest.decoding.model_copy(update={"methods": methods})})


@pytest.mark.parametrize("tree", ["oak", "tree.json", "chain-0", "tree-z"])
def test_an_unknown_tree_name_is_rejected(words_checker: RequestChecker, tree: Any) -> None:
    with pytest.raises(TreeError):
        words_checker("red cube", method=f"eagle:tree={tree}")


def test_a_request_may_describe_the_shape_of_the_draft_tree(words_checker: RequestChecker) -> None:
    pipe = Pipeline.from_bundle(words_checker.bundle, threads=1)
    trees = [part.tree for step in pipe.stream("red", method="eagle:tree=tree-2-10") for part in step.parts]
    assert all(tree is None or tree.parents.tolist() == [-1, 0, 0, 1] for tree in trees)


def test_an_unknown_keyword_argument_suggests_another(words_checker: RequestChecker) -> None:
    with pytest.raises(TypeError, match="'qualty'; did you mean quality"):
        words_checker("red cube", qualty="fast")
    with pytest.raises(TypeError, match="'generator'; use seed"):
        words_checker("red cube", generator=3)


def test_the_parameter_prompt_is_the_same_as_prompts(words_checker: RequestChecker) -> None:
    images, same = (words_checker(**{name: ["red", "green"]}).images for name in ("prompt", "prompts"))
    assert [image.subject.label for image in images] == [image.subject.label for image in same] == ["red", "green"]
    with pytest.raises(RequestError, match="prompt: given together with prompts; give one of them"):
        words_checker("red", prompt="red")


def test_omitted_options_have_the_defaults_of_the_bundle(words_checker: RequestChecker) -> None:
    manifest = words_checker.bundle.manifest
    method = {"method": "lantern:tree=dynamic-6-3-2:neighbors=4:delta=0.2"}
    sampling = {"cfg_scale": 2, "temperature": 1, "top_k": 24, "top_p": 1}
    assert resolve_settings(manifest, {"method": "lantern"}) == resolve_settings(manifest, method | sampling)
    assert resolve_settings(manifest, {}) == resolve_settings(manifest, {"quality": "strict"})
    assert resolve_settings(manifest, {}).method.exact


def test_equal_shares_of_guided_tokens_have_one_record(words_checker: RequestChecker) -> None:
    manifest = words_checker.bundle.manifest
    shares = ["50%", "50.0%", "050%", "50.%"]
    assert {resolve_settings(manifest, {"cfg_tokens": share}).sampling.cfg_tokens for share in shares} == {"50%"}
    assert resolve_settings(manifest, {"cfg_tokens": "33.30%"}).sampling.cfg_tokens == "33.3%"
    assert resolve_settings(manifest, {"cfg_tokens": "100%"}).sampling.cfg_tokens == "100%"


def test_the_bundle_may_set_the_default_number_of_guided_tokens(words_checker: RequestChecker) -> None:
    manifest = words_checker.bundle.manifest
    half_guided = manifest.sampling.model_copy(update={"cfg_tokens": "50%"})
    half_guided_manifest = manifest.model_copy(update={"sampling": half_guided})
    assert resolve_settings(manifest, {}).sampling.cfg_tokens is None
    assert resolve_settings(half_guided_manifest, {}).sampling.count_guided_tokens(36) == 18
    assert resolve_settings(half_guided_manifest, {"cfg_tokens": "7"}).sampling.cfg_tokens == 7
    assert "cfg_tokens" not in resolve_settings(half_guided_manifest, {"cfg_scale": 1}).as_dict()


def test_without_defaults_trees_are_small(words_checker: RequestChecker) -> None:
    manifest = replace_default_methods(words_checker)
    assert resolve_settings(manifest, {"method": "eagle"}).method == Eagle(tree="chain-3")
    lantern: Any = resolve_settings(manifest, {"method": "lantern"}).method
    assert (lantern.neighbors, lantern.delta) == (NUM_NEIGHBORS, 0.2)


def test_every_method_has_a_number_of_draft_nodes() -> None:
    class Unknown(MethodConfig):
        method: Literal["unknown"] = "unknown"

    methods = [kind(method=name) for name, kind in METHODS.items()]
    assert [count_draft_nodes(method) for method in methods] == [1, 4, 8, 5, 9, 64, 1]
    with pytest.raises(TypeError, match="method unknown"):
        count_draft_nodes(Unknown())
