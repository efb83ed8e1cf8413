"""LlamaGen's exported graphs against numbers of the published implementation, and of LANTERN's classes and drafter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from goldens import GUIDED, Arrays, Run, close, golden, guide, manifest
from numpy.typing import NDArray
from onnx import numpy_helper
from shared_goldens import ImageTokenizerGolden

from lantern_rt import Pipeline
from lantern_rt.export.compare import GraphFileSession

INPUTS = {"c2i": {"class_ids": "class_ids"}, "t2i": {"caption_embeds": "caption_emb", "caption_mask": "emb_mask"}}


def condition(bundle: Path, **inputs: NDArray[np.generic]) -> NDArray[np.float32]:
    """Prefix rows of all conditional rows, then all unconditional rows."""
    out = GraphFileSession(bundle / "condition.onnx").run(inputs)
    return np.concatenate([out["prefix_embeds"], out["uncond_embeds"]])


def rotary_table(path: Path) -> np.ndarray:
    weights = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    cos = weights["rotary.cos"]
    sin = weights["rotary.sin"]
    np.testing.assert_array_equal(cos[:, ::2], cos[:, 1::2])
    np.testing.assert_array_equal(sin[:, ::2], -sin[:, 1::2])
    return np.stack([cos[:, ::2], sin[:, 1::2]], -1)


class Target:
    """A target after its prefill, and what was recorded of it.

    lantern: padded nodes of a prefix see all but padding in their future, as LANTERN has it, instead of themselves
    only. guided: with unconditional rows, which have the conditional rows' masks.
    """

    def __init__(
        self, bundle: Path, folder: str, lantern: bool = False, guided: bool = True, masked: bool = True
    ) -> None:
        self.bundle = bundle
        self.golden = golden(folder)
        inputs = {name: self.golden[array] for name, array in INPUTS[folder[-3:]].items()}
        if not masked:
            inputs["caption_mask"] = np.ones_like(inputs["caption_mask"])
        self.copies = 2 if guided else 1
        images = len(next(iter(inputs.values())))
        self.prefix = condition(bundle, **inputs)[: self.copies * images]
        ones = np.ones((images, self.prefix.shape[1]), np.int64)
        real = np.tile(inputs.get("caption_mask", ones) > 0, (self.copies, 1))
        self.codes = np.load(bundle / "code_embeddings.npy")
        self.run = Run(bundle, rows=len(self.prefix))
        self.out = self.run.step(visible(real, lantern), real, input_embeds=self.prefix)

    def feed(self, tokens: np.ndarray, **layout: np.ndarray) -> Arrays:
        """The same codes `[images, nodes]` in the rows of an image."""
        return self.run.step(input_embeds=self.codes[np.tile(tokens, (self.copies, 1))], **layout)

    def forced(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Logits and hidden states that predict each of the recorded tokens."""
        fed = self.feed(self.golden["tokens"][:, :-1])
        logits, hidden = (np.concatenate([self.out[n][:, -1:], fed[n]], 1) for n in ("logits", "hidden_states"))
        return logits, hidden


def visible(real: np.ndarray, lantern: bool) -> np.ndarray:
    """Among nodes of a prefix, of which some are `real [rows, nodes]`."""
    causal = np.tri(real.shape[1], dtype=bool)
    if lantern:
        return np.where(real[:, :, None], causal & real[:, None], causal | real[:, None])
    return causal & real[:, None] | np.eye(real.shape[1], dtype=bool)


# ---------------------------------------------------------------- the official layout


@pytest.fixture(scope="module", params=["c2i", "t2i"])
def official(request: pytest.FixtureRequest) -> tuple[Path, str]:
    return request.getfixturevalue(f"{request.param}_bundle"), f"llamagen-{request.param}"


def test_teacher_forced_logits_and_hidden_states_are_reproduced(official: tuple[Path, str]) -> None:
    target = Target(*official)
    logits, hidden = target.forced()
    close(logits, target.golden["tf_logits"])
    close(hidden, target.golden["tf_hidden"])
    close(guide(logits, 4.0), target.golden["tf_logits_cfg4"], GUIDED)
    close(Target(*official, guided=False).forced()[0], target.golden["tf_logits_nocfg"])


