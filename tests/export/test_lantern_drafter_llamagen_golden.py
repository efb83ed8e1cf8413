"""The exported drafter graph against numbers of the published implementation."""

from pathlib import Path

import numpy as np
import pytest
from llamagen_golden import Arrays, Run, close, condition, golden, manifest, rotary_table


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    return golden("lantern-drafter-llamagen")


def drafter(bundle: Path) -> Run:
    spec = manifest(bundle).drafter
    assert spec is not None
    return Run(bundle / "drafter.onnx", spec.num_kv_heads, spec.head_dim, spec.num_layers, 2)


def slots(arrays: Arrays, start: int, end: int) -> Arrays:
    """Slot p reads token p + 1 and hidden state p."""
    return {
        "input_ids": arrays["token_ids"][:, start + 1 : end + 1],
        "target_hidden": np.ascontiguousarray(arrays["target_hidden"][:, start:end]),
    }


def test_a_plain_forward_is_reproduced(t2i_drafter_bundle: Path, arrays: Arrays) -> None:
    run, length = drafter(t2i_drafter_bundle), int(arrays["fwd_len"])
    out = run.step(**slots(arrays, 0, length))
    close(out["hidden_states"], arrays["fwd_hidden"])
    close(out["logits"], arrays["fwd_logits"])
    close(run.past["0.key"].transpose(1, 2, 0, 3), arrays["fwd_keys"])
    close(run.past["0.value"].transpose(1, 2, 0, 3), arrays["fwd_values"])
    more = run.step(**slots(arrays, length, length + 4))
    close(more["hidden_states"], arrays["fwd2_hidden"])


def test_the_cache_may_be_filled_in_pieces(t2i_drafter_bundle: Path, arrays: Arrays) -> None:
    run, length = drafter(t2i_drafter_bundle), int(arrays["fwd_len"])
    out = [run.step(**slots(arrays, start, min(start + 5, length))) for start in range(0, length, 5)]
    close(np.concatenate([o["hidden_states"] for o in out], 1), arrays["fwd_hidden"])


def test_the_rotary_table_starts_one_row_later_and_ends_in_zeros(t2i_drafter_bundle: Path, arrays: Arrays) -> None:
    found = rotary_table(t2i_drafter_bundle / "drafter.onnx")
    expected = arrays["rope_table"]
    close(found[: len(expected)], expected, 1e-6)
    assert not found[len(expected) :].any()


def test_the_target_graph_gives_the_hidden_states_the_drafter_was_run_on(
    t2i_drafter_bundle: Path, arrays: Arrays
) -> None:
    """One pass over the whole sequence, in which LANTERN's padded rows see all but padding in their future."""
    prefix = condition(t2i_drafter_bundle, caption_embeds=arrays["caption_emb"], caption_mask=arrays["emb_mask"])
    codes = np.load(t2i_drafter_bundle / "code_embeddings.npy")[arrays["token_ids"][:, prefix.shape[1] :]]
    real = np.pad(np.tile(arrays["emb_mask"], (2, 1)) > 0, ((0, 0), (0, codes.shape[1])), constant_values=True)
    causal = np.tril(np.ones((real.shape[1],) * 2, bool))
    visible = np.where(real[:, :, None], causal & real[:, None], causal | real[:, None])
    spec = manifest(t2i_drafter_bundle).target
    run = Run(t2i_drafter_bundle / "target.onnx", spec.num_kv_heads, spec.head_dim, spec.num_layers, 2)
    close(run.step(visible, input_embeds=np.concatenate([prefix, codes], 1))["hidden_states"], arrays["target_hidden"])
