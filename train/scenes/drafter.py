"""Training of the scenes drafter: one EAGLE layer that imitates the guided target.

Two batches of three are of pictures that the target drew itself (`samples.py`), where there are any.

Both rows of guidance are run, and the loss compares guided distributions, since those are what drafting
uses. Part of the hidden states it reads are its own predictions, so that it keeps its head deeper in a
tree.
"""

from __future__ import annotations

import copy
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import CheckpointError
from ...export.models.decoder import Decoder, DecoderConfig
from .checkpoints import load_checkpoint, save_checkpoint
from .data import draw_scenes
from .model import CONFIG, ScenesTarget, mixed_precision, saved_config
from .muon import Muon
from .samples import read_samples
from .target import FRESH_SEED, SHARD, batches, load_target, tokenise
from .text import SLOTS, encode_caption
from .vocabulary import describe
from .vq import load_vq

CFG_SCALE = 3.0
RATE = 0.01  # of Muon
OWN_SHARE = 0.4  # of the hidden states that are the drafter's own predictions


def drafter_config(target: DecoderConfig) -> DecoderConfig:
    """The one layer that drafts for a target of this size."""
    return replace(target, num_layers=1, prefix=SLOTS - 1, input_norm=False, final_norm=False)


class ScenesDrafter(nn.Module):
    """fc([code embedding; hidden state]) -> one layer -> predicted hidden state; the head is the target's."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config, width = config, config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.fc = nn.Linear(2 * width, width)
        self.body = Decoder(config)
        del self.body.head
        for name, weight in self.body.named_parameters():
            if weight.ndim == 2:
                spread = weight.shape[1] ** -0.5
                nn.init.normal_(weight, std=spread * (0.3 if name.endswith(("out.weight", "down.weight")) else 1.0))
        with torch.no_grad():  # begin by handing the hidden state on
            self.fc.weight[:, width:] = torch.eye(width)
            self.fc.weight[:, :width] *= 0.5

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Predicted hidden states `[rows, slots, width]` of slots from the first on; slot p reads code p + 1."""
        return self.body.full(self.fc(torch.cat([self.embed_tokens(tokens), hidden], -1)))


def slot_tokens(codes: Tensor) -> Tensor:
    """Codes read by each slot, `[rows, 24 - 1 + 256]`: zeros under the prefix."""
    return F.pad(codes, (SLOTS - 1, 0))


@torch.no_grad()
def target_states(target: ScenesTarget, captions: Tensor, codes: Tensor) -> Tensor:
    """Hidden states `[2 * rows, 24 + 256, width]` of prefix and codes: conditional rows, then unconditional."""
    count = len(codes)
    dropped = torch.arange(2 * count, device=codes.device) >= count
    prefix = target.prefix(captions.repeat(2, 1), dropped)
    inputs = F.embedding(codes.repeat(2, 1), target.code_embedding())
    return target.decoder.full(torch.cat([prefix, inputs], 1))


def guided_logits(hidden: Tensor, head: Tensor) -> Tensor:
    """Guided logits `[rows, n, vocabulary]` of conditional and unconditional hidden states."""
    cond, uncond = (hidden @ head.T).chunk(2)
    return uncond + CFG_SCALE * (cond - uncond)


@torch.no_grad()
def evaluate_drafter(model: ScenesDrafter, target: ScenesTarget, captions: Tensor, codes: Tensor) -> dict[str, float]:
    """Overlap sum min(p, q), and how often the target's arg-max is among the drafter's first 1 and 3.

    "deep" is the overlap where every hidden state but the prefix's is the drafter's own prediction.
    """
    head = target.code_head()
    states, tokens = target_states(target, captions, codes), slot_tokens(codes).repeat(2, 1)
    first = model(tokens, states[:, :-1])
    own = torch.cat([states[:, :SLOTS], first[:, SLOTS - 1 : -1]], 1)
    deep, guess = model(tokens, own)[:, SLOTS - 1 :], first[:, SLOTS - 1 :]  # what is predicted for the codes
    wanted, drafted = guided_logits(states[:, SLOTS:], head), guided_logits(guess, head)
    best, chances = wanted.argmax(-1, keepdim=True), wanted.softmax(-1)
    return {
        "overlap": torch.minimum(chances, drafted.softmax(-1)).sum(-1).mean().item(),
        "deep": torch.minimum(chances, guided_logits(deep, head).softmax(-1)).sum(-1).mean().item(),
        "top-1": (drafted.argmax(-1, keepdim=True) == best).float().mean().item(),
        "top-3": (drafted.topk(3).indices == best).any(-1).float().mean().item(),
    }


@torch.no_grad()
def own_states(target: ScenesTarget, captions: Tensor, codes: Tensor, batch: int = 16) -> Tensor:
    """`target_states` of many pictures, kept in half precision: float16 `[pictures, 2, 24 + 256, width]`."""
    parts = []
    for i in range(0, len(codes), batch):
        with mixed_precision(codes.device):
            states = target_states(target, captions[i : i + batch], codes[i : i + batch])
        parts.append(states.view(2, -1, *states.shape[1:]).transpose(0, 1).half())
    return torch.cat(parts) if parts else torch.zeros(0)


