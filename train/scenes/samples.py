"""The target's own pictures: codes it draws for captions, which the drafter is trained on.

What a target draws under guidance is sharper than what it was trained on, and a drafter meets nothing else. This is
plain sampling in torch, many captions at once.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from .data import draw_scenes
from .model import ScenesTarget
from .target import load_target
from .text import SLOTS, encode_caption
from .vocabulary import describe
from .vq import GRID

SAMPLES_SEED = 700_000  # scenes of captions, nowhere else used
CELLS = GRID * GRID


@torch.no_grad()
def sample_codes(target: ScenesTarget, captions: Tensor, cfg_scale: float, generator: torch.Generator) -> Tensor:
    """Codes `[rows, 256]` for caption ids `[rows, 24]`, drawn at temperature 1 with guidance."""
    rows, device, config = len(captions), captions.device, target.config
    decoder, table = target.fold()
    dropped = torch.arange(2 * rows, device=device) >= rows
    embeds = target.prefix(captions.repeat(2, 1), dropped)  # conditional rows, then unconditional ones
    shape = (SLOTS + CELLS, 2 * rows, config.num_kv_heads, config.head_dim)
    cache = [torch.zeros(shape, device=device) for _ in range(2 * config.num_layers)]
    mask = torch.full((SLOTS, SLOTS), -1e9, device=device).triu(1).expand(2 * rows, 1, SLOTS, SLOTS)
    codes, length = torch.zeros(rows, CELLS, dtype=torch.int64, device=device), 0
    for cell in range(CELLS):
        nodes = embeds.shape[1]
        positions = torch.arange(length, length + nodes, device=device).expand(2 * rows, nodes)
        logits, _, *new_kv = decoder(embeds, positions, mask, *(past[:length] for past in cache))
        for past, new in zip(cache, new_kv, strict=True):
            past[length : length + nodes] = new
        length += nodes
        cond, uncond = logits[:, -1].chunk(2)
        probabilities = (uncond + cfg_scale * (cond - uncond)).softmax(-1)
        codes[:, cell] = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        embeds = F.embedding(codes[:, cell : cell + 1].repeat(2, 1), table)
        mask = torch.zeros(2 * rows, 1, 1, length + 1, device=device)
    return codes


def write_samples(work: Path, minutes: float, cfg_scale: float, batch: int = 64, device: str = "cpu") -> int:
    """Draw batches for `minutes`, at least one, into `samples-NNNN.npz`; returns how many pictures there are now."""
    target = load_target(work).to(device)
    start, index = time.monotonic(), len(sample_files(work))
    while True:
        rng = np.random.default_rng((SAMPLES_SEED, index))
        scenes = draw_scenes(batch, SAMPLES_SEED + index)
        captions = np.stack([encode_caption(describe(scene, rng)) for scene in scenes])
        generator = torch.Generator(device).manual_seed(SAMPLES_SEED + index)
        codes = sample_codes(target, torch.from_numpy(captions).to(device), cfg_scale, generator)
        partial = work / "samples.partial.npz"
        np.savez(partial, captions=captions.astype(np.int16), codes=codes.cpu().numpy().astype(np.int16))
        partial.rename(work / f"samples-{index:04d}.npz")
        index += 1
        passed = time.monotonic() - start
        print(f"samples {passed:5.0f} s  {index * batch} pictures", flush=True)
        if passed >= 60 * minutes:
            return index * batch


def sample_files(work: Path) -> list[Path]:
    """Files of drawn pictures, in order."""
    return sorted(work.glob("samples-*.npz"))


def read_samples(work: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Caption ids `[pictures, 24]` and codes `[pictures, 256]` drawn so far; both may have no rows."""
    captions, codes = [np.zeros((0, SLOTS), np.int64)], [np.zeros((0, CELLS), np.int64)]
    for path in sample_files(work):
        with np.load(path, allow_pickle=False) as stored:
            captions.append(stored["captions"].astype(np.int64))
            codes.append(stored["codes"].astype(np.int64))
    return np.concatenate(captions), np.concatenate(codes)
