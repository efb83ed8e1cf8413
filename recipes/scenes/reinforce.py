"""Reinforcement learning of the target: images that show what their captions ask for become more likely.

A step draws groups of images of the same caption. The reward of an image is the probability that judges give to all
attributes that its caption names. Images become more likely if their reward exceeds the mean of their group. These
judges are not the one that measures agreement, so that the target cannot learn the mistakes of that one. Source: group
relative policy optimisation (Shao et al., 2024), without division by the deviation of a group.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lantern_rt.errors import CheckpointError
from lantern_rt.train.precision import mixed_precision

from .bundle import TEMPERATURE
from .checkpoints import save_checkpoint
from .judge import RatedImage, load_judge, rate_images
from .model import ScenesTarget
from .stopwatch import Stopwatch
from .target import load_target, update_average
from .text import encode_caption
from .vocabulary import PLACES, SKIES, Scene, find_unnamed_attributes, sample_scene, write_caption, write_typed_caption
from .vq import GRID, load_vq

SEED = 775_000  # seed of the captions
GROUP = 8  # images of a caption
UPDATES = 2  # updates of the weights for the images of a step
PART = 128  # images whose gradients are computed at a time
PAIRS = 0.3  # share of scenes with two solids
TYPED = 0.65  # share of captions as people type them; the others are complete
KL_WEIGHT = 0.005  # reward that a nat of Kullback-Leibler divergence from the first target costs
SPREAD_WEIGHT = 0.08  # reward for an image whose sky or place is by the factor e too rare


def reinforce_target(
    work_folder: Path, minutes: float, images: int = 1024, lr: float = 6e-5, device: str = "cpu"
) -> None:
    """Train the target `target.pt` of a work folder further, and replace it by the averaged weights.

    Args:
        work_folder: folder of checkpoints, with the judges `judge-*.onnx`.
        minutes: minutes of training; the learning rate falls to zero over the last 40 % of this time.
        images: number of images that a step draws, a multiple of 16.
        lr: maximum learning rate of AdamW.
        device: PyTorch device.

    Raises:
        CheckpointError: the work folder has no judges.
    """
    torch.manual_seed(12)
    vq = load_vq(work_folder).to(device)
    judges = [load_judge(work_folder, path.name).to(device) for path in sorted(work_folder.glob("judge-*.onnx"))]
    if not judges:
        raise CheckpointError("are not there", field="judge-*.onnx", remedy="train them with `judge --new SEED`")
    first = load_target(work_folder).to(device)
    model = copy.deepcopy(first).train()
    average = copy.deepcopy(first)
    adam = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.98), weight_decay=0.0)
    spreads = {"sky": dict.fromkeys(SKIES, 50.0), "position": dict.fromkeys(PLACES, 50.0)}
    watch = Stopwatch(device)
    step = 0
    while (progress := watch.seconds() / (60 * minutes)) < 1:
        scenes, captions = sample_groups(images // GROUP, np.random.default_rng((SEED, step)))
        ids = torch.from_numpy(np.stack([encode_caption(caption) for caption in captions])).to(device)
        with mixed_precision(device):
            codes = sample_codes(model, ids)
            with torch.no_grad():
                pictures = torch.cat([vq.decode(part).float().clamp(-1, 1) for part in codes.split(PART)])
        ratings = [rate_images(judge, pictures, scenes, captions) for judge in judges]
        # The geometric mean of the judges' probabilities.
        rewards = torch.tensor([[image.probability for image in rated] for rated in ratings]).log().mean(0).exp()
        rewards += compute_spread_bonus(ratings[0], scenes, captions, spreads)
        advantages = compute_advantages(rewards).to(device)
        adam.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 10, 2.5 * (1 - progress))
        divergences = []
        for rows in torch.randperm(images, device=device).chunk(UPDATES):
            adam.zero_grad(set_to_none=True)
            for part in rows.split(PART):
                with mixed_precision(device):
                    loss, divergence = compute_loss(model, first, ids[part], codes[part], advantages[part])
                torch.autograd.backward(loss * len(part) / len(rows))
                divergences.append(divergence)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            update_average(average, model, min(0.97, (2 * step + 1) / (2 * step + 10)))
        step += 1
        if step % 10 == 0:
            divergence = torch.stack(divergences).mean()
            print(f"reinforce step {step}  reward {rewards.mean():.3f}  divergence {divergence:.2f} nats", flush=True)
    state = {"model": average.state_dict(), "seen": step * images, "config": asdict(model.config)}
    save_checkpoint(work_folder / "target.pt", state | {"cfg_scale": 1.0})
    print(f"reinforce done: {step} steps")


def sample_groups(count: int, rng: np.random.Generator) -> tuple[list[Scene], list[str]]:
    """Return `count` random scenes and their captions, each `GROUP` times in a row."""
    scenes = [sample_scene(rng, PAIRS) for _ in range(count)]
    captions = [
        write_typed_caption(scene, rng) if rng.random() < TYPED else write_caption(scene, rng, complete=True)
        for scene in scenes
    ]
    return [scene for scene in scenes for _ in range(GROUP)], [text for text in captions for _ in range(GROUP)]


@torch.no_grad()
def sample_codes(target: ScenesTarget, captions: Tensor) -> Tensor:
    """Sample codes `[images, 256]` at the bundle's temperature, for word ids of captions `[images, 24]`."""
    config, decoder = target.config, target.decoder
    embeddings, head = target.code_embedding(), target.code_head().T
    embeds = target.prefix(captions)  # [images, nodes, width]
    empty = embeds.new_zeros(0, len(captions), config.num_kv_heads, config.head_dim)
    past = [empty] * (2 * config.num_layers)
    codes: list[Tensor] = []
    while len(codes) < GRID * GRID:
        start, nodes = len(past[0]), embeds.shape[1]
        positions = torch.arange(start, start + nodes, device=embeds.device).expand(len(captions), -1)
        mask = embeds.new_full((1, 1, nodes, start + nodes), -torch.inf).triu(start + 1)
        hidden, new = decoder.run_layers(embeds, positions, mask, past)
        past = [torch.cat(pair) for pair in zip(past, new, strict=True)]
        logits = (decoder.norm(hidden[:, -1]) @ head).float() / TEMPERATURE
        # The largest sum of logit and Gumbel noise is a sample.
        codes.append((logits - torch.empty_like(logits).exponential_().log()).argmax(-1))
        embeds = embeddings[codes[-1]][:, None]
    return torch.stack(codes, 1)


