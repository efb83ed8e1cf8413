"""Training of the scenes drafter: one EAGLE layer that imitates the guided target.

Every other batch is of pictures that the target drew itself (`samples.py`), where there are any.

Both rows of guidance are run, and the loss compares guided distributions, since those are what drafting
uses. Part of the hidden states it reads are its own predictions, so that it keeps its head deeper in a
tree. Does not know decoding or the bundle.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...export.decoder import Decoder
from .checkpoints import load_checkpoint, save_checkpoint
from .data import draw_scenes
from .model import CONFIG, ScenesTarget
from .samples import read_samples
from .target import FRESH_SEED, batches, load_target, tokenise
from .text import SLOTS, encode_caption
from .vocabulary import describe
from .vq import load_vq

CFG_SCALE = 3.0
DRAFTER_CONFIG = replace(CONFIG, layers=1, prefix=SLOTS - 1, input_norm=False, final_norm=False)


class ScenesDrafter(nn.Module):
    """fc([code embedding; hidden state]) -> one layer -> predicted hidden state; the head is the target's."""

    def __init__(self) -> None:
        super().__init__()
        width = DRAFTER_CONFIG.width
        self.embed_tokens = nn.Embedding(DRAFTER_CONFIG.vocabulary, width)
        self.fc = nn.Linear(2 * width, width)
        self.body = Decoder(DRAFTER_CONFIG)
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
    """Overlap sum min(p, q), and how often the target's arg-max is among the drafter's first 1 and 3."""
    head = target.code_head()
    states = target_states(target, captions, codes)
    guess = model(slot_tokens(codes).repeat(2, 1), states[:, :-1])[:, SLOTS - 1 :]  # predicts states of the codes
    wanted, drafted = guided_logits(states[:, SLOTS:], head), guided_logits(guess, head)
    best = wanted.argmax(-1, keepdim=True)
    return {
        "overlap": torch.minimum(wanted.softmax(-1), drafted.softmax(-1)).sum(-1).mean().item(),
        "top-1": (drafted.argmax(-1, keepdim=True) == best).float().mean().item(),
        "top-3": (drafted.topk(3).indices == best).any(-1).float().mean().item(),
    }


def train_drafter(work: Path, minutes: float, batch: int = 12, seed: int = 3, device: str = "cpu") -> None:
    """Train (or go on training) for `minutes`; writes `work/drafter.pt` every three minutes."""
    torch.manual_seed(seed)
    vq, target = load_vq(work).to(device), load_target(work).to(device)
    model, path = ScenesDrafter().to(device), work / "drafter.pt"
    head = target.code_head().detach()
    seen = 0
    if path.exists():
        state = load_checkpoint(path)
        model.load_state_dict(state["model"])
        seen = state["seen"]
    else:
        model.embed_tokens.weight.data.copy_(target.code_embedding().detach())
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    own_captions, own_codes = (torch.from_numpy(array) for array in read_samples(work))
    rng = np.random.default_rng(8)
    fresh_captions = torch.from_numpy(
        np.stack([encode_caption(describe(scene, rng, complete=True)) for scene in draw_scenes(64, FRESH_SEED)])
    ).to(device)
    fresh = torch.from_numpy(tokenise(vq, 64, FRESH_SEED).astype(np.int64)).to(device)
    start = saved = said = time.monotonic()
    for step, (captions, codes, seen) in enumerate(batches(work, vq, batch, seen)):  # noqa: B020
        now = time.monotonic()
        passed = (now - start) / (60 * minutes)
        if passed >= 1:
            break
        optimiser.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / 40, (1 - passed) / 0.6)
        if step % 2 and len(own_codes):
            chosen = torch.randint(len(own_codes), (batch,))
            captions, codes = own_captions[chosen], own_codes[chosen]
        captions, codes = captions.to(device), codes.to(device)
        states = target_states(target, captions, codes)
        tokens = slot_tokens(codes).repeat(2, 1)
        given, wanted = states[:, :-1], states[:, 1:]
        with torch.no_grad():
            own = F.pad(model(tokens, given)[:, :-1], (0, 0, 1, 0))  # what slot p - 1 predicted for position p
            mixed = torch.where(torch.rand(given.shape[:2], device=device)[..., None] < 0.35, own, given)
            mixed[:, :SLOTS] = given[:, :SLOTS]
            mixed = mixed + (torch.rand_like(mixed) - 0.5) * 0.2 * given.std()
        predicted = model(tokens, mixed)
        goal = guided_logits(wanted[:, SLOTS - 1 :], head).softmax(-1)
        drafted = guided_logits(predicted[:, SLOTS - 1 :], head)
        loss = -(goal * drafted.log_softmax(-1)).sum(-1).mean() + F.smooth_l1_loss(predicted, wanted)
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimiser.step()
        if now - said > 60:
            said = now
            scores = evaluate_drafter(model, target, fresh_captions[:32], fresh[:32])
            print(f"drafter {now - start:5.0f} s  seen {seen}  loss {loss.item():.3f}  {_line(scores)}", flush=True)
        if now - saved > 180:
            saved = now
            save_checkpoint(path, {"model": model.state_dict(), "seen": seen})
    scores = evaluate_drafter(model, target, fresh_captions, fresh)
    save_checkpoint(path, {"model": model.state_dict(), "seen": seen, "scores": scores})
    print(f"drafter done: seen {seen}  {_line(scores)}")


def load_drafter(work: Path) -> ScenesDrafter:
    """The trained drafter of a work folder."""
    model = ScenesDrafter()
    model.load_state_dict(load_checkpoint(work / "drafter.pt")["model"])
    return model.eval()


def _line(scores: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in scores.items())
