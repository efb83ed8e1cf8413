"""Distillation of classifier-free guidance into the target's weights, which halves the batch rows per image.

With guidance an image needs a conditional and an unconditional batch row; the distilled target needs one row. The
student starts as a copy of the teacher and learns the guided next-token distributions of the teacher. Source: guidance
distillation as in Meng et al. (2023).
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
from .data import render_scenes, sample_scenes
from .model import GUIDANCE, ScenesTarget
from .stopwatch import Stopwatch
from .target import load_target, update_average, update_weights
from .text import encode_caption
from .vocabulary import write_caption
from .vq import GRID, load_vq

SCENES = 2048  # number of training scenes; the teacher computes their logits once, the student reads them many times
SEED = 710_000  # seed of the training scenes
BLANK = 0.06  # share of scenes without caption, so that extra guidance and negative prompts still work


def compute_guided_logits(model: ScenesTarget, captions: Tensor, codes: Tensor, blank_rows: Tensor) -> Tensor:
    """Compute logits with guidance.

    Args:
        captions: word ids, int64 `[rows, 24]`.
        codes: image tokens, int64 `[rows, 256]`.
        blank_rows: bool `[rows]`, true for rows whose caption is dropped; guidance does not change their logits.

    Returns:
        Logits `[rows, 256, codes]`.
    """
    unconditional = model.logits(captions, codes, torch.ones_like(blank_rows))
    conditional = model.logits(captions, codes, blank_rows)
    return unconditional + GUIDANCE * (conditional - unconditional)


def compute_kl_divergence(teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
    """Return the mean Kullback-Leibler divergence of the student from the teacher, in nats per token.

    Args:
        teacher_logits: logits of the teacher, `[rows, tokens, codes]`.
        student_logits: logits of the student, `[rows, tokens, codes]`.
    """
    teacher_log_probs, student_log_probs = (
        logits.float().log_softmax(-1).flatten(0, 1) for logits in (teacher_logits, student_logits)
    )
    return F.kl_div(student_log_probs, teacher_log_probs, reduction="batchmean", log_target=True)


def distil_guidance(work_folder: Path, minutes: float, batch: int = 8, lr: float = 0.006, device: str = "cpu") -> None:
    """Train the student, and write its averaged weights to `target.pt`.

    The first call copies `target.pt` to `guided.pt`, which is the teacher of all calls. An interrupted call continues
    from `distil-state.pt`. `target.pt` and `distil-state.pt` are written every four minutes.

    Args:
        work_folder: folder of checkpoints.
        minutes: minutes of training, including earlier calls; the learning rate falls to zero over this time.
        batch: number of scenes per step.
        lr: maximum learning rate of Muon; AdamW has a tenth of it.
        device: PyTorch device.
    """
    torch.set_flush_denormal(True)  # denormal numbers, such as tiny probabilities, are slow
    torch.manual_seed(8)
    state_path = work_folder / "distil-state.pt"
    guided = work_folder / "guided.pt"
    if not guided.exists():
        save_checkpoint(guided, load_checkpoint(work_folder / "target.pt"))
    teacher = load_target(work_folder, guided.name).to(device)
    student = copy.deepcopy(teacher).train()
    average = copy.deepcopy(student)
    matrices = [w for w in student.decoder.parameters() if w.ndim == 2]
    # `is`, because `==` of tensors compares elements.
    others = [w for w in student.parameters() if not any(w is m for m in matrices)]
    muon = Muon(matrices, lr)
    adam = torch.optim.AdamW(others, lr / 10, betas=(0.9, 0.95), weight_decay=0.0)
    parts = {"model": student, "average": average, "muon": muon, "adam": adam}
    step = 0
    earlier_seconds = 0.0
    if state_path.exists():
        state = load_checkpoint(state_path)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        step = state["step"]
        earlier_seconds = state["seconds"]
    if earlier_seconds >= 60 * minutes:
        print(f"the student has had its {minutes:g} minutes")
        return
    captions, codes, blank_rows, teacher_logits = make_distillation_data(work_folder, teacher, device)
    watch = Stopwatch(device, earlier_seconds)

    def save() -> None:
        numbers = {"step": step, "seconds": watch.seconds()}
        save_checkpoint(state_path, {name: part.state_dict() for name, part in parts.items()} | numbers)
        weights = {"model": average.state_dict(), "seen": step * batch, "config": asdict(student.config)}
        # The student needs no guidance, so its bundle has guidance scale 1.
        save_checkpoint(work_folder / "target.pt", weights | {"cfg_scale": 1.0})

    last_save = earlier_seconds
    last_print = earlier_seconds
    first_step = step
    running_loss = torch.zeros((), device=device)
    while (progress := watch.seconds() / (60 * minutes)) < 1:
        rate = min(1.0, (step + 1) / 30, 1 - progress)
        muon.param_groups[0]["lr"] = lr * rate
        adam.param_groups[0]["lr"] = lr / 10 * rate
        epoch, offset = divmod(step * batch, len(codes))
        chosen = torch.from_numpy(np.random.default_rng((SEED, epoch)).permutation(len(codes))[offset : offset + batch])
        with mixed_precision(device):
            student_logits = student.logits(*(table[chosen].to(device) for table in (captions, codes, blank_rows)))
            loss = compute_kl_divergence(teacher_logits[chosen].to(device), student_logits)
        update_weights(loss, muon, adam)
        update_average(average, student, min(0.99, (step + 1) / (step + 10)))
        running_loss.lerp_(loss.detach(), max(0.02, 1 / (step - first_step + 1)))
        step += 1
        now = watch.seconds()
        if now - last_print > 60:
            last_print = now
            print(f"distil {now:6.0f} s  step {step}  rate {rate:.2f}  running {running_loss:.4f} nats", flush=True)
        if now - last_save > 240:
            last_save = now
            save()
    save()
    print(f"distil done: {step} steps, {running_loss:.4f} nats from the teacher")


@torch.no_grad()
def make_distillation_data(
    work_folder: Path, teacher: ScenesTarget, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Render the training scenes, tokenise them and compute the teacher's logits.

    Args:
        work_folder: folder of checkpoints, with the VQ tokenizer.
        teacher: target with guidance, on `device`.
        device: PyTorch device of the computations; the results are on the CPU.

    Returns:
        Four tensors: word ids of captions `[scenes, 24]`; codes `[scenes, 256]`; bool `[scenes]`, true for scenes
        without caption; the teacher's guided logits, float16 `[scenes, 256, codes]` (2 GB).
    """
    vq = load_vq(work_folder).to(device)
    # Scenes with two solids come first, so that the training scenes have more of them: students were worst at these.
    scenes = sorted(sample_scenes(2 * SCENES, SEED), key=lambda scene: -len(scene.solids))[:SCENES]
    rng = np.random.default_rng(SEED)
    captions = torch.from_numpy(np.stack([encode_caption(write_caption(scene, rng)) for scene in scenes]))
    blank_rows = torch.from_numpy(rng.random(SCENES) < BLANK)
    codes = torch.zeros(SCENES, GRID * GRID, dtype=torch.int64)
    teacher_logits = torch.zeros(SCENES, GRID * GRID, vq.config.codes, dtype=torch.float16)
    for i in range(0, SCENES, 16):
        if i % 512 == 0:
            print(f"the teacher has read {i} of {SCENES} scenes", flush=True)
        chunk = slice(i, i + 16)
        codes[chunk] = torch.from_numpy(vq.encode(render_scenes(scenes[chunk], vq.config.image_size)).astype(np.int64))
        with mixed_precision(device):
            teacher_logits[chunk] = compute_guided_logits(
                teacher, *(table[chunk].to(device) for table in (captions, codes, blank_rows))
            ).cpu()
    return captions, codes, blank_rows, teacher_logits
