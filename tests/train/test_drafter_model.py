"""Test the drafter in training: forward passes, losses, saved folders, and agreement with published drafters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lantern_rt import open_bundle

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")

from family_readers import read_anole, read_llamagen_transformer  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from lantern_rt.export.models.decoder import DecoderConfig  # noqa: E402
from lantern_rt.export.models.eagle import EagleDrafter, read_drafter  # noqa: E402
from lantern_rt.train.drafter.batches import TrainingBatch  # noqa: E402
from lantern_rt.train.drafter.folder import convert_to_lantern_weights, save_drafter  # noqa: E402
from lantern_rt.train.drafter.losses import compute_guided_logits, compute_kl_loss, compute_probability_overlap  # noqa: E402
from lantern_rt.train.drafter.model import make_drafter, predict_draft_states  # noqa: E402
from lantern_rt.train.drafter.target import TrainingTarget, read_training_target  # noqa: E402

DATA = Path(__file__).parent.parent / "data"


def make_random_drafter(**changes: Any) -> EagleDrafter:
    # Two layers, so that the output of the first layer matters, too.
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "num_layers": 2, "input_norm": False} | changes
    config = DecoderConfig(
        hidden_size=32, intermediate_size=48, vocab_size=20, grid=4, prefix=2, final_norm=False, **sizes
    )
    torch.manual_seed(0)
    drafter = EagleDrafter(config, torch.nn.Linear(32, 20, bias=False), bias=True).eval()
    for weight in drafter.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return drafter


class DecodingReference:
    """Reference for the training pass: the drafter runs as in decoding, one draft token per pass after the first."""

    def __init__(self, drafter: EagleDrafter, tokens: torch.Tensor, states: torch.Tensor) -> None:
        self.drafter = drafter
        self.tokens = tokens
        self.states = states

    def compute_draft_state(self, committed: int, depth: int) -> torch.Tensor:
        """Return the drafter's hidden state at the last token of a chain of draft tokens."""
        sizes = self.drafter.config
        past = [torch.zeros(0, 1, sizes.num_kv_heads, sizes.head_dim)] * 2 * sizes.num_layers
        start = 0
        end = committed
        input_states = self.states[:, :committed]
        for _ in range(depth + 1):
            nodes = end - start
            mask = torch.full((1, 1, nodes, end), -1e9).triu(start + 1)
            positions = torch.arange(start, end)[None]
            _, hidden, *new_kv = self.drafter(self.tokens[:, start:end], input_states, positions, mask, *past)
            past = [torch.cat(pair) for pair in zip(past, new_kv, strict=True)]
            start = end
            end = end + 1
            input_states = hidden[:, -1:]
        return hidden[0, -1]


@pytest.mark.parametrize(
    "changes",
    [{}, {"rotary": "sequence", "rope_style": "half", "query_key_norm": True, "input_norm": True, "num_kv_heads": 4}],
)
def test_predictions_at_every_depth_agree_with_decoding(changes: dict[str, Any]) -> None:
    drafter = make_random_drafter(**changes)
    slots = 12
    tokens = torch.randint(20, (1, slots))
    states = torch.randn(1, slots, 32)
    with torch.no_grad():
        decoding = DecodingReference(drafter, tokens, states)
        for depth, hidden in enumerate(predict_draft_states(drafter, tokens, states, 4)):
            for slot in range(depth, slots):
                expected = decoding.compute_draft_state(slot + 1 - depth, depth)
                torch.testing.assert_close(hidden[0, slot], expected, atol=2e-4, rtol=1e-3)


def test_every_trainable_weight_of_the_drafter_gets_a_gradient() -> None:
    drafter = make_random_drafter()
    tokens = torch.randint(20, (2, 9))
    states = torch.randn(2, 9, 32, requires_grad=True)
    *_, last = predict_draft_states(drafter, tokens, states, 3)
    last[:, 4:].sum().backward()
    gradients = {name: weight.grad for name, weight in drafter.named_parameters() if not name.startswith("head.")}
    assert [name for name, grad in gradients.items() if grad is None or not grad.any()] == []


