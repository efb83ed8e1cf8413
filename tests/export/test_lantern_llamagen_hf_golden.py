"""Targets exported from LANTERN's Hugging Face layout against numbers of LANTERN's own target class."""

from pathlib import Path

import numpy as np
import pytest
from llamagen_golden import GUIDED, Arrays, Run, close, condition, golden, guide, manifest, rotary_table

INPUTS = {"c2i": {"class_ids": "class_ids"}, "t2i": {"caption_embeds": "caption_emb", "caption_mask": "emb_mask"}}
SCALE = 4.0


class Lantern:
    """An exported target and what LANTERN computed from the same folder."""

    def __init__(self, bundle: Path, kind: str) -> None:
        self.bundle, self.golden = bundle, golden(f"lantern-llamagen-hf/{kind}")
        self.prefix = condition(bundle, **{name: self.golden[array] for name, array in INPUTS[kind].items()})
        self.codes = np.load(bundle / "code_embeddings.npy")
        mask = self.golden.get("emb_mask", np.ones((1, self.prefix.shape[1]), np.int64))
        self.real = np.tile(mask > 0, (2, 1))  # the unconditional row has the conditional row's mask

    def start(self) -> tuple[Run, Arrays]:
        """After the prefill, in which LANTERN's padded rows see all but padding in their future."""
        spec = manifest(self.bundle).target
        run = Run(self.bundle / "target.onnx", spec.num_kv_heads, spec.head_dim, spec.num_layers, 2)
        causal = np.tril(np.ones((self.prefix.shape[1],) * 2, bool))
        visible = np.where(self.real[:, :, None], causal & self.real[:, None], causal | self.real[:, None])
        return run, run.step(visible, self.real, input_embeds=self.prefix)

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