def disturb(given: Tensor, predicted: Tensor) -> Tensor:
    """Hidden states to train on: some replaced by what the drafter predicted for their position, all slightly noisy.

    given: `[rows, slots, width]`, the target's; predicted: the same shape, slot p's prediction for position p + 1.
    """
    own = F.pad(predicted[:, :-1], (0, 0, 1, 0))
    replaced = torch.rand(given.shape[:2], device=given.device) < OWN_SHARE
    replaced[:, :SLOTS] = False
    mixed = torch.where(replaced[..., None], own, given)
    noise: Tensor = (torch.rand_like(mixed) - 0.5) * 0.1 * given.std()
    return mixed + noise


def train_drafter(
    work: Path, minutes: float, batch: int = 12, seed: int = 3, device: str = "cpu", shard: int = SHARD
) -> None:
    """Train (or go on training) for `minutes`; writes the average weights to `work/drafter.pt` every three minutes.

    CheckpointError if the drafter that is there is of another size than the target.

    Every batch gives two losses from one run of the target: one where some hidden states are the drafter's own
    predictions, one where some are predictions made from such predictions, as deep in a tree.
    """
    torch.manual_seed(seed)
    vq, target = load_vq(work).to(device), load_target(work).to(device)
    config, path = drafter_config(target.config), work / "drafter.pt"
    model = ScenesDrafter(config).to(device)
    head = target.code_head().detach()
    seen = 0
    if path.exists():
        state = _read(path, config)
        model.load_state_dict(state["model"])
        seen = state["seen"]
    else:
        model.embed_tokens.weight.data.copy_(target.code_embedding().detach())
    average = copy.deepcopy(model)
    matrices = [w for name, w in model.named_parameters() if w.ndim == 2 and name != "embed_tokens.weight"]
    others = [w for w in model.parameters() if not any(w is m for m in matrices)]
    muon, adam = Muon(matrices, RATE), torch.optim.AdamW(others, 1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    drawn_captions, drawn_codes = (torch.from_numpy(array).to(device) for array in read_samples(work))
    drawn_states = own_states(target, drawn_captions, drawn_codes)
    rng = np.random.default_rng(8)
    fresh_captions = torch.from_numpy(
        np.stack([encode_caption(describe(scene, rng, complete=True)) for scene in draw_scenes(64, FRESH_SEED)])
    ).to(device)
    fresh = torch.from_numpy(tokenise(vq, 64, FRESH_SEED).astype(np.int64)).to(device)
    rendered = batches(work, vq, batch, seen, shard)

    def predict(tokens: Tensor, states: Tensor) -> Tensor:
        with mixed_precision(device):
            predicted: Tensor = model(tokens, states)
        return predicted.float()

    def save(**more: Any) -> None:
        save_checkpoint(path, {"model": average.state_dict(), "seen": seen, "config": asdict(config), **more})

    step, start = 0, time.monotonic()
    saved = said = start
    while (passed := (time.monotonic() - start) / (60 * minutes)) < 1:
        rate = min(1.0, (step + 1) / 40, (1 - passed) / 0.6)
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = RATE * rate, 1e-3 * rate
        if step % 3 and len(drawn_codes):
            chosen = torch.randint(len(drawn_codes), (batch,), device=device)
            codes = drawn_codes[chosen]
            states = drawn_states[chosen].transpose(0, 1).flatten(0, 1).float()
        else:
            captions, codes, seen = next(rendered)
            codes = codes.to(device)
            with mixed_precision(device):
                states = target_states(target, captions.to(device), codes)
        tokens = slot_tokens(codes).repeat(2, 1)
        given, wanted = states[:, :-1], states[:, 1:]
        with torch.no_grad():
            goal = guided_logits(wanted[:, SLOTS - 1 :], head).softmax(-1)
            predicted = predict(tokens, given)
        muon.zero_grad(set_to_none=True)
        adam.zero_grad(set_to_none=True)
        for _ in range(2):
            predicted = predict(tokens, disturb(given, predicted.detach()))
            drafted = guided_logits(predicted[:, SLOTS - 1 :], head)
            loss = -(goal * drafted.log_softmax(-1)).sum(-1).mean() + F.smooth_l1_loss(predicted, wanted)
            torch.autograd.backward(loss / 2)
        torch.nn.utils.clip_grad_norm_(others, 0.5)
        muon.step()
        adam.step()
        step += 1
        with torch.no_grad():
            for kept, current in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(current, 1 - min(0.99, (step + 1) / (step + 20)))
        now = time.monotonic()
        if now - said > 60:
            said = now
            scores = evaluate_drafter(average, target, fresh_captions[:32], fresh[:32])
            print(f"drafter {now - start:5.0f} s  step {step}  loss {loss.item():.3f}  {_line(scores)}", flush=True)
        if now - saved > 180:
            saved = now
            save()
    scores = evaluate_drafter(average, target, fresh_captions, fresh)
    save(scores=scores)
    print(f"drafter done: {step} steps of {batch} pictures, {seen} rendered  {_line(scores)}")


def load_drafter(work: Path, target: DecoderConfig) -> ScenesDrafter:
    """The trained drafter of a work folder, which must be of the target's size."""
    model = ScenesDrafter(drafter_config(target))
    model.load_state_dict(_read(work / "drafter.pt", model.config)["model"])
    return model.eval()


def _read(path: Path, config: DecoderConfig) -> dict[str, Any]:
    """The checkpoint of a drafter of this size; CheckpointError if it is of another."""
    state = load_checkpoint(path)
    if (found := saved_config(state, drafter_config(CONFIG))) != config:
        raise CheckpointError(
            f"{path}: found a drafter of width {found.hidden_size}, expected {config.hidden_size}, that of target.pt; "
            "remove the file, or give another --work"
        )
    return state


def _line(scores: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in scores.items())