def set_published_size(target: TrainingTarget) -> TrainingTarget:
    """Set the intermediate size to 128, the size of the published test drafters, which differs from their targets."""
    return replace(target, config=replace(target.config, intermediate_size=128))


def test_training_puts_all_tensors_on_one_device() -> None:
    """Compute a training step on the device `meta`, where an operation that also has a CPU tensor fails."""
    drafter = make_random_drafter().to("meta")
    tokens = torch.zeros(4, 9, dtype=torch.int64, device="meta")
    states = torch.zeros(4, 10, 32, device="meta")
    batch = TrainingBatch(tokens, states, torch.zeros(4, dtype=torch.int64, device="meta"), 2, 10)
    head = torch.zeros(20, 32, device="meta")
    for depth, hidden in enumerate(predict_draft_states(drafter, batch.tokens, batch.states[:, :-1], 3)):
        logits = compute_guided_logits(batch.select_predictions(hidden, depth), head, 3.0)
        p = compute_guided_logits(batch.select_target_states(depth), head, 3.0).softmax(-1)
        assert logits.shape == p.shape == (2, 9 - depth, 20)
        compute_kl_loss(p, logits).backward(retain_graph=True)
    assert drafter.fc.weight.grad.device.type == "meta"


def test_the_loss_is_the_divergence_the_overlap_the_acceptance() -> None:
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    assert compute_kl_loss(p, p.log()).item() == pytest.approx(0, abs=1e-6)
    # The divergence from the uniform distribution is ln 4 minus the entropy of p.
    assert compute_kl_loss(p, torch.zeros(1, 4)).item() == pytest.approx(1.38629 - 1.14214, abs=1e-4)
    assert compute_probability_overlap(p, torch.full((1, 4), 0.25)).item() == pytest.approx(0.7)


def test_guidance_mixes_two_rows_and_leaves_a_single_one() -> None:
    hidden = torch.randn(2, 2, 5, 3)
    head = torch.randn(7, 3)
    cond, uncond = (hidden @ head.T).unbind(1)
    torch.testing.assert_close(compute_guided_logits(hidden, head, 3.0), uncond + 3 * (cond - uncond))
    torch.testing.assert_close(compute_guided_logits(hidden[:, :1], head, 3.0), cond)


def make_drafter_with_weights(target: TrainingTarget, published: EagleDrafter) -> EagleDrafter:
    drafter = make_drafter(target, seed=1)
    drafter.load_state_dict({name: weight.clone() for name, weight in published.state_dict().items()})
    return drafter


def copy_weights(drafter: EagleDrafter) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in drafter.state_dict().items()}


@pytest.fixture(scope="module")
def t2i_target(t2i_bundle: Path) -> TrainingTarget:
    return set_published_size(read_training_target(open_bundle(t2i_bundle)))


@pytest.fixture(scope="module")
def anole_target(anole_bundle: Path) -> TrainingTarget:
    return set_published_size(read_training_target(open_bundle(anole_bundle)))


def test_the_published_llamagen_drafter_has_its_outputs(t2i_target: TrainingTarget, tmp_path: Path) -> None:
    config = DATA / "llamagen-t2i/config.json"
    target = read_llamagen_transformer(DATA / "llamagen-t2i/t2i_tiny.pt", config=config).decoder
    golden = read_drafter(DATA / "lantern-drafter-llamagen", target).drafter
    assert t2i_target.config == golden.config
    save_drafter(make_drafter_with_weights(t2i_target, golden), tmp_path / "saved", t2i_target.config_fields)
    reloaded = read_drafter(tmp_path / "saved", target).drafter
    with np.load(DATA / "lantern-drafter-llamagen/golden.npz") as arrays:
        length = int(arrays["fwd_len"])
        tokens = torch.from_numpy(arrays["token_ids"][:, 1:])
        states = torch.from_numpy(arrays["target_hidden"])
        for drafter in (reloaded, make_drafter_with_weights(t2i_target, golden)):
            with torch.no_grad():
                (hidden,) = predict_draft_states(drafter, tokens[:, :length], states[:, :length], 1)
                logits = hidden @ t2i_target.head.T
            np.testing.assert_allclose(hidden, arrays["fwd_hidden"], atol=1e-4)
            np.testing.assert_allclose(logits, arrays["fwd_logits"], atol=1e-4)


