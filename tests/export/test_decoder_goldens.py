"""Targets of families with row ends or Llama's layers, compared with arrays recorded from published programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import (
    DATA,
    GUIDED_TOLERANCE,
    ROW_NAMES,
    Arrays,
    PromptRunner,
    assert_close,
    embed_tokens,
    load_golden,
    log_softmax,
    mix_guided,
    read_manifest,
)
from guided_logits import make_sampler
from numpy.typing import NDArray

from lantern_rt.methods import Sampling


def keep_scores(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    return scores


@dataclass(frozen=True)
class GoldenFamily:
    """A model family and its recordings.

    Attributes:
        codes: token ids of the codes.
        row_end: token id that ends each grid row; -1 for families without this token.
        scale: guidance scale.
        compute_scores: turns guided logits into the recorded scores.
    """

    name: str
    folder: str
    codes: slice
    row_end: int = -1
    scale: float = 3.0
    compute_scores: Callable[[NDArray[np.float32]], NDArray[np.float32]] = keep_scores
    bundle: Path = Path()

    @cached_property
    def arrays(self) -> Arrays:
        arrays = load_golden(self.folder)
        if arrays["tree_guided"].shape[1] == self.codes.stop - self.codes.start:  # only the columns of the codes
            columns = np.zeros((len(arrays["tree_guided"]), self.codes.stop), np.float32)
            columns[:, self.codes] = arrays["tree_guided"]
            arrays["tree_guided"] = columns
        return arrays

    def start_prompt(self) -> PromptRunner:
        first_code = None if self.row_end >= 0 else self.codes.start
        return PromptRunner(self.bundle, self.arrays["cond_ids"], self.arrays["uncond_ids"], first_code)


FAMILIES = [
    GoldenFamily("lumina", "lumina-mgpt", slice(4, 132), 142),
    GoldenFamily("lumina2", "lumina-mgpt-2", slice(367, 463), 353, scale=4.0),
    GoldenFamily("emu3", "emu3", slice(557, 653), 549, compute_scores=log_softmax),
    GoldenFamily("emu35", "emu3.5", slice(557, 653), 549, 5.0, log_softmax),
    GoldenFamily("simplear", "simplear", slice(395, 971), scale=6.0, compute_scores=log_softmax),
]
LUMINA_RUNS: list[dict[str, Any]] = json.loads((DATA / "lumina-mgpt/traces.json").read_text())


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> GoldenFamily:
    return replace(request.param, bundle=request.getfixturevalue(f"{request.param.name}_bundle"))


@pytest.mark.parametrize("row_name", ROW_NAMES)
def test_the_prompt_has_the_recorded_outputs_keys_and_values(family: GoldenFamily, row_name: str) -> None:
    arrays = family.arrays
    ids = family.arrays[f"{row_name}_ids"]
    # `GraphRunner` uses consecutive positions from 0.
    assert arrays[f"{row_name}_position_ids"].tolist() == list(range(len(ids)))
    (out,) = PromptRunner(family.bundle, ids, None).outputs
    assert_close(out["hidden_states"][0], arrays[f"{row_name}_prefill_hidden"])
    # The recordings of some families have only the last positions.
    logits = arrays[f"{row_name}_prefill_logits"][:, family.codes]
    assert_close(out["logits"][0][-len(logits) :], logits)
    for part in ("key", "value"):
        tensors = [out[f"new_key_values.{i}.{part}"][:, 0] for i in range(3)]
        assert_close(np.stack(tensors).transpose(0, 2, 1, 3), arrays[f"{row_name}_prefill_{part}s"])


def test_single_tokens_have_the_recorded_outputs(family: GoldenFamily) -> None:
    arrays = family.arrays
    runs = family.start_prompt()
    to_scores = family.compute_scores
    count = len(arrays["decode_cond_hidden"])
    steps = [runs.step(arrays["decode_tokens"][k : k + 1]) for k in range(count)]
    logits = np.stack([np.concatenate([step[i]["logits"][0] for step in steps]) for i in range(2)])
    for i, row_name in enumerate(ROW_NAMES):
        assert_close(np.concatenate([s[i]["hidden_states"][0] for s in steps]), arrays[f"decode_{row_name}_hidden"])
        assert_close(logits[i], arrays[f"decode_{row_name}_logits"][:, family.codes])
    guided = mix_guided(logits, family.scale)
    assert_close(to_scores(guided), to_scores(arrays["decode_guided"][-count:, family.codes]), GUIDED_TOLERANCE)


def test_a_draft_tree_has_the_recorded_outputs_and_scores(family: GoldenFamily) -> None:
    arrays = family.arrays
    runs = family.start_prompt()
    codes = family.codes
    to_scores = family.compute_scores
    runs.step(arrays["decode_tokens"])
    depths = arrays["tree_depth"]
    parents = arrays["tree_parents"]
    assert depths.tolist() == [0 if p < 0 else depths[p] + 1 for p in parents]
    for run, row_name in zip(runs.row_runs, ROW_NAMES, strict=True):
        assert arrays[f"tree_{row_name}_position_ids"].tolist() == (run.length + depths).tolist()
    out = runs.step(arrays["tree_tokens"], depths, visible=arrays["tree_mask"] > 0)
    for outputs, row_name in zip(out, ROW_NAMES, strict=True):
        assert_close(outputs["hidden_states"][0], arrays[f"tree_{row_name}_hidden"])
        assert_close(outputs["logits"][0], arrays[f"tree_{row_name}_logits"][:, codes])
    guided = mix_guided(np.concatenate([outputs["logits"] for outputs in out]), family.scale)
    assert_close(to_scores(guided), to_scores(arrays["tree_guided"][:, codes]), GUIDED_TOLERANCE)
    if family.row_end < 0:
        return  # the filtered scores are recorded only for families whose row ends are forced
    forced = arrays["tree_next_forced"]  # [nodes]: forced next token, or -1
    scores = arrays["tree_scores_topk20"]
    is_free = forced < 0
    # Tokens that are not codes are filtered out.
    assert not np.isfinite(np.delete(scores[is_free], np.r_[codes], 1)).any()
    filtered = make_sampler(Sampling(top_k=20)).process(guided)[is_free]
    np.testing.assert_array_equal(np.isfinite(filtered), np.isfinite(scores[is_free][:, codes]))
    np.testing.assert_allclose(to_scores(filtered), to_scores(scores[is_free][:, codes]), rtol=0, atol=GUIDED_TOLERANCE)
    for forced_scores in scores[~is_free]:
        assert np.flatnonzero(np.isfinite(forced_scores)).tolist() == [family.row_end]


def test_the_table_embeds_the_codes_and_the_row_end_token(family: GoldenFamily) -> None:
    if family.row_end < 0:
        return
    table = np.load(family.bundle / "code_embeddings.npy")
    codes = family.codes
    row_end = read_manifest(family.bundle).row_end
    between = range(codes.stop, family.row_end + 1) if family.row_end > codes.stop else [family.row_end]
    assert row_end == codes.stop - codes.start + len(between) - 1
    assert_close(table, embed_tokens(family.bundle, [*range(codes.start, codes.stop), *between])[0], 0)


@pytest.mark.parametrize("trace", LUMINA_RUNS, ids=lambda trace: f"run{trace['prompt']}_{trace['name']}")
def test_every_token_of_a_run_of_lumina_has_the_recorded_scores(lumina_bundle: Path, trace: dict[str, Any]) -> None:
    lumina = FAMILIES[0]
    scores = lumina.arrays[f"run{trace['prompt']}_{trace['name']}_scores"][:, lumina.codes]
    ids = trace["generated_ids"]
    runs = PromptRunner(lumina_bundle, [*trace["prompt_ids"], *ids[:3]], trace["unconditional_prefix"])
    logits = runs.compute_logits(ids[3:])
    assert_close(runs.outputs[0]["logits"][0, -4:-1], scores[:3])  # begin of image and image size, without guidance
    assert_close(mix_guided(logits)[:-1], scores[3:-1], GUIDED_TOLERANCE)
    assert_close(logits[0, -1], scores[-1])  # the end-of-turn token, without guidance
