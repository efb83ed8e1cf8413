"""VQ tokenizer of `scenes`, which converts images to 16 x 16 codes and back, and its training.

The encoder computes the code of a cell from a small neighbourhood of the cell only. Local codes are easier to
predict for the target. The codebook has one unit vector of 8 numbers per code. In training, each codebook vector is an
exponential moving average of the encoded vectors that are assigned to it. Unused codes move to encoded vectors that are
far from their nearest code.

A `ScenesVQConfig` describes the size of a tokenizer. Every checkpoint contains the config of its tokenizer.
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
from .data import render_images
from .stopwatch import Stopwatch

CODE_DIM = 8
GRID = 16
RATE = 1e-3
MUON_RATE = 0.02
POOL = 1024  # number of images that are rendered at a time
PASSES = 4  # number of times that each image is used for training
SEATED = 80  # number of first steps that train without the codebook


@dataclass(frozen=True)
class ScenesVQConfig:
    """Sizes of a tokenizer; the defaults are the sizes of the bundled model."""

    patch: int = 4  # side in pixels of the squares that become channels; the image size is 64 * patch
    codes: int = 2048
    encoder: tuple[int, int] = (128, 256)  # channels at 32 x 32 and 16 x 16
    decoder: tuple[tuple[int, int], ...] = ((192, 3), (128, 2), (64, 1))  # channels and blocks at 16 x 16, 32 x 32, ...

    @property
    def image_size(self) -> int:
        """Height and width of the images in pixels."""
        return 4 * GRID * self.patch


VQ_SIZES: Mapping[str, ScenesVQConfig] = {
    "128": ScenesVQConfig(patch=2, codes=1024, encoder=(40, 112), decoder=((144, 2), (72, 1), (32, 1))),
    "256": ScenesVQConfig(),
}


def find_vq_config(name: str) -> ScenesVQConfig:
    """Return the config of a tokenizer by the name of its image size.

    Raises:
        RequestError: `VQ_SIZES` has no such name.
    """
    if name not in VQ_SIZES:
        raise RequestError(field="size", found=repr(name), expected=f"one of {', '.join(VQ_SIZES)}")
    return VQ_SIZES[name]


class ResidualBlock(nn.Module):
    """Residual block: the sum of its input and two 3x3 convolutions of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.second(F.silu(self.first(F.silu(x))))
        return x + change