def test_a_saved_drafter_has_the_published_names_and_settings(
    t2i_target: TrainingTarget, anole_target: TrainingTarget, tmp_path: Path
) -> None:
    for target, published in ((t2i_target, "lantern-drafter-llamagen"), (anole_target, "anole/drafter")):
        folder = tmp_path / published
        save_drafter(make_drafter(target, 0), folder, target.config_fields)
        weights = torch.load(DATA / published / "pytorch_model.bin", weights_only=True)
        saved = load_file(folder / "model.safetensors")
        assert {name: weight.shape for name, weight in saved.items()} == {n: w.shape for n, w in weights.items()}
        published_config, config = (
            json.loads((path / "config.json").read_text()) for path in (DATA / published, folder)
        )
        shared = published_config.keys() & config.keys() - {"max_position_embeddings"}
        assert {name: config[name] for name in shared} == {name: published_config[name] for name in shared}
        assert len(shared) >= 12


def test_the_published_anole_drafter_is_saved_with_its_weights(anole_target: TrainingTarget, tmp_path: Path) -> None:
    target: Any = read_anole(DATA / "anole/target", DATA / "chameleon-vqgan").graphs[0].module
    embeddings = load_file(DATA / "anole/target/model.safetensors")["model.embed_tokens.weight"]
    drafting = read_drafter(DATA / "anole/drafter", target, len(embeddings))
    assert anole_target.config == drafting.drafter.config
    assert anole_target.code_offset == 4
    torch.testing.assert_close(anole_target.embeddings, embeddings.float())
    drafter = make_drafter_with_weights(anole_target, drafting.drafter)
    save_drafter(drafter, tmp_path / "saved", anole_target.config_fields)
    reloaded = read_drafter(tmp_path / "saved", target, len(embeddings)).drafter
    assert copy_weights(reloaded).keys() == copy_weights(drafting.drafter).keys()
    for name, weight in copy_weights(drafting.drafter).items():
        assert torch.equal(copy_weights(reloaded)[name], weight), name


def test_a_new_drafter_depends_only_on_the_seed(t2i_target: TrainingTarget) -> None:
    weights, same_seed, second_seed = (convert_to_lantern_weights(make_drafter(t2i_target, seed)) for seed in (1, 1, 2))
    assert all(torch.equal(weights[name], same_seed[name]) for name in weights)
    assert not torch.equal(weights["layers.0.mlp.up_proj.weight"], second_seed["layers.0.mlp.up_proj.weight"])
    # The last 64 inputs of `fc` are the hidden state.
    torch.testing.assert_close(weights["fc.weight"][:, 64:], torch.eye(64))
    torch.testing.assert_close(weights["embed_tokens.weight"], t2i_target.embeddings)


def test_every_precision_gives_the_same_head_up_to_rounding(
    t2i_bundle: Path, t2i_half_bundle: Path, t2i_bfloat16_bundle: Path, t2i_int8_bundle: Path
) -> None:
    exact = read_training_target(open_bundle(t2i_bundle))
    for bundle, bound in ((t2i_half_bundle, 1e-3), (t2i_bfloat16_bundle, 8e-3), (t2i_int8_bundle, 1e-3)):
        rounded = read_training_target(open_bundle(bundle))
        assert rounded.config == exact.config
        torch.testing.assert_close(rounded.head, exact.head, atol=1e-3, rtol=bound)
        torch.testing.assert_close(rounded.embeddings, exact.embeddings, atol=1e-3, rtol=bound)
