"""Text embeddings of published runs, given to the public interface as a user would give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lantern_rt import Pipeline

DATA = Path(__file__).parent.parent / "data" / "lantern-e2e-llamagen"
GOLDEN = np.load(DATA / "golden.npz")


@pytest.fixture(scope="module")
def pipe(t2i_drafter_bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(t2i_drafter_bundle, threads=1)


def test_embeddings_are_left_padded_as_published(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    condition = pipe.engines.condition
    monkeypatch.setattr(pipe.engines, "condition", lambda inputs: seen.append(inputs) or condition(inputs))
    next(pipe.stream(embeddings=(GOLDEN["t5_embeddings"], GOLDEN["t5_mask"])))
    assert len(seen) == len(GOLDEN["emb_mask"])
    for inputs, mask, embeds in zip(seen, GOLDEN["emb_mask"], GOLDEN["caption_emb"], strict=True):
        np.testing.assert_array_equal(inputs["caption_mask"][0], mask)
        np.testing.assert_array_equal(inputs["caption_embeds"][0], embeds * mask[:, None])
