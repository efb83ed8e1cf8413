"""Prompts as token ids: templates, the unconditional row, ids from the caller, and output of codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from refusals import catch_error

from lantern_rt import Pipeline, RequestError, open_bundle
from lantern_rt.bundle.conditions import ConditionSpec, TokenLayout
from lantern_rt.bundle.manifest import Manifest
from lantern_rt.requests import check_request
from lantern_rt.runtime.state import DrafterLayout, PrefixRow
from lantern_rt.subjects.base import ImageRequest
from lantern_rt.text.prompt_tokenizer import PromptTokenizer
from lantern_rt.text.tokenizers import load_bundle_tokenizer

ANOLE = TokenLayout(before=(0,), after=(140, 133), uncond=(0, 133))
JANUS = TokenLayout(template="<|User|>: {prompt}", before=(1,), after=(9,), uncond_fill=2)


@pytest.fixture(scope="module")
def manifest(words_bundle: Path) -> Manifest:
    return open_bundle(words_bundle).manifest


class FixedTokenizer(PromptTokenizer):
    """A tokenizer that returns the same ids for every prompt, and records the maximum length that was requested."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = np.array(ids)
        self.slots = 0

    def has_id(self, token: int) -> bool:
        return token < 1000

    def encode(self, prompt: str, slots: int) -> NDArray[np.int64]:
        self.slots = slots
        return self.ids


def use_layout(manifest: Manifest, layout: TokenLayout, prefix: int = 12) -> Manifest:
    return manifest.model_copy(update={"condition": ConditionSpec(kind="tokens", prefix=prefix, layout=layout)})


def make_requests(manifest: Manifest, layout: TokenLayout, ids: list[int], **options: Any) -> list[ImageRequest]:
    tokenizer = FixedTokenizer(ids)
    request = check_request(use_layout(manifest, layout), tokenizer, {"prompts": "a prompt", "seed": 7, **options})
    assert tokenizer.slots == 12 - len(layout.before) - len(layout.after)
    return request.images


@pytest.mark.parametrize(("count", "num_padding"), [(3, 1), (11, 1), (12, 0)])
def test_a_padded_text_ends_with_one_padding_unless_it_fills_the_prefix(
    manifest: Manifest, count: int, num_padding: int
) -> None:
    condition = ConditionSpec(kind="text", prefix=12, padding=99)
    ids = [*range(count)]
    padded = manifest.model_copy(update={"condition": condition})
    (image,) = check_request(padded, FixedTokenizer(ids), {"prompts": "a prompt"}).images
    cond, uncond = image.prefix
    assert cond.inputs["token_ids"].tolist() == [ids + [99] * num_padding]
    assert cond.inputs["token_mask"].tolist() == [[1] * count + [0] * num_padding]
    assert cond.is_real_token.tolist() == [True] * count + [False] * num_padding
    assert uncond.is_real_token.tolist() == [False]
    assert (cond.first_position, uncond.first_position) == (12, 12)


@pytest.mark.parametrize(("prefix", "max_characters"), [(12, 2000), (2048, 32_768)])
def test_the_longest_prompt_depends_on_the_model(manifest: Manifest, prefix: int, max_characters: int) -> None:
    text_manifest = use_layout(manifest, ANOLE, prefix)
    tokenizer: Any = FixedTokenizer([50])
    assert check_request(text_manifest, tokenizer, {"prompts": "x" * max_characters}).images
    error = catch_error(RequestError, check_request, text_manifest, tokenizer, {"prompts": "x" * (max_characters + 1)})
    assert (error.field, error.expected) == ("prompt", f"at most {max_characters:,}")


def test_both_rows_of_guidance_may_have_different_lengths(manifest: Manifest) -> None:
    first_image, second_image = make_requests(manifest, ANOLE, [50, 51, 52], num_images=2)
    assert first_image.prefix.cond.inputs["token_ids"].tolist() == [[0, 50, 51, 52, 140, 133]]
    assert first_image.prefix.cond.inputs["uncond_ids"].tolist() == [[0, 133]]
    assert tuple(row.is_real_token.tolist() for row in first_image.prefix) == ([True] * 6, [True] * 2)
    assert first_image.prefix.cond.inputs is second_image.prefix.cond.inputs
    assert (first_image.seed, second_image.seed) == (7, 8)


