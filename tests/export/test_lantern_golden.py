"""Targets in LANTERN's Hugging Face layout and its drafter, exported, against numbers of LANTERN's own classes."""

from pathlib import Path

import numpy as np
import pytest
from llamagen_golden import GUIDED, Arrays, Run, close, condition, golden, guide, manifest, rotary_table

INPUTS = {"c2i": {"class_ids": "class_ids"}, "t2i": {"caption_embeds": "caption_emb", "caption_mask": "emb_mask"}}
SCALE = 4.0


def visible(real: np.ndarray) -> np.ndarray:
    """Among nodes of which some are `real [rows, nodes]`: LANTERN's padded rows see all but padding in their future."""
    causal = np.tril(np.ones((real.shape[1],) * 2, bool))
    return np.where(real[:, :, None], causal & real[:, None], causal | real[:, None])


class Lantern:
    """An exported target and what LANTERN computed from the same folder."""

    def __init__(self, bundle: Path, kind: str) -> None:
        self.bundle, self.golden = bundle, golden(f"lantern-llamagen-hf/{kind}")
        self.prefix = condition(bundle, **{name: self.golden[array] for name, array in INPUTS[kind].items()})
        self.codes = np.load(bundle / "code_embeddings.npy")
        mask = self.golden.get("emb_mask", np.ones((1, self.prefix.shape[1]), np.int64))
        self.real = np.tile(mask > 0, (2, 1))  # the unconditional row has the conditional row's mask

    def start(self) -> tuple[Run, Arrays]:
        """After the prefill."""
        spec = manifest(self.bundle).target
        run = Run(self.bundle / "target.onnx", spec.num_kv_heads, spec.head_dim, spec.num_layers, 2)
        return run, run.step(visible(self.real), self.real, input_embeds=self.prefix)

    def feed(self, run: Run, tokens: np.ndarray, **layout: np.ndarray) -> Arrays:
        """The same codes in both rows."""
        return run.step(input_embeds=self.codes[np.tile(tokens, (2, 1))], **layout)


@pytest.fixture(scope="module", params=["c2i", "t2i"], ids="lantern-llamagen-hf-{}".format)
def lantern(request: pytest.FixtureRequest) -> Lantern:
    return Lantern(request.getfixturevalue(f"lantern_{request.param}_bundle"), request.param)


def test_the_prefill_is_reproduced_with_its_keys_and_values(lantern: Lantern) -> None:
    run, out = lantern.start()
    close(out["hidden_states"], lantern.golden["prefill_hidden"])
    close(out["logits"], lantern.golden["prefill_logits"])
    for part in ("key", "value"):
        for layer, expected in enumerate(lantern.golden[f"prefill_{part}s"]):
            close(run.past[f"{layer}.{part}"].transpose(1, 2, 0, 3), expected)


def test_codes_fed_one_by_one_are_reproduced(lantern: Lantern) -> None:
    run, _ = lantern.start()
    tokens = lantern.golden["decode_tokens"]
    steps = [lantern.feed(run, tokens[:, k : k + 1]) for k in range(tokens.shape[1])]
    close(np.concatenate([out["hidden_states"] for out in steps], 1), lantern.golden["decode_hidden"])
    close(np.concatenate([out["logits"] for out in steps], 1), lantern.golden["decode_logits"])


def test_a_tree_after_the_codes_is_reproduced(lantern: Lantern) -> None:
    run, _ = lantern.start()
    lantern.feed(run, lantern.golden["decode_tokens"])
    out = lantern.feed(
        run,
        lantern.golden["tree_tokens"],
        visible=lantern.golden["tree_mask"] > 0,
        positions=lantern.golden["tree_position_ids"],
    )
    close(out["hidden_states"], lantern.golden["tree_hidden"])
    close(out["logits"], lantern.golden["tree_logits"])
    close(guide(out["logits"], SCALE), lantern.golden["tree_logits_cfg4"], GUIDED)


def test_a_tree_that_reaches_past_the_last_cell_is_reproduced(lantern: Lantern) -> None:
    run, _ = lantern.start()
    lantern.feed(run, lantern.golden["late_tokens"])
    positions = lantern.golden["late_tree_position_ids"]
    assert positions.max() >= lantern.prefix.shape[1] + manifest(lantern.bundle).grid_rows ** 2
    out = lantern.feed(run, lantern.golden["tree_tokens"], visible=lantern.golden["tree_mask"] > 0, positions=positions)
    close(out["hidden_states"], lantern.golden["late_tree_hidden"])
    close(guide(out["logits"], SCALE), lantern.golden["late_tree_logits_cfg4"], GUIDED)


def test_the_rotary_table_is_the_published_one(lantern: Lantern) -> None:
    found, expected = rotary_table(lantern.bundle / "target.onnx"), lantern.golden["rope_table"]
    close(found[: len(expected)], expected, 1e-6)
    assert not found[len(expected) :].any()


def test_the_official_file_of_the_same_weights_gives_the_same_graph(lantern_t2i_bundle: Path, t2i_bundle: Path) -> None:
    ours, official = (manifest(bundle) for bundle in (lantern_t2i_bundle, t2i_bundle))
    own = {"name", "files", "provenance", "sampling"}
    assert ours.model_dump(exclude=own) == official.model_dump(exclude=own)
    for role in ("target", "condition", "code_embeddings"):
        assert ours.files[role].sha256 == official.files[role].sha256, role
    assert [source.role for source in ours.provenance.sources] == ["target", "target_config", "vq"]


def test_each_layout_keeps_its_own_order_of_filters(lantern_t2i_bundle: Path, t2i_bundle: Path) -> None:
    ours, official = (manifest(bundle).sampling for bundle in (lantern_t2i_bundle, t2i_bundle))
    assert ours.filter_order == "top-p, top-k"
    assert official.filter_order == "top-k, top-p"
    assert ours.model_copy(update={"filter_order": official.filter_order}) == official


# ---------------------------------------------------------------- the drafter


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


def test_a_plain_forward_of_the_drafter_is_reproduced(t2i_drafter_bundle: Path, arrays: Arrays) -> None:
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


def test_the_drafters_rotary_table_starts_one_row_later_and_ends_in_zeros(
    t2i_drafter_bundle: Path, arrays: Arrays
) -> None:
    found = rotary_table(t2i_drafter_bundle / "drafter.onnx")
    expected = arrays["rope_table"]
    close(found[: len(expected)], expected, 1e-6)
    assert not found[len(expected) :].any()


def test_the_target_graph_gives_the_hidden_states_the_drafter_was_run_on(
    t2i_drafter_bundle: Path, arrays: Arrays
) -> None:
    """One pass over the whole sequence."""
    prefix = condition(t2i_drafter_bundle, caption_embeds=arrays["caption_emb"], caption_mask=arrays["emb_mask"])
    codes = np.load(t2i_drafter_bundle / "code_embeddings.npy")[arrays["token_ids"][:, prefix.shape[1] :]]
    real = np.pad(np.tile(arrays["emb_mask"], (2, 1)) > 0, ((0, 0), (0, codes.shape[1])), constant_values=True)
    spec = manifest(t2i_drafter_bundle).target
    run = Run(t2i_drafter_bundle / "target.onnx", spec.num_kv_heads, spec.head_dim, spec.num_layers, 2)
    close(
        run.step(visible(real), input_embeds=np.concatenate([prefix, codes], 1))["hidden_states"],
        arrays["target_hidden"],
    )
