"""The scenes VQ tokenizer: 128 x 128 pictures <-> 16 x 16 codes out of 1024, and its training.

The encoder sees a small neighbourhood of each cell, which keeps codes local and interchangeable and the
autoregressive task easy. Codes are unit vectors of 8 numbers; the codebook follows its members by
exponential moving averages, and codes nobody uses are moved onto encodings that are badly served.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from .checkpoints import load_checkpoint, save_checkpoint
from .data import render_pictures

CODES, CODE_DIM, GRID = 1024, 8, 16


class Residual(nn.Module):
    """Two 3x3 convolutions around a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.second(F.silu(self.first(F.silu(x))))
        return x + change


class Encoder(nn.Module):
    """`[images, 3, 128, 128]` in [-1, 1] -> unit vectors `[images, 8, 16, 16]`."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(12, 40, 4, stride=2, padding=1)
        self.down2 = nn.Conv2d(40, 112, 4, stride=2, padding=1)
        self.residual = Residual(112)
        self.project = nn.Conv2d(112, CODE_DIM, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = F.silu(self.down1(F.pixel_unshuffle(images, 2)))
        x = F.silu(self.residual(self.down2(x)))
        return F.normalize(self.project(x).float(), dim=1)


class Decoder(nn.Module):
    """Code vectors `[images, 8, 16, 16]` -> pictures `[images, 3, 128, 128]`, about [-1, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(CODE_DIM, 144, 3, padding=1),
            Residual(144),
            Residual(144),
            nn.Conv2d(144, 72 * 4, 3, padding=1),
            nn.PixelShuffle(2),
            Residual(72),
            nn.Conv2d(72, 32 * 4, 3, padding=1),
            nn.PixelShuffle(2),
            Residual(32),
            nn.SiLU(),
            nn.Conv2d(32, 12, 3, padding=1),
            nn.PixelShuffle(2),
        )

    def forward(self, vectors: Tensor) -> Tensor:
        pictures: Tensor = self.layers(vectors)
        return pictures


class ScenesVQ(nn.Module):
    """Encoder, codebook and decoder."""

    codebook: Tensor
    members: Tensor
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()
        start = F.normalize(torch.randn(CODES, CODE_DIM), dim=1)
        self.register_buffer("codebook", start)
        self.register_buffer("members", torch.ones(CODES))
        self.register_buffer("sums", start.clone())

    def nearest(self, vectors: Tensor) -> Tensor:
        """Codes `[images, 16, 16]` of unit vectors `[images, 8, 16, 16]`."""
        flat = vectors.permute(0, 2, 3, 1).reshape(-1, CODE_DIM)
        return (flat @ self.codebook.T).argmax(1).view(-1, GRID, GRID)

    def lookup(self, codes: Tensor) -> Tensor:
        """Code vectors `[images, 8, 16, 16]` of codes `[images, 16, 16]`."""
        return self.codebook[codes].permute(0, 3, 1, 2)

    def decode(self, codes: Tensor) -> Tensor:
        """Pictures `[images, 3, 128, 128]` of codes `[images, 256]` or `[images, 16, 16]`."""
        pictures: Tensor = self.decoder(self.lookup(codes.view(-1, GRID, GRID)))
        return pictures

    @torch.no_grad()
    def encode(self, pictures: NDArray[np.uint8], batch: int = 64) -> NDArray[np.int16]:
        """Codes `[images, 256]` of uint8 pictures `[images, 128, 128, 3]`."""
        parts = []
        for i in range(0, len(pictures), batch):
            vectors = self.encoder(to_tensor(pictures[i : i + batch], self.codebook.device))
            parts.append(self.nearest(vectors).flatten(1).cpu().numpy().astype(np.int16))
        return np.concatenate(parts)

    @torch.no_grad()
    def follow(self, vectors: Tensor, codes: Tensor, decay: float = 0.99) -> None:
        """Move each code towards the mean of its members; re-seat the unused ones."""
        flat = vectors.permute(0, 2, 3, 1).reshape(-1, CODE_DIM)
        index = codes.flatten()
        count = torch.bincount(index, minlength=CODES).float()
        self.members.lerp_(count, 1 - decay)
        self.sums.lerp_(torch.zeros_like(self.sums).index_add_(0, index, flat), 1 - decay)
        unused = self.members < 0.03
        if unused.any():
            worst = (flat * self.codebook[index]).sum(1).topk(4 * int(unused.sum()), largest=False).indices
            chosen = flat[worst[torch.randperm(len(worst))[: int(unused.sum())]]]
            self.sums[unused], self.members[unused] = chosen * 0.5, 0.5
        self.codebook.copy_(F.normalize(self.sums, dim=1))


