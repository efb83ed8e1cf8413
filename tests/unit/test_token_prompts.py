"""Prompts as token ids: how the rows of a request are laid out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lantern_rt import open_bundle
from lantern_rt.bundle.conditions import ConditionSpec, TokenLayout
from lantern_rt.bundle.manifest import Manifest
from lantern_rt.prompts import ImageRequest
from lantern_rt.requests import check_request
from lantern_rt.runtime.state import DrafterLayout, PrefixRow

ANOLE = TokenLayout(before=(0,), after=(140, 133), uncond=(0, 133))
JANUS = TokenLayout(template="<|User|>: {prompt}", before=(1,), after=(9,), uncond_fill=2)


@pytest.fixture(scope="module")
def manifest(words_bundle: Path) -> Manifest:
    return open_bundle(words_bundle).manifest


class Ids:
    """A tokenizer that gives these ids to every prompt, and keeps how many it might have given."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.slots = np.array(ids), 0

    def encode(self, prompt: str, slots: int) -> NDArray[np.int64]:
        """The ids."""
        self.slots = slots
        return self.ids


def requests(
    manifest: Manifest, layout: TokenLayout, ids: list[int], images: int = 1, **options: Any
) -> list[ImageRequest]:
    condition = ConditionSpec(kind="tokens", prefix=12, layout=layout)
    own, tokenizer = manifest.model_copy(update={"condition": condition}), Ids(ids)
    request = check_request(own, tokenizer, "a prompt", seed=7, num_images=images, **options)  # type: ignore[arg-type]
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


def test_a_negative_prompt_takes_the_unconditional_rows_place_by_a_template_of_its_own(manifest: Manifest) -> None:
    (request,) = requests(manifest, ANOLE, [50, 51], negative_prompt="red")
    assert request.tokens is not None
    assert request.tokens[1].tolist() == [0, 50, 51, 140, 133]
    assert [len(real) for real in request.real] == [5, 5]


def test_drafter_slots_read_the_next_token_of_their_own_row() -> None:
    rows = np.zeros((6, 4), np.float32)
    cond, uncond = np.array([0, 50, 51, 52, 140, 133]), np.array([0, 133])
    whole = np.ones(6, bool)
    assert PrefixRow(rows, whole, cond).drafter_tokens(DrafterLayout()).tolist() == [50, 51, 52, 140, 133]
    assert PrefixRow(rows[:2], whole[:2], uncond).drafter_tokens(DrafterLayout()).tolist() == [133]
    assert PrefixRow(rows, np.arange(6) > 1).drafter_tokens(DrafterLayout(prefix_token=3)).tolist() == [3] * 5


def test_tokens_of_any_text_stand_at_the_end_of_the_prefix_and_the_rest_is_padding(manifest: Manifest) -> None:
    own = manifest.model_copy(update={"condition": ConditionSpec(kind="text", prefix=6, cleaning="llamagen")})
    (short,) = check_request(own, Ids([7, 1]), "a prompt", method="ar").images  # type: ignore[arg-type]
    assert short.inputs["token_ids"].tolist() == [[7, 1]]
    assert short.inputs["token_mask"].tolist() == [[1, 1]]
    assert short.real[0].tolist() == [False] * 4 + [True] * 2
    assert all(array.dtype == np.int64 for array in short.inputs.values())
    (full,) = check_request(own, Ids([2, 3, 4, 5, 6, 1]), "a prompt", method="ar").images  # type: ignore[arg-type]
    assert full.real[0].all()