def test_without_guidance_an_image_is_one_row_and_has_the_recorded_ids(
    c2i_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = Pipeline.from_bundle(c2i_bundle, threads=1)
    arrays = golden("llamagen-c2i")
    rows = []
    run = pipe.engines.target.run
    monkeypatch.setattr(
        pipe.engines.target, "run", lambda batch, cache: rows.append(len(batch.positions)) or run(batch, cache)
    )
    result = pipe(class_ids=arrays["class_ids"].tolist(), cfg_scale=1.0, temperature=0, method="ar")
    np.testing.assert_array_equal(np.reshape(result.codes, (3, -1)), arrays["greedy_ids_cfg1"])
    assert set(rows) == {len(arrays["class_ids"])}


def test_padding_is_reproduced_zeroed_and_counts_where_the_mask_says_so(t2i_bundle: Path) -> None:
    target = Target(t2i_bundle, "llamagen-t2i")
    arrays = target.golden
    close(target.out["logits"], arrays["prefill_logits"])
    close(target.out["hidden_states"], arrays["prefill_hidden"])
    close(Target(t2i_bundle, "llamagen-t2i", masked=False).forced()[0], arrays["tf_logits_nomask"])
    noisy = np.where(arrays["emb_mask"][..., None] > 0, arrays["caption_emb"], np.float32(7))
    close(condition(t2i_bundle, caption_embeds=noisy, caption_mask=arrays["emb_mask"]), target.prefix, 0)


@pytest.mark.parametrize(
    ("fixture", "role", "folder"),
    [
        ("c2i_bundle", "target", "llamagen-c2i"),
        ("t2i_bundle", "target", "llamagen-t2i"),
        ("lantern_c2i_bundle", "target", "lantern-llamagen-hf/c2i"),
        ("lantern_t2i_bundle", "target", "lantern-llamagen-hf/t2i"),
        ("t2i_drafter_bundle", "drafter", "lantern-drafter-llamagen"),  # which starts one row later
    ],
)
def test_the_rotary_table_is_the_published_one_and_ends_in_zeros(
    request: pytest.FixtureRequest, fixture: str, role: str, folder: str
) -> None:
    found = rotary_table(request.getfixturevalue(fixture) / f"{role}.onnx")
    expected = golden(folder)["rope_table"]
    close(found[: len(expected)], expected, 1e-6)
    assert len(found) >= len(expected) + 10
    assert not found[len(expected) :].any()


def test_opset_and_ir_version_stay_within_what_runtimes_read(t2i_drafter_bundle: Path) -> None:
    for path in t2i_drafter_bundle.glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        assert model.ir_version <= 10
        assert [(o.domain, o.version <= 23) for o in model.opset_import] == [("", True)]
        onnx.checker.check_model(str(path), full_check=True)


# ---------------------------------------------------------------- LANTERN's layout


@pytest.fixture(params=["c2i", "t2i"])
def lantern(request: pytest.FixtureRequest) -> Target:
    bundle = request.getfixturevalue(f"lantern_{request.param}_bundle")
    return Target(bundle, f"lantern-llamagen-hf/{request.param}", lantern=True)


def test_the_prefill_is_reproduced_with_its_keys_and_values(lantern: Target) -> None:
    close(lantern.out["hidden_states"], lantern.golden["prefill_hidden"])
    close(lantern.out["logits"], lantern.golden["prefill_logits"])
    for part in ("key", "value"):
        for layer, expected in enumerate(lantern.golden[f"prefill_{part}s"]):
            close(lantern.run.past[f"{layer}.{part}"].transpose(1, 2, 0, 3), expected)


def test_codes_one_by_one_and_a_tree_behind_them_are_reproduced(lantern: Target) -> None:
    arrays = lantern.golden
    tokens = lantern.golden["decode_tokens"]
    steps = [lantern.feed(tokens[:, k : k + 1]) for k in range(tokens.shape[1])]
    close(np.concatenate([out["hidden_states"] for out in steps], 1), arrays["decode_hidden"])
    close(np.concatenate([out["logits"] for out in steps], 1), arrays["decode_logits"])
    tree = {"visible": arrays["tree_mask"] > 0, "positions": arrays["tree_position_ids"]}
    out = lantern.feed(arrays["tree_tokens"], **tree)
    close(out["hidden_states"], arrays["tree_hidden"])
    close(out["logits"], arrays["tree_logits"])
    close(guide(out["logits"], 4.0), arrays["tree_logits_cfg4"], GUIDED)


def test_a_tree_that_reaches_past_the_last_cell_is_reproduced(lantern: Target) -> None:
    arrays = lantern.golden
    positions = lantern.golden["late_tree_position_ids"]
    assert positions.max() >= lantern.prefix.shape[1] + manifest(lantern.bundle).grid_rows ** 2
    lantern.feed(arrays["late_tokens"])
    out = lantern.feed(arrays["tree_tokens"], visible=arrays["tree_mask"] > 0, positions=positions)
    close(out["hidden_states"], arrays["late_tree_hidden"])
    close(guide(out["logits"], 4.0), arrays["late_tree_logits_cfg4"], GUIDED)


def test_the_official_file_of_the_same_weights_gives_the_same_graphs_with_its_own_order_of_filters(
    lantern_t2i_bundle: Path, t2i_bundle: Path
) -> None:
    ours, official = (manifest(bundle) for bundle in (lantern_t2i_bundle, t2i_bundle))
    own = {"name", "files", "provenance", "sampling"}
    assert ours.model_dump(exclude=own) == official.model_dump(exclude=own)
    for role in ("target", "condition", "code_embeddings"):
        assert ours.files[role].sha256 == official.files[role].sha256, role
    assert [source.role for source in ours.provenance.sources] == ["target_config", "target", "vq"]
    assert (ours.sampling.filter_order, official.sampling.filter_order) == ("top-p, top-k", "top-k, top-p")
    assert ours.sampling.model_copy(update={"filter_order": "top-k, top-p"}) == official.sampling


# ---------------------------------------------------------------- the drafter


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    return golden("lantern-drafter-llamagen")


def slots(arrays: Arrays, start: int, end: int) -> Arrays:
    """Slot p reads token p + 1 and hidden state p."""
    return {
        "input_ids": arrays["token_ids"][:, start + 1 : end + 1],
        "target_hidden": arrays["target_hidden"][:, start:end],
    }


def test_a_plain_forward_of_the_drafter_is_reproduced(t2i_drafter_bundle: Path, arrays: Arrays) -> None:
    run = Run(t2i_drafter_bundle, "drafter", 2)
    length = int(arrays["fwd_len"])
    out = run.step(**slots(arrays, 0, length))
    close(out["hidden_states"], arrays["fwd_hidden"])
    close(out["logits"], arrays["fwd_logits"])
    close(run.past["0.key"].transpose(1, 2, 0, 3), arrays["fwd_keys"])
    close(run.past["0.value"].transpose(1, 2, 0, 3), arrays["fwd_values"])
    more = run.step(**slots(arrays, length, length + 4))
    close(more["hidden_states"], arrays["fwd2_hidden"])


def test_the_drafters_cache_may_be_filled_in_pieces(t2i_drafter_bundle: Path, arrays: Arrays) -> None:
    run = Run(t2i_drafter_bundle, "drafter", 2)
    length = int(arrays["fwd_len"])
    out = [run.step(**slots(arrays, start, min(start + 5, length))) for start in range(0, length, 5)]
    close(np.concatenate([o["hidden_states"] for o in out], 1), arrays["fwd_hidden"])


def test_the_target_graph_gives_the_hidden_states_the_drafter_was_run_on(
    t2i_drafter_bundle: Path, arrays: Arrays
) -> None:
    prefix = condition(t2i_drafter_bundle, caption_embeds=arrays["caption_emb"], caption_mask=arrays["emb_mask"])
    codes = np.load(t2i_drafter_bundle / "code_embeddings.npy")[arrays["token_ids"][:, prefix.shape[1] :]]
    real = np.pad(np.tile(arrays["emb_mask"], (2, 1)) > 0, ((0, 0), (0, codes.shape[1])), constant_values=True)
    out = Run(t2i_drafter_bundle, rows=2).step(visible(real, True), input_embeds=np.concatenate([prefix, codes], 1))
    close(out["hidden_states"], arrays["target_hidden"])


# ---------------------------------------------------------------- the image tokenizer


@pytest.fixture(scope="module")
def tokenizer(c2i_bundle: Path) -> tuple[Path, Arrays]:
    return c2i_bundle, golden("llamagen-vq")


class TestImageTokenizer(ImageTokenizerGolden):
    pass