def test_the_unconditional_row_may_be_filled_with_a_token(manifest: Manifest) -> None:
    (request,) = make_requests(manifest, JANUS, [50, 51])
    assert request.prefix.cond.inputs["token_ids"].tolist() == [[1, 50, 51, 9]]
    assert request.prefix.cond.inputs["uncond_ids"].tolist() == [[1, 2, 2, 9]]


def test_a_template_contains_the_prompt_and_the_size() -> None:
    layout = TokenLayout(template="{size}: {prompt}", after=(9,), uncond=(0,))
    assert layout.fill(" a {size} ", "8x8") == "8x8:  a {size} "
    assert layout.model_copy(update={"strip": True}).fill(" a ", "8x8", "no {prompt}") == "no a"


def test_a_negative_prompt_is_the_unconditional_row(manifest: Manifest) -> None:
    (request,) = make_requests(manifest, ANOLE, [50, 51], negative_prompt="red")
    assert request.prefix.uncond.tokens is not None
    assert request.prefix.uncond.tokens.tolist() == [0, 50, 51, 140, 133]
    assert [len(row.is_real_token) for row in request.prefix] == [5, 5]


def test_the_drafter_reads_the_next_token_of_the_prefix() -> None:
    rows = np.zeros((6, 4), np.float32)
    cond = np.array([0, 50, 51, 52, 140, 133])
    uncond = np.array([0, 133])
    is_real_token = np.ones(6, bool)
    assert PrefixRow(rows, is_real_token, cond).drafter_tokens(DrafterLayout()).tolist() == [50, 51, 52, 140, 133]
    assert PrefixRow(rows[:2], is_real_token[:2], uncond).drafter_tokens(DrafterLayout()).tolist() == [133]
    assert PrefixRow(rows, np.arange(6) > 1).drafter_tokens(DrafterLayout(prefix_token=3)).tolist() == [3] * 5


def test_a_short_text_is_padded_at_the_beginning(manifest: Manifest) -> None:
    text_manifest = manifest.model_copy(update={"condition": ConditionSpec(kind="text", prefix=6, cleaning="llamagen")})
    options = {"prompts": "a prompt", "method": "ar"}
    (short_image,) = check_request(text_manifest, FixedTokenizer([7, 1]), options).images
    assert short_image.prefix.cond.inputs["token_ids"].tolist() == [[7, 1]]
    assert short_image.prefix.cond.inputs["token_mask"].tolist() == [[1, 1]]
    assert short_image.prefix.cond.is_real_token.tolist() == [False] * 4 + [True] * 2
    assert all(array.dtype == np.int64 for array in short_image.prefix.cond.inputs.values())
    (full_image,) = check_request(text_manifest, FixedTokenizer([2, 3, 4, 5, 6, 1]), options).images
    assert full_image.prefix.cond.is_real_token.all()


# ---------------------------------------------------------------- ids from the caller


def make_requests_from_ids(manifest: Manifest, layout: TokenLayout, ids: Any, **options: Any) -> list[ImageRequest]:
    request = {"token_ids": ids, **options}
    return check_request(use_layout(manifest, layout), FixedTokenizer([50, 51]), request).images


@pytest.mark.parametrize("layout", [ANOLE, JANUS])
def test_a_callers_token_ids_give_the_rows_of_the_text(manifest: Manifest, layout: TokenLayout) -> None:
    (expected,) = make_requests(manifest, layout, [50, 51])
    (row,) = expected.prefix.cond.inputs["token_ids"].tolist()
    first_image, second_image = make_requests_from_ids(manifest, layout, [row, np.array(row)], seed=[7, 8])
    for image in (first_image, second_image):
        np.testing.assert_equal(image.prefix.cond.inputs, expected.prefix.cond.inputs)
        assert image.subject.label == tuple(row)
    assert (first_image.seed, second_image.seed) == (7, 8)