def to_tensor(pictures: NDArray[np.uint8], device: str | torch.device = "cpu") -> Tensor:
    """uint8 `[images, 128, 128, 3]` -> float `[images, 3, 128, 128]` in [-1, 1], channels-last memory."""
    scaled = torch.from_numpy(np.ascontiguousarray(pictures)).to(device).permute(0, 3, 1, 2).float() / 127.5 - 1
    return scaled.contiguous(memory_format=torch.channels_last)


def psnr(model: ScenesVQ, pictures: NDArray[np.uint8]) -> float:
    """Peak signal-to-noise ratio in dB of decode(encode(pictures))."""
    with torch.no_grad():
        decoded = model.decode(torch.from_numpy(model.encode(pictures)).long().to(model.codebook.device)).cpu()
    error = ((decoded.clamp(-1, 1) - to_tensor(pictures)) / 2).square().mean()
    return float(-10 * torch.log10(error))


def train_vq(work: Path, minutes: float, seed: int = 0, batch: int = 16, pool: int = 6000, device: str = "cpu") -> None:
    """Train (or go on training) for `minutes`; writes `work/vq.pt` every two minutes.

    The learning rate falls to zero over the time given, so each call is a complete run.
    """
    torch.manual_seed(seed)
    model = ScenesVQ().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    path = work / "vq.pt"
    if path.exists():
        model.load_state_dict(load_checkpoint(path)["model"])
    optimiser = torch.optim.AdamW(model.parameters(), 1.5e-3, betas=(0.9, 0.98), weight_decay=0.01)
    pictures, fresh = render_pictures(pool, seed=seed + 1), render_pictures(128, seed=seed + 999)
    start = saved = said = time.monotonic()
    for step, chosen in enumerate(_batches(pool, batch, seed)):
        passed = (time.monotonic() - start) / (60 * minutes)
        if passed >= 1:
            break
        for group in optimiser.param_groups:
            group["lr"] = 1.5e-3 * min(1, (step + 1) / 50, (1 - passed) / 0.6)
        images = to_tensor(pictures[chosen], device)
        vectors = model.encoder(images)
        codes = model.nearest(vectors.detach())
        if step == 0 and not path.exists():  # seat the codebook on real encodings
            flat = vectors.detach().permute(0, 2, 3, 1).reshape(-1, CODE_DIM)
            model.codebook.copy_(flat[torch.randperm(len(flat))[:CODES]])
            model.sums.copy_(model.codebook)
            codes = model.nearest(vectors.detach())
        quantised = model.lookup(codes)
        output = model.decoder(vectors + (quantised - vectors).detach())
        loss = _picture_loss(output, images) + 0.25 * (vectors - quantised).square().sum(1).mean()
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        model.follow(vectors.detach(), codes)
        now = time.monotonic()
        if now - said > 20:
            said = now
            print(
                f"vq {now - start:5.0f} s  step {step}  loss {loss.item():.4f}  PSNR {psnr(model, fresh):.2f} dB",
                flush=True,
            )
        if now - saved > 120:
            saved = now
            save_checkpoint(path, {"model": model.state_dict()})
    save_checkpoint(path, {"model": model.state_dict()})
    codes = torch.from_numpy(model.encode(render_pictures(1000, seed=seed + 4242)).astype(np.int64))
    share = torch.bincount(codes.flatten(), minlength=CODES).double() / codes.numel()
    perplexity = torch.exp(-(share * share.clamp_min(1e-12).log()).sum()).item()
    print(
        f"vq done: PSNR {psnr(model, fresh):.2f} dB, codes used {int((share > 0).sum())}, perplexity {perplexity:.0f}"
    )


def load_vq(work: Path) -> ScenesVQ:
    """The trained tokenizer of a work folder, ready for use."""
    model = ScenesVQ()
    model.load_state_dict(load_checkpoint(work / "vq.pt")["model"])
    return model.eval()


def _picture_loss(output: Tensor, images: Tensor) -> Tensor:
    difference = output - images
    across = difference[..., 1:] - difference[..., :-1]
    down = difference[..., 1:, :] - difference[..., :-1, :]
    return difference.abs().mean() + difference.square().mean() + 0.5 * (across.abs().mean() + down.abs().mean())


def _batches(pool: int, batch: int, seed: int) -> Iterator[NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(pool)
        for i in range(0, pool - batch + 1, batch):
            yield order[i : i + batch]
