"""Adversarial training of the VQ tokenizer's decoder, for sharper images from the same codes.

A decoder that is trained on pixel differences returns the mean of all images with the same codes, which is blurred.
Here the decoder gets two more losses, from a critic that learns to tell decoded images from rendered images. One loss
is the critic's opinion of the decoded image. The other is the distance between the critic's features of both images.
The encoder and the codebook do not change, so a target that was trained on the codes stays valid. Sources: hinge loss
as in Lim, Ye (2017), feature matching as in Salimans et al. (2016), critics of patches as in Isola et al. (2017).
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lantern_rt.train.precision import mixed_precision

from .checkpoints import load_checkpoint, save_checkpoint
from .data import render_images
from .stopwatch import Stopwatch
from .vq import image_loss, iterate_training_images, load_vq, measure_psnr, to_tensor

RATE = 2e-4
CRITIC_RATE = 4e-4
OPINION = 0.01  # weight of the critic's opinion beside `image_loss`
FEATURES = 0.1  # weight of the distance of the critic's features
ALONE = 60  # steps that the critic learns alone at first
SEED = 40_000  # seed of images that the tokenizer was not trained on


class Critic(nn.Module):
    """Network that tells decoded images from rendered images.

    For images `[n, 3, size, size]` it returns the features of every layer, and last the opinions
    `[n, 1, size / 16, size / 16]`. An opinion is positive for a patch that looks rendered.
    """

    def __init__(self) -> None:
        super().__init__()
        widths = (12, 48, 96, 192)
        self.layers = nn.ModuleList(
            spectral_norm(nn.Conv2d(inputs, outputs, 4, stride=2, padding=1)) for inputs, outputs in pairwise(widths)
        )
        self.opinion = spectral_norm(nn.Conv2d(widths[-1], 1, 3, padding=1))

    def forward(self, pictures: Tensor) -> list[Tensor]:
        features = [F.pixel_unshuffle(pictures, 2)]
        for layer in self.layers:
            features.append(F.leaky_relu(layer(features[-1]), 0.2))
        return [*features[1:], self.opinion(features[-1])]


def sharpen_vq_decoder(work_folder: Path, minutes: float, batch: int = 16, device: str = "cpu") -> None:
    """Train the decoder of `work_folder/vq.pt` against a critic.

    `vq.pt` and `sharpen-state.pt`, from which an interrupted call continues, are written every two minutes.

    Args:
        work_folder: folder of checkpoints.
        minutes: minutes of training, including earlier calls; the learning rates fall to zero over this time.
        batch: number of images per step.
        device: PyTorch device.
    """
    torch.manual_seed(6)
    vq = load_vq(work_folder).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    critic = Critic().to(device)
    adam = torch.optim.AdamW(vq.decoder.parameters(), RATE, betas=(0.5, 0.95), weight_decay=0.0)
    critic_adam = torch.optim.AdamW(critic.parameters(), CRITIC_RATE, betas=(0.5, 0.95), weight_decay=0.0)
    parts = {"decoder": vq.decoder, "critic": critic, "adam": adam, "critic_adam": critic_adam}
    state_path = work_folder / "sharpen-state.pt"
    state = load_checkpoint(state_path) if state_path.exists() else {}
    for name in parts.keys() & state.keys():
        parts[name].load_state_dict(state[name])
    step = state.get("step", 0)
    watch = Stopwatch(device, state.get("seconds", 0.0))
    size = vq.config.image_size
    test_images = render_images(64, SEED - 1, size, workers=1)

    def save() -> None:
        save_checkpoint(work_folder / "vq.pt", {"model": vq.state_dict(), "config": asdict(vq.config)})
        states = {name: part.state_dict() for name, part in parts.items()}
        save_checkpoint(state_path, states | {"step": step, "seconds": watch.seconds()})

    rendered = iterate_training_images(batch, size, SEED, step)
    last_save = last_print = watch.seconds()
    while (progress := watch.seconds() / (60 * minutes)) < 1:
        rate = min(1, (step + 1) / 50, (1 - progress) / 0.4)
        adam.param_groups[0]["lr"] = RATE * rate
        critic_adam.param_groups[0]["lr"] = CRITIC_RATE * rate
        images = to_tensor(next(rendered), device)
        with mixed_precision(device):
            with torch.no_grad():
                vectors = vq.lookup_vectors(vq.find_nearest_codes(vq.encoder(images)))
            decoded = vq.decoder(vectors).float()
            real_features = critic(images)
            fake_features = critic(decoded.detach())
        critic_loss = F.relu(1 - real_features[-1].float()).mean() + F.relu(1 + fake_features[-1].float()).mean()
        critic_adam.zero_grad(set_to_none=True)
        torch.autograd.backward(critic_loss)
        critic_adam.step()
        loss = image_loss(decoded, images)
        if step >= ALONE:  # before, the critic cannot tell the images apart and its losses would mislead the decoder
            with mixed_precision(device):
                fake_features = critic(decoded)
            distances = [
                F.l1_loss(a.float(), b.detach().float())
                for a, b in zip(fake_features[:-1], real_features[:-1], strict=True)
            ]
            loss = loss + FEATURES * torch.stack(distances).sum() - OPINION * fake_features[-1].float().mean()
        adam.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(vq.decoder.parameters(), 1.0)
        adam.step()
        step += 1
        now = watch.seconds()
        if now - last_print > 60:
            last_print = now
            figures = (
                f"loss {loss.item():.4f}  critic {critic_loss.item():.3f}  PSNR {measure_psnr(vq, test_images):.2f} dB"
            )
            print(f"sharpen {now:5.0f} s  step {step}  {figures}", flush=True)
        if now - last_save > 120:
            last_save = now
            save()
    save()
    print(f"sharpen done: PSNR {measure_psnr(vq, test_images):.2f} dB")