def test_a_request_with_token_ids_may_have_a_negative_prompt(manifest: Manifest) -> None:
    (image,) = make_requests_from_ids(manifest, ANOLE, [0, 60, 140, 133], negative_prompt="a blur", cfg_scale=2.0)
    assert image.prefix.uncond.inputs["token_ids"].tolist() == [[0, 50, 51, 140, 133]]
    assert image.record["negative_prompt"] == "a blur"


@pytest.mark.parametrize(
    ("ids", "field"),
    [
        ([0, 50, 140], "token_ids"),  # without the end of the template
        ([50, 140, 133], "token_ids"),  # without the beginning of the template
        ([0, 140, 133], "token_ids"),  # no text
        ([0, *range(20, 30), 140, 133], "token_ids"),  # 13 tokens, but the maximum is 12
        ([0, 5000, 140, 133], "token_ids"),  # unknown token
        ([0, -1, 140, 133], "token_ids"),
        ([0, 1.5, 140, 133], "token_ids"),
        ([0, True, 140, 133], "token_ids"),
        ([0, 1 << 40, 140, 133], "token_ids"),
        ([[0, 50, 140, 133], [0, 140, 133]], "token_ids 2 of 2"),
        ([[0, 50, 140, 133], 5], "token_ids"),
        ([], "token_ids"),
        ("0 50 140 133", "token_ids"),
    ],
)
def test_wrong_token_ids_are_rejected(manifest: Manifest, ids: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        make_requests_from_ids(manifest, ANOLE, ids)
    assert caught.value.field == field
    assert caught.value.expected


def test_token_ids_generate_the_image_of_their_prompt(words_bundle: Path, tmp_path: Path, program: Any) -> None:
    bundle = open_bundle(words_bundle)
    tokenizer = load_bundle_tokenizer(bundle)
    assert tokenizer is not None
    ids = [int(i) for i in tokenizer.encode("red cube", bundle.manifest.condition.prefix) if i]
    with Pipeline.from_bundle(bundle, threads=1) as pipe:
        from_text = pipe("red cube", seed=3)
        from_ids = pipe(token_ids=ids, seed=3)
        assert np.array_equal(from_text.codes, from_ids.codes)
        assert (from_ids.prompts, from_ids.images[0].info["token_ids"]) == ([tuple(ids)], " ".join(map(str, ids)))
        with pytest.raises(RequestError):
            pipe("red cube", token_ids=ids)
    (tmp_path / "ids.json").write_text(str(ids))
    command = ["run", words_bundle, "--token-ids", "ids.json", "--seed", 3, "--threads", 1]
    assert program(*command, "--output", "a.png")[0] == 0
    assert program("run", words_bundle, "--from", "a.png", "--output", "b.png")[0] == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert program(*command)[1] == "tokens-0-seed3.png\n"
    code, out, _ = program(*command, "--json")
    assert (code, json.loads(out)["images"][0]["token_ids"]) == (0, ids)
    for wrong in ("{}", "[1,", '["a"]', "[[]]"):
        (tmp_path / "ids.json").write_text(wrong)
        code, _, err = program(*command, "--force")
        assert (code, "ids" in err.splitlines()[-1], len(err.splitlines())) == (2, True, 1)


def test_option_codes_writes_npz_files(words_bundle: Path, tmp_path: Path, program: Any) -> None:
    command = ["run", words_bundle, "red cube", "--seed", 3, "--threads", 1]
    code, out, _ = program(*command, "--codes", "--count", 2)
    assert (code, out) == (0, "red-cube-seed3.npz\nred-cube-seed4.npz\n")
    (codes,) = Pipeline.from_bundle(words_bundle, threads=1)("red cube", seed=3).codes
    with np.load(tmp_path / "red-cube-seed3.npz") as file:
        assert (file["codes"].ravel().tolist(), file["first_codes"].size) == (codes.tolist(), 0)
        assert json.loads(str(file["recipe"]))["prompt"] == "red cube"
    assert program(*command, "--codes", "--output", "a.png")[0] == 2
    code, _, err = program(*command, "--codes", "--scale", 2)
    assert (code, "--scale: is for images, not for --codes" in err) == (2, True)
