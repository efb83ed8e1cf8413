"""Guidance distilled into the target's weights, so that one row a picture draws what two drew.

The student starts as the teacher, and learns the distributions that guidance makes of the teacher's two rows. Source:
guidance distillation as in Meng et al. (2023), here of next-token distributions.
"""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lantern_rt.train.muon import Muon
from lantern_rt.train.precision import mixed_precision

from .checkpoints import load_checkpoint, save_checkpoint
from .data import draw_scenes, render_scenes
from .model import GUIDANCE, ScenesTarget
from .stopwatch import Stopwatch
from .target import follow, load_target, update
from .text import encode_caption
from .vocabulary import describe
from .vq import GRID, load_vq

SCENES = 2048  # gone through over and over; the teacher reads them once
SEED = 710_000  # of these scenes
BLANK = 0.06  # share of scenes without a caption, where nothing changes: more guidance and negative prompts need them


def guided_logits(model: ScenesTarget, captions: Tensor, codes: Tensor, blank: Tensor) -> Tensor:
    """Logits `[rows, 256, codes]` under guidance; of rows in `blank [rows]`, without a caption and guidance."""
    unconditional = model.logits(captions, codes, torch.ones_like(blank))
    conditional = model.logits(captions, codes, blank)
    return unconditional + GUIDANCE * (conditional - unconditional)


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Mean Kullback-Leibler divergence of the student from the teacher in nats a token, of their logits."""
    wanted, found = (logits.float().log_softmax(-1).flatten(0, 1) for logits in (teacher, student))
    return F.kl_div(found, wanted, reduction="batchmean", log_target=True)


def train_distil(work: Path, minutes: float, batch: int = 8, lr: float = 0.006, device: str = "cpu") -> None:
    """Train until the student has had `minutes`; the rate falls to zero over them.

    The teacher is `guided.pt`, a copy of `target.pt` as it was before the first call; `target.pt` becomes the student's
    average weights. `distil-state.pt` is what an interrupted call goes on from; both are rewritten every four minutes.
    """
    torch.set_flush_denormal(True)  # as which small probabilities are slow
    torch.manual_seed(8)
    ongoing = work / "distil-state.pt"
    guided = work / "guided.pt"
    if not guided.exists():
        save_checkpoint(guided, load_checkpoint(work / "target.pt"))
    teacher = load_target(work, guided.name).to(device)
    student = copy.deepcopy(teacher).train()
    average = copy.deepcopy(student)
    matrices = [w for w in student.decoder.parameters() if w.ndim == 2]
    others = [w for w in student.parameters() if not any(w is m for m in matrices)]
    muon = Muon(matrices, lr)
    adam = torch.optim.AdamW(others, lr / 10, betas=(0.9, 0.95), weight_decay=0.0)
    parts = {"model": student, "average": average, "muon": muon, "adam": adam}
    step = 0
    before = 0.0
    if ongoing.exists():
        state = load_checkpoint(ongoing)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        step = state["step"]
        before = state["seconds"]
    if before >= 60 * minutes:
        print(f"the student has had its {minutes:g} minutes")
        return
    captions, codes, blank, wanted = make_lessons(work, teacher, device)
    watch = Stopwatch(device, before)

    def save() -> None:
        numbers = {"step": step, "seconds": watch.seconds()}
        save_checkpoint(ongoing, {name: part.state_dict() for name, part in parts.items()} | numbers)
        weights = {"model": average.state_dict(), "seen": step * batch, "config": asdict(student.config)}
        save_checkpoint(work / "target.pt", weights | {"cfg_scale": 1.0})

    saved = before
    said = before
    begun = step
    running = torch.zeros((), device=device)
    while (passed := watch.seconds() / (60 * minutes)) < 1:
        rate = min(1.0, (step + 1) / 30, 1 - passed)
        muon.param_groups[0]["lr"] = lr * rate
        adam.param_groups[0]["lr"] = lr / 10 * rate
        turn, place = divmod(step * batch, len(codes))
        chosen = torch.from_numpy(np.random.default_rng((SEED, turn)).permutation(len(codes))[place : place + batch])
        with mixed_precision(device):
            found = student.logits(*(table[chosen].to(device) for table in (captions, codes, blank)))
            loss = divergence(wanted[chosen].to(device), found)
        update(loss, muon, adam)
        follow(average, student, min(0.99, (step + 1) / (step + 10)))
        running.lerp_(loss.detach(), max(0.02, 1 / (step - begun + 1)))
        step += 1
        now = watch.seconds()
        if now - said > 60:
            said = now
            print(f"distil {now:6.0f} s  step {step}  rate {rate:.2f}  running {running:.4f} nats", flush=True)
        if now - saved > 240:
            saved = now
            save()
    save()
    print(f"distil done: {step} steps, {running:.4f} nats from the teacher")


@torch.no_grad()
def make_lessons(work: Path, teacher: ScenesTarget, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Caption ids `[scenes, 24]`, codes `[scenes, 256]`, who is blank `[scenes]`, and the teacher's logits, float16
    `[scenes, 256, codes]`: 2 GB."""
    vq = load_vq(work).to(device)
    # Of twice as many scenes all that have two solids: without more of them, students lost most there.
    scenes = sorted(draw_scenes(2 * SCENES, SEED), key=lambda scene: -len(scene.solids))[:SCENES]
    rng = np.random.default_rng(SEED)
    captions = torch.from_numpy(np.stack([encode_caption(describe(scene, rng)) for scene in scenes]))
    blank = torch.from_numpy(rng.random(SCENES) < BLANK)
    codes = torch.zeros(SCENES, GRID * GRID, dtype=torch.int64)
    wanted = torch.zeros(SCENES, GRID * GRID, vq.config.codes, dtype=torch.float16)
    for i in range(0, SCENES, 16):
        if i % 512 == 0:
            print(f"the teacher has read {i} of {SCENES} scenes", flush=True)
        some = slice(i, i + 16)
        codes[some] = torch.from_numpy(vq.encode(render_scenes(scenes[some], vq.config.picture)).astype(np.int64))
        with mixed_precision(device):
            wanted[some] = guided_logits(teacher, *(table[some].to(device) for table in (captions, codes, blank))).cpu()
    return captions, codes, blank, wanted