class VQEncoder(nn.Module):
    """Network from images `[images, 3, size, size]` in [-1, 1] to unit vectors `[images, 8, 16, 16]`."""

    def __init__(self, config: ScenesVQConfig) -> None:
        super().__init__()
        middle, width = config.encoder
        self.patch = config.patch
        self.down1 = nn.Conv2d(3 * config.patch**2, middle, 4, stride=2, padding=1)
        self.down2 = nn.Conv2d(middle, width, 4, stride=2, padding=1)
        self.residual = ResidualBlock(width)
        self.project = nn.Conv2d(width, CODE_DIM, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = F.silu(self.down1(F.pixel_unshuffle(images, self.patch)))
        x = F.silu(self.residual(self.down2(x)))
        return F.normalize(self.project(x).float(), dim=1)


class VQDecoder(nn.Module):
    """Network from codebook vectors `[images, 8, 16, 16]` to images `[images, 3, size, size]` in about [-1, 1]."""

    def __init__(self, config: ScenesVQConfig) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        previous_width = 0
        for width, blocks in config.decoder:
            if previous_width:
                layers += [nn.Conv2d(previous_width, 4 * width, 3, padding=1), nn.PixelShuffle(2)]
            else:
                layers += [nn.Conv2d(CODE_DIM, width, 3, padding=1)]
            layers += [ResidualBlock(width) for _ in range(blocks)]
            previous_width = width
        upscale = config.image_size // (GRID * 2 ** (len(config.decoder) - 1))
        layers += [nn.SiLU(), nn.Conv2d(previous_width, 3 * upscale**2, 3, padding=1), nn.PixelShuffle(upscale)]
        self.layers = nn.Sequential(*layers)

    def forward(self, vectors: Tensor) -> Tensor:
        pictures: Tensor = self.layers(vectors)
        return pictures


class ScenesVQ(nn.Module):
    """VQ tokenizer: an encoder, a codebook and a decoder.

    Attributes:
        codebook: unit vectors of the codes, `[codes, 8]`.
        members: moving average of the number of vectors per step that are assigned to each code, `[codes]`.
        sums: moving average of the sums of these vectors, `[codes, 8]`.
    """

    codebook: Tensor
    members: Tensor
    sums: Tensor

    def __init__(self, config: ScenesVQConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or ScenesVQConfig()
        self.encoder = VQEncoder(config)
        self.decoder = VQDecoder(config)
        for module in self.modules():  # so that residual blocks return their input when training starts
            if isinstance(module, ResidualBlock):
                nn.init.zeros_(module.second.weight)
        start = F.normalize(torch.randn(config.codes, CODE_DIM), dim=1)
        self.register_buffer("codebook", start)
        self.register_buffer("members", torch.ones(config.codes))
        self.register_buffer("sums", start.clone())

    def find_nearest_codes(self, vectors: Tensor) -> Tensor:
        """Return the nearest codes `[images, 16, 16]` of unit vectors `[images, 8, 16, 16]`."""
        flat = vectors.permute(0, 2, 3, 1).reshape(-1, CODE_DIM)
        # For unit vectors, the largest dot product means the smallest distance.
        return (flat @ self.codebook.T).argmax(1).view(-1, GRID, GRID)

    def lookup_vectors(self, codes: Tensor) -> Tensor:
        """Return the codebook vectors `[images, 8, 16, 16]` of codes `[images, 16, 16]`."""
        return self.codebook[codes].permute(0, 3, 1, 2)

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes `[images, 256]` or `[images, 16, 16]` to images `[images, 3, size, size]`."""
        pictures: Tensor = self.decoder(self.lookup_vectors(codes.view(-1, GRID, GRID)))
        return pictures

    @torch.no_grad()
    def encode(self, pictures: NDArray[np.uint8], batch: int = 64) -> NDArray[np.int16]:
        """Encode uint8 images `[images, size, size, 3]` as codes, int16 `[images, 256]`, `batch` images at a time."""
        parts = []
        for i in range(0, len(pictures), batch):
            vectors = self.encoder(to_tensor(pictures[i : i + batch], self.codebook.device))
            parts.append(self.find_nearest_codes(vectors).flatten(1).cpu().numpy().astype(np.int16))
        return np.concatenate(parts)

    @torch.no_grad()
    def update_codebook(self, vectors: Tensor, codes: Tensor, decay: float = 0.98) -> None:
        """Update the codebook in place.

        Each codebook vector moves towards the mean of the vectors that are assigned to it. Unused codes move to vectors
        that are far from their nearest code.

        Args:
            vectors: unit vectors of a batch, `[images, 8, 16, 16]`.
            codes: nearest code of each vector, `[images, 16, 16]`.
            decay: decay of the moving averages per step.
        """
        flat = vectors.permute(0, 2, 3, 1).reshape(-1, CODE_DIM)
        index = codes.flatten()
        count = torch.bincount(index, minlength=self.config.codes).float()
        self.members.lerp_(count, 1 - decay)
        self.sums.lerp_(torch.zeros_like(self.sums).index_add_(0, index, flat), 1 - decay)
        unused = self.members < 0.1
        if unused.any():
            num_moved = min(int(unused.sum()), len(flat) // 4)
            # A random quarter of the worst vectors, because the worst vectors resemble each other.
            badly_served = (flat * self.codebook[index]).sum(1).topk(4 * num_moved, largest=False).indices
            moved_codes = unused.nonzero()[:num_moved, 0]
            self.sums[moved_codes] = flat[badly_served[torch.randperm(len(badly_served))[:num_moved]]] * 0.5
            self.members[moved_codes] = 0.5
        self.codebook.copy_(F.normalize(self.sums, dim=1))


def to_tensor(pictures: NDArray[np.uint8], device: str | torch.device = "cpu") -> Tensor:
    """Convert uint8 images `[images, size, size, 3]` to float32 `[images, 3, size, size]` in [-1, 1].

    The memory format is channels last, in which convolutions are faster on CPUs.
    """
    scaled = torch.from_numpy(np.ascontiguousarray(pictures)).to(device).permute(0, 3, 1, 2).float() / 127.5 - 1
    return scaled.contiguous(memory_format=torch.channels_last)


def measure_psnr(model: ScenesVQ, pictures: NDArray[np.uint8]) -> float:
    """Return the peak signal-to-noise ratio in dB of images that the tokenizer encodes and decodes.

    Args:
        model: VQ tokenizer.
    """
    with torch.no_grad(), mixed_precision(model.codebook.device):
        decoded = model.decode(torch.from_numpy(model.encode(pictures)).long().to(model.codebook.device)).cpu()
    error = ((decoded.float().clamp(-1, 1) - to_tensor(pictures)) / 2).square().mean()
    return float(-10 * torch.log10(error))


def train_vq(
    work_folder: Path,
    minutes: float,
    seed: int = 0,
    batch: int = 16,
    device: str = "cpu",
    config: ScenesVQConfig | None = None,
) -> None:
    """Train the VQ tokenizer of a work folder.

    `vq.pt` and `vq-state.pt`, from which an interrupted call continues, are written every two minutes. The first
    `SEATED` steps train an autoencoder without codebook. Then the codebook starts with encoded vectors of the batch. If
    a codebook is used from the first step, training collapses to few codes.

    Args:
        work_folder: folder of checkpoints.
        minutes: minutes of training, including earlier calls; the learning rate falls to zero over this time.
        seed: seed of the images and the weights.
        batch: number of images per step.
        device: PyTorch device.
        config: sizes of the tokenizer; None: those of the tokenizer in the work folder, or else `ScenesVQConfig()`.

    Raises:
        CheckpointError: the tokenizer in the work folder has another config.
    """
    torch.manual_seed(seed)
    path = work_folder / "vq.pt"
    state_path = work_folder / "vq-state.pt"
    start_path = state_path if state_path.exists() else path
    state = load_checkpoint(start_path) if start_path.exists() else {}
    stored_config = ScenesVQConfig(**state["config"]) if state else config or ScenesVQConfig()
    if config is not None and stored_config != config:
        raise CheckpointError(
            field=str(start_path),
            found=f"a tokenizer of {stored_config.image_size} pixels a side",
            expected=str(config.image_size),
            remedy="give another --work, or leave --size out",
        )
    config = stored_config
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
    # A tokenizer that was restored from a bundle has a codebook already, so the steps without codebook are skipped.
    seated = SEATED + 1 if state and not step else 0
    if state:
        model.load_state_dict(state["model"])
    if "muon" in state:
        muon.load_state_dict(state["muon"])
        adam.load_state_dict(state["adam"])
    test_images = render_images(64, seed + 999, config.image_size, workers=1)

    def save() -> None:
        weights = {"model": model.state_dict(), "config": asdict(config)}
        save_checkpoint(path, weights)
        progress_state = {
            "muon": muon.state_dict(),
            "adam": adam.state_dict(),
            "step": step,
            "seconds": watch.seconds(),
        }
        save_checkpoint(state_path, weights | progress_state)

    rendered = iterate_training_images(batch, config.image_size, seed, step)
    last_save = last_print = watch.seconds()
    while (progress := watch.seconds() / (60 * minutes)) < 1:
        rate = min(1, (step + 1) / 50, (1 - progress) / 0.6)
        muon.param_groups[0]["lr"] = MUON_RATE * rate
        adam.param_groups[0]["lr"] = RATE * rate
        images = to_tensor(next(rendered), device)
        loss = _compute_step_loss(model, images, step + seated)
        muon.zero_grad(set_to_none=True)
        adam.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adam.step()
        step += 1
        now = watch.seconds()
        if now - last_print > 60:
            last_print = now
            print(
                f"vq {now:5.0f} s  step {step}  loss {loss.item():.4f}  PSNR {measure_psnr(model, test_images):.2f} dB",
                flush=True,
            )
        if now - last_save > 120:
            last_save = now
            save()
    save()
    codes = torch.from_numpy(model.encode(test_images).astype(np.int64))
    share = torch.bincount(codes.flatten(), minlength=config.codes).double() / codes.numel()
    perplexity = torch.exp(-(share * share.clamp_min(1e-12).log()).sum()).item()
    print(
        f"vq done: PSNR {measure_psnr(model, test_images):.2f} dB, codes used {int((share > 0).sum())}, "
        f"perplexity {perplexity:.0f}"
    )


def _compute_step_loss(model: ScenesVQ, images: Tensor, step: int) -> Tensor:
    """Compute the loss of a batch and update the codebook. Before step `SEATED` the codebook is not used."""
    with mixed_precision(images.device):
        vectors = model.encoder(images)
    decoder_input = vectors
    commitment = vectors.new_zeros(())
    if step >= SEATED:
        detached = vectors.detach()
        if step == SEATED:
            flat = detached.permute(0, 2, 3, 1).reshape(-1, CODE_DIM)
            model.codebook.copy_(flat[torch.randint(len(flat), (len(model.codebook),))])
            model.sums.copy_(model.codebook)
        codes = model.find_nearest_codes(detached)
        quantised = model.lookup_vectors(codes)
        model.update_codebook(detached, codes)
        # Straight-through gradient: the decoder reads codebook vectors, and gradients flow to the encoder.
        decoder_input = vectors + (quantised - vectors).detach()
        commitment = 0.25 * (vectors - quantised).square().sum(1).mean()
    with mixed_precision(images.device):
        output = model.decoder(decoder_input)
    loss: Tensor = image_loss(output.float(), images) + commitment
    return loss


def iterate_training_images(batch_size: int, size: int, seed: int, first_step: int) -> Iterator[NDArray[np.uint8]]:
    """Yield batches of rendered images, uint8 `[batch_size, size, size, 3]`, without end.

    Each image is used `PASSES` times, since rendering is slow.

    Args:
        batch_size: number of images per batch.
        size: height and width of the images in pixels.
        seed: seed of the scenes and of the sequence of images.
        first_step: number of batches that earlier calls used and that are skipped.
    """
    steps = POOL * PASSES // batch_size
    index, done = divmod(first_step, steps)
    while True:
        pictures = render_images(POOL, seed + 100_000 + index, size, workers=torch.get_num_threads())
        rng = np.random.default_rng((seed, index))
        order = np.concatenate([rng.permutation(POOL) for _ in range(PASSES)])
        for i in range(done, steps):
            yield pictures[order[i * batch_size : (i + 1) * batch_size]]
        index = index + 1
        done = 0


def load_vq(work_folder: Path) -> ScenesVQ:
    """Load the trained tokenizer of a work folder, in evaluation mode."""
    state = load_checkpoint(work_folder / "vq.pt")
    model = ScenesVQ(ScenesVQConfig(**state["config"]))
    model.load_state_dict(state["model"])
    return model.eval()


def image_loss(output: Tensor, images: Tensor) -> Tensor:
    """Return the difference between two batches of images, in pixel values and in edges.

    Args:
        output: decoded images, `[images, 3, size, size]`.
        images: images that the decoder should return, of the same shape.
    """
    difference = output - images
    across = difference[..., 1:] - difference[..., :-1]
    down = difference[..., 1:, :] - difference[..., :-1, :]
    return difference.abs().mean() + difference.square().mean() + 0.5 * (across.abs().mean() + down.abs().mean())