def compute_spread_bonus(
    ratings: Sequence[RatedImage], scenes: list[Scene], captions: list[str], spreads: dict[str, dict[str, float]]
) -> Tensor:
    """Compute rewards `[images]` for skies and places that captions leave open and that were rare in recent steps.

    Without them the target would always choose the sky and the place with which it fails least. `spreads` counts the
    skies and places of recent steps, each step half as much as the next, and is updated.
    """
    bonus = torch.zeros(len(ratings))
    for name, counts in spreads.items():
        found = {
            i: getattr(ratings[i], name)
            for i, (scene, caption) in enumerate(zip(scenes, captions, strict=True))
            if name in find_unnamed_attributes(scene, caption)
        }
        for value in counts:
            counts[value] = counts[value] / 2 + [*found.values()].count(value)
        total = sum(counts.values())
        for i, value in found.items():
            bonus[i] = bonus[i] - SPREAD_WEIGHT * math.log(max(0.03, counts[value] / total) * len(counts))
    return bonus


def compute_advantages(rewards: Tensor) -> Tensor:
    """Return by how much each reward `[images]` exceeds the mean of the other images of its group."""
    grouped = rewards.view(-1, GROUP)
    return ((grouped - grouped.mean(1, keepdim=True)) * GROUP / (GROUP - 1)).flatten()


def compute_loss(
    model: ScenesTarget, first: ScenesTarget, captions: Tensor, codes: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the loss of images that `model` drew, and the divergence from `first` in nats per image."""
    with torch.no_grad():
        first_log_probs = (first.logits(captions, codes).float() / TEMPERATURE).log_softmax(-1)
    log_probs = (model.logits(captions, codes).float() / TEMPERATURE).log_softmax(-1)
    likelihoods = log_probs.gather(-1, codes[..., None]).sum((1, 2))
    divergence = F.kl_div(first_log_probs, log_probs, reduction="none", log_target=True).sum((1, 2)).mean()
    return KL_WEIGHT * divergence - (advantages * likelihoods).mean(), divergence.detach()
