"""The scenes VQ tokenizer: pictures <-> 16 x 16 codes, and its training.

The encoder sees a small neighbourhood of each cell, which keeps codes local and interchangeable and the
autoregressive task easy. Codes are unit vectors of 8 numbers; the codebook follows its members by
exponential moving averages, and codes nobody uses are moved onto encodings that are badly served.

A size is a `VQConfig`. It goes into every checkpoint, and what reads one takes it from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from lantern_rt.errors import CheckpointError, RequestError
from lantern_rt.train.muon import Muon
from lantern_rt.train.precision import mixed_precision

from .checkpoints import load_checkpoint, save_checkpoint
from .data import render_pictures
from .stopwatch import Stopwatch

CODE_DIM = 8
GRID = 16
RATE = 1e-3
MUON_RATE = 0.02
POOL = 1024  # pictures rendered at a time, and how often each is learnt from
PASSES = 4
SEATED = 80  # steps before there are codes


@dataclass(frozen=True)
class VQConfig:
    """Sizes of a tokenizer; the defaults are those of the bundle that comes with the package."""

    patch: int = 4  # side in pixels of the squares that are folded into channels; pictures are 64 * patch a side
    codes: int = 2048
    encoder: tuple[int, int] = (128, 256)  # channels at 32 x 32 and 16 x 16
    decoder: tuple[tuple[int, int], ...] = ((192, 3), (128, 2), (64, 1))  # channels and blocks at 16 x 16, 32 x 32, ...

    @property
    def picture(self) -> int:
        """Pixels a side."""
        return 4 * GRID * self.patch


VQ_SIZES: Mapping[str, VQConfig] = {
    "128": VQConfig(patch=2, codes=1024, encoder=(40, 112), decoder=((144, 2), (72, 1), (32, 1))),
    "256": VQConfig(),
}


def find_vq_size(name: str) -> VQConfig:
    """The size of a name; RequestError if there is none."""
    if name not in VQ_SIZES:
        raise RequestError(field="size", found=repr(name), expected=f"one of {', '.join(VQ_SIZES)}")
    return VQ_SIZES[name]


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
    """`[images, 3, picture, picture]` in [-1, 1] -> unit vectors `[images, 8, 16, 16]`."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        middle, width = config.encoder
        self.patch = config.patch
        self.down1 = nn.Conv2d(3 * config.patch**2, middle, 4, stride=2, padding=1)
        self.down2 = nn.Conv2d(middle, width, 4, stride=2, padding=1)
        self.residual = Residual(width)
        self.project = nn.Conv2d(width, CODE_DIM, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = F.silu(self.down1(F.pixel_unshuffle(images, self.patch)))
        x = F.silu(self.residual(self.down2(x)))
        return F.normalize(self.project(x).float(), dim=1)


class Decoder(nn.Module):
    """Code vectors `[images, 8, 16, 16]` -> pictures `[images, 3, picture, picture]`, about [-1, 1]."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 0
        for width, blocks in config.decoder:
            if before:
                layers += [nn.Conv2d(before, 4 * width, 3, padding=1), nn.PixelShuffle(2)]
            else:
                layers += [nn.Conv2d(CODE_DIM, width, 3, padding=1)]
            layers += [Residual(width) for _ in range(blocks)]
            before = width
        left = config.picture // (GRID * 2 ** (len(config.decoder) - 1))
        layers += [nn.SiLU(), nn.Conv2d(before, 3 * left**2, 3, padding=1), nn.PixelShuffle(left)]
        self.layers = nn.Sequential(*layers)

    def forward(self, vectors: Tensor) -> Tensor:
        pictures: Tensor = self.layers(vectors)
        return pictures


class ScenesVQ(nn.Module):
    """Encoder, codebook and decoder."""

    codebook: Tensor
    members: Tensor
    sums: Tensor

    def __init__(self, config: VQConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or VQConfig()
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        for module in self.modules():  # residual blocks begin by handing on what they get
            if isinstance(module, Residual):
                nn.init.zeros_(module.second.weight)
        start = F.normalize(torch.randn(config.codes, CODE_DIM), dim=1)
        self.register_buffer("codebook", start)
        self.register_buffer("members", torch.ones(config.codes))
        self.register_buffer("sums", start.clone())

    def nearest(self, vectors: Tensor) -> Tensor:
        """Codes `[images, 16, 16]` of unit vectors `[images, 8, 16, 16]`."""
        flat = vectors.permute(0, 2, 3, 1).reshape(-1, CODE_DIM)
        return (flat @ self.codebook.T).argmax(1).view(-1, GRID, GRID)

    def lookup(self, codes: Tensor) -> Tensor:
        """Code vectors `[images, 8, 16, 16]` of codes `[images, 16, 16]`."""
        return self.codebook[codes].permute(0, 3, 1, 2)

    def decode(self, codes: Tensor) -> Tensor:
        """Pictures `[images, 3, picture, picture]` of codes `[images, 256]` or `[images, 16, 16]`."""
        pictures: Tensor = self.decoder(self.lookup(codes.view(-1, GRID, GRID)))
        return pictures

    @torch.no_grad()
    def encode(self, pictures: NDArray[np.uint8], batch: int = 64) -> NDArray[np.int16]:
        """Codes `[images, 256]` of uint8 pictures `[images, picture, picture, 3]`."""
        parts = []
        for i in range(0, len(pictures), batch):
            vectors = self.encoder(to_tensor(pictures[i : i + batch], self.codebook.device))
            parts.append(self.nearest(vectors).flatten(1).cpu().numpy().astype(np.int16))
        return np.concatenate(parts)

    @torch.no_grad()
    def follow(self, vectors: Tensor, codes: Tensor, decay: float = 0.98) -> None:
        """Move each code towards the mean of its members; re-seat the unused ones."""
        flat = vectors.permute(0, 2, 3, 1).reshape(-1, CODE_DIM)
        index = codes.flatten()
        count = torch.bincount(index, minlength=self.config.codes).float()
        self.members.lerp_(count, 1 - decay)
        self.sums.lerp_(torch.zeros_like(self.sums).index_add_(0, index, flat), 1 - decay)
        unused = self.members < 0.1
        if unused.any():
            wanted = min(int(unused.sum()), len(flat) // 4)
            worst = (flat * self.codebook[index]).sum(1).topk(4 * wanted, largest=False).indices
            seats = unused.nonzero()[:wanted, 0]
            self.sums[seats] = flat[worst[torch.randperm(len(worst))[:wanted]]] * 0.5
            self.members[seats] = 0.5
        self.codebook.copy_(F.normalize(self.sums, dim=1))


def to_tensor(pictures: NDArray[np.uint8], device: str | torch.device = "cpu") -> Tensor:
    """uint8 `[images, picture, picture, 3]` -> float `[images, 3, picture, picture]` in [-1, 1], channels last."""
    scaled = torch.from_numpy(np.ascontiguousarray(pictures)).to(device).permute(0, 3, 1, 2).float() / 127.5 - 1
    return scaled.contiguous(memory_format=torch.channels_last)


def psnr(model: ScenesVQ, pictures: NDArray[np.uint8]) -> float:
    """Peak signal-to-noise ratio in dB of decode(encode(pictures))."""
    with torch.no_grad(), mixed_precision(model.codebook.device):
        decoded = model.decode(torch.from_numpy(model.encode(pictures)).long().to(model.codebook.device)).cpu()
    error = ((decoded.float().clamp(-1, 1) - to_tensor(pictures)) / 2).square().mean()
    return float(-10 * torch.log10(error))


def train_vq(
    work: Path,
    minutes: float,
    seed: int = 0,
    batch: int = 16,
    device: str = "cpu",
    config: VQConfig | None = None,
) -> None:
    """Train until this work folder's tokenizer has had `minutes`; writes `work/vq.pt` and, to go on from,
    `work/vq-state.pt` every two minutes.

    `config` is that of the tokenizer in `work` or, where there is none, `VQConfig()`; CheckpointError if another is
    given.

    The learning rate falls to zero over `minutes`; pictures are rendered as they are needed. The first steps train a
    plain autoencoder, on whose encodings the codebook is then seated: quantised from the start, it collapses.
    """
    torch.manual_seed(seed)
    path = work / "vq.pt"
    ongoing = work / "vq-state.pt"
    begun = ongoing if ongoing.exists() else path
    state = load_checkpoint(begun) if begun.exists() else {}
    found = VQConfig(**state["config"]) if state else config or VQConfig()
    if config is not None and found != config:
        raise CheckpointError(
            field=str(begun),
            found=f"a tokenizer of {found.picture} pixels a side",
            expected=str(config.picture),
            remedy="give another --work, or leave --size out",
        )
    config = found
    if state.get("seconds", 0.0) >= 60 * minutes:
        print(f"vq has had its {minutes:g} minutes")
        return
    model = ScenesVQ(config).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    kernels = [w for w in model.parameters() if w.ndim == 4 and min(w.shape[:2]) >= 32]
    others = [w for w in model.parameters() if not any(w is k for k in kernels)]
    muon = Muon(kernels, MUON_RATE)
    adam = torch.optim.AdamW(others, RATE, betas=(0.9, 0.98), weight_decay=0.01)
    step = state.get("step", 0)
    watch = Stopwatch(device, state.get("seconds", 0.0))
    seated = SEATED + 1 if state and not step else 0  # a tokenizer from a bundle has its codebook
    if state:
        model.load_state_dict(state["model"])
    if "muon" in state:
        muon.load_state_dict(state["muon"])
        adam.load_state_dict(state["adam"])
    fresh = render_pictures(64, seed + 999, config.picture, workers=1)

    def save() -> None:
        found = {"model": model.state_dict(), "config": asdict(config)}
        save_checkpoint(path, found)
        more = {"muon": muon.state_dict(), "adam": adam.state_dict(), "step": step, "seconds": watch.seconds()}
        save_checkpoint(ongoing, found | more)

    rendered = endless_pictures(batch, config.picture, seed, step)
    saved = said = watch.seconds()
    while (passed := watch.seconds() / (60 * minutes)) < 1:
        rate = min(1, (step + 1) / 50, (1 - passed) / 0.6)
        muon.param_groups[0]["lr"] = MUON_RATE * rate
        adam.param_groups[0]["lr"] = RATE * rate
        images = to_tensor(next(rendered), device)
        loss = _step_loss(model, images, step + seated)
        muon.zero_grad(set_to_none=True)
        adam.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adam.step()
        step += 1
        now = watch.seconds()
        if now - said > 60:
            said = now
            print(f"vq {now:5.0f} s  step {step}  loss {loss.item():.4f}  PSNR {psnr(model, fresh):.2f} dB", flush=True)
        if now - saved > 120:
            saved = now
            save()
    save()
    codes = torch.from_numpy(model.encode(fresh).astype(np.int64))
    share = torch.bincount(codes.flatten(), minlength=config.codes).double() / codes.numel()
    perplexity = torch.exp(-(share * share.clamp_min(1e-12).log()).sum()).item()
    print(
        f"vq done: PSNR {psnr(model, fresh):.2f} dB, codes used {int((share > 0).sum())}, perplexity {perplexity:.0f}"
    )


def _step_loss(model: ScenesVQ, images: Tensor, step: int) -> Tensor:
    """Loss of a batch; moves the codebook, which plays no part before step `SEATED`."""
    with mixed_precision(images.device):
        vectors = model.encoder(images)
    given = vectors
    commitment = vectors.new_zeros(())
    if step >= SEATED:
        apart = vectors.detach()
        if step == SEATED:
            flat = apart.permute(0, 2, 3, 1).reshape(-1, CODE_DIM)
            model.codebook.copy_(flat[torch.randint(len(flat), (len(model.codebook),))])
            model.sums.copy_(model.codebook)
        codes = model.nearest(apart)
        quantised = model.lookup(codes)
        model.follow(apart, codes)
        given = vectors + (quantised - vectors).detach()
        commitment = 0.25 * (vectors - quantised).square().sum(1).mean()
    with mixed_precision(images.device):
        output = model.decoder(given)
    loss: Tensor = picture_loss(output.float(), images) + commitment
    return loss


def endless_pictures(batch: int, size: int, seed: int, step: int) -> Iterator[NDArray[np.uint8]]:
    """Pictures uint8 `[batch, size, size, 3]` from a step on: endless ones, each seen `PASSES` times."""
    steps = POOL * PASSES // batch
    index, done = divmod(step, steps)
    while True:
        pictures = render_pictures(POOL, seed + 100_000 + index, size, workers=torch.get_num_threads())
        rng = np.random.default_rng((seed, index))
        order = np.concatenate([rng.permutation(POOL) for _ in range(PASSES)])
        for i in range(done, steps):
            yield pictures[order[i * batch : (i + 1) * batch]]
        index = index + 1
        done = 0


def load_vq(work: Path) -> ScenesVQ:
    """The trained tokenizer of a work folder, ready for use."""
    state = load_checkpoint(work / "vq.pt")
    model = ScenesVQ(VQConfig(**state["config"]))
    model.load_state_dict(state["model"])
    return model.eval()


def picture_loss(output: Tensor, images: Tensor) -> Tensor:
    """How far pictures `[images, 3, picture, picture]` are from others, and how far their edges are."""
    difference = output - images
    across = difference[..., 1:] - difference[..., :-1]
    down = difference[..., 1:, :] - difference[..., :-1, :]
    return difference.abs().mean() + difference.square().mean() + 0.5 * (across.abs().mean() + down.abs().mean())
