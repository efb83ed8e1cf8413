"""Prompts as token ids: how both rows are laid out, what is refused, and the tokenizer library where it is needed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError
from tiny_bundle import make_tiny_bundle

from lantern_rt.bundle.manifest import ConditionSpec, Manifest, TokenLayout
from lantern_rt.prompts import ImageRequest
from lantern_rt.requests import check_request
from lantern_rt.runtime.state import DrafterLayout, PrefixRow

ANOLE = TokenLayout(before=(0,), after=(140, 133), uncond=(0, 133))
JANUS = TokenLayout(template="<|User|>: {prompt}", before=(1,), after=(9,), uncond_fill=2)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = make_tiny_bundle(tmp_path_factory.mktemp("words") / "tiny")
    return Manifest.model_validate_json((folder / "bundle.json").read_text())


class Ids:
    """A tokenizer that gives these ids to every prompt, and keeps how many it might have given."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.slots = np.array(ids), 0

    def encode(self, prompt: str, slots: int) -> NDArray[np.int64]:
        """The ids."""
        self.slots = slots
        return self.ids


def requests(manifest: Manifest, layout: TokenLayout, ids: list[int], images: int = 1) -> list[ImageRequest]:
    condition = ConditionSpec(kind="tokens", prefix=12, layout=layout)
    own, tokenizer = manifest.model_copy(update={"condition": condition}), Ids(ids)
    request = check_request(own, tokenizer, "a prompt", seed=7, num_images=images)  # type: ignore[arg-type]
    assert tokenizer.slots == 12 - len(layout.before) - len(layout.after)
    return request.images


def test_the_rows_of_a_prompt_may_differ_in_length(manifest: Manifest) -> None:
    first, second = requests(manifest, ANOLE, [50, 51, 52], images=2)
    assert first.inputs["token_ids"].tolist() == [[0, 50, 51, 52, 140, 133]]
    assert first.inputs["uncond_ids"].tolist() == [[0, 133]]
    assert tuple(real.tolist() for real in first.real) == ([True] * 6, [True] * 2)
    assert first.inputs is second.inputs
    assert (first.seed, second.seed) == (7, 8)


def test_an_unconditional_row_may_be_the_prompt_with_its_text_filled_in(manifest: Manifest) -> None:
    (request,) = requests(manifest, JANUS, [50, 51])
    assert request.inputs["token_ids"].tolist() == [[1, 50, 51, 9]]
    assert request.inputs["uncond_ids"].tolist() == [[1, 2, 2, 9]]


def test_drafter_slots_read_the_next_token_of_their_own_row() -> None:
    rows = np.zeros((6, 4), np.float32)
    cond, uncond = np.array([0, 50, 51, 52, 140, 133]), np.array([0, 133])
    whole = np.ones(6, bool)
    assert PrefixRow(rows, whole, cond).drafter_tokens(DrafterLayout()).tolist() == [50, 51, 52, 140, 133]
    assert PrefixRow(rows[:2], whole[:2], uncond).drafter_tokens(DrafterLayout()).tolist() == [133]
    assert PrefixRow(rows, np.arange(6) > 1).drafter_tokens(DrafterLayout(prefix_token=3)).tolist() == [3] * 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"after": [1]}, "`uncond` and `uncond_fill` are two ways to lay out one row; set one"),
        ({"after": [1], "uncond": [1], "uncond_fill": 1}, "`uncond` and `uncond_fill` are two ways"),
        ({"after": [], "uncond": [1]}, "at least 1 item"),
        ({"after": [1], "uncond": [1], "template": "no place"}, "should match pattern"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TokenLayout.model_validate_json(json.dumps(fields))


def test_a_layout_goes_with_tokens_only() -> None:
    with pytest.raises(ValidationError, match="`layout` goes with kind `tokens` and with no other"):
        ConditionSpec(kind="words", prefix=4, layout=ANOLE)
    with pytest.raises(ValidationError, match="`layout` goes with kind `tokens` and with no other"):
        ConditionSpec(kind="tokens", prefix=4)
