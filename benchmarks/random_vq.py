"""Image tokenizers of published sizes with random weights, in the published files' layouts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import yaml
from safetensors.torch import save_file

from lantern_rt.export.models.llamagen_vq import LlamaGenVQ, VQConfig
from lantern_rt.export.models.movqgan import Emu3VQ, MoVQ
from lantern_rt.export.models.vq_checkpoints import CODEBOOK

if TYPE_CHECKING:
    from random_bundle import Shape

_VQ_WIDTH = 256  # channels of the image tokenizers' narrowest part
_LEVELS = (1, 1, 2, 2, 4)  # widths of the image tokenizers' levels, in units of the first
_COSMOS_LEVELS = (2, 4, 4)
_COSMOS_LATENTS = 16
_COSMOS_DIGITS = 6
_COSMOS_BANDS = 192
_EMU3_LEVELS = (1, 2, 2, 4)
_EMU3_WIDTH = 4  # channels of Emu3's codes and latents
_FRAMES_LOG2 = 2  # logarithm of the frames of a grid
Sizes = Iterator[tuple[str, tuple[int, ...]]]


def write_vq(shape: Shape, folder: Path) -> None:
    """Write LlamaGen's image tokenizer."""
    state = _tokenizer(shape, 8, attention=True)
    state[CODEBOOK] = torch.randn_like(state.pop("codebook"))
    state["decoder.conv_out.weight"] /= 8  # about an image's contrast; int8 is judged in levels
    torch.save({"model": state}, folder / "vq.pt")


def write_vqgan(shape: Shape, folder: Path) -> None:
    """Write Chameleon's image tokenizer in taming-transformers' layout."""
    top = len(_LEVELS) - 1
    state = _taming(_tokenizer(shape, _VQ_WIDTH, attention=False), top)
    folder.mkdir()
    torch.save({"state_dict": state}, folder / "vqgan.ckpt")
    sizes = {"z_channels": _VQ_WIDTH, "ch": shape.vq_width, "num_res_blocks": 2, "resolution": shape.grid * 2**top}
    parameters = {"embed_dim": _VQ_WIDTH, "n_embed": shape.codes, "ddconfig": sizes}
    (folder / "vqgan.yaml").write_text(yaml.safe_dump({"model": {"params": parameters}}))


def write_ibq(shape: Shape, folder: Path) -> None:
    """Write Emu3.5's image tokenizer."""
    folder.mkdir()
    weights = _tokenizer(shape, _VQ_WIDTH, attention=True, blocks=4)
    save_file(_taming(weights, len(_LEVELS) - 1), folder / "model.safetensors")


def _movqgan_config(shape: Shape) -> VQConfig:
    torch.manual_seed(0)
    widths = tuple(shape.vq_width * level for level in _EMU3_LEVELS)
    return VQConfig(shape.codes, _EMU3_WIDTH, _EMU3_WIDTH, shape.vq_width, widths, widths[::-1], 2)


def write_movqgan(shape: Shape, folder: Path) -> None:
    """Write the image tokenizer of Lumina-mGPT 2.0."""
    state = _taming(dict(MoVQ(_movqgan_config(shape)).state_dict()), len(_EMU3_LEVELS) - 1)
    folder.mkdir()
    file = folder / "movqgan_270M.ckpt"
    torch.save({name.replace("decoder.post", "post"): weight for name, weight in state.items()}, file)


def write_video_vq(shape: Shape, folder: Path) -> None:
    """Write Emu3's image tokenizer; of kernels in time, only the last slice where only that slice acts."""
    video = Emu3VQ(_FRAMES_LOG2, _movqgan_config(shape))
    state = _taming(dict(video.state_dict()), len(_EMU3_LEVELS) - 1)
    for i in range(_FRAMES_LOG2):
        state[f"encoder.time_conv.{i}.weight"] = torch.randn(_EMU3_WIDTH, _EMU3_WIDTH, 4, 3, 3) / 8
        state[f"encoder.time_conv.{i}.bias"] = torch.zeros(_EMU3_WIDTH)
    folder.mkdir()
    save_file(state, folder / "model.safetensors")


def write_cosmos(shape: Shape, folder: Path) -> None:
    """Write the Cosmos tokenizer with its names and its kernels in time."""
    generator = torch.Generator().manual_seed(0)
    folder.mkdir()
    for half in ("encoder", "decoder"):
        state = {}
        for name, size in _cosmos(half, shape.vq_width):
            fans = torch.Size(size[1:]).numel()
            normed = ".norm" in name
            state[f"{name}.weight"] = torch.ones(size) if normed else torch.randn(size, generator=generator) / fans**0.5
            state[f"{name}.bias"] = torch.zeros(size[0])
        save_file(state, folder / f"{half}.safetensors")


def _cosmos(half: str, width: int) -> Sizes:
    """Yield names and shapes of the weights of one half."""

    def pair(name: str, inputs: int, outputs: int) -> Sizes:
        yield f"{name}.0.conv3d", (outputs, inputs, 1, 3, 3)
        yield f"{name}.1.conv3d", (outputs, outputs, 3, 1, 1)

    def block(name: str, inputs: int, outputs: int) -> Sizes:
        for i, previous_width in ((1, inputs), (2, outputs)):
            yield f"{name}.norm{i}.norm", (previous_width,)
            yield from pair(f"{name}.conv{i}", previous_width, outputs)
        if inputs != outputs:
            yield f"{name}.nin_shortcut.conv3d", (outputs, inputs, 1, 1, 1)

    is_encoder = half == "encoder"
    widths = [width * level for level in _COSMOS_LEVELS]
    inner_width = widths[-1]
    outer_width = _COSMOS_BANDS
    quantiser = (_COSMOS_DIGITS, _COSMOS_LATENTS) if is_encoder else (_COSMOS_LATENTS, _COSMOS_DIGITS)
    yield f"{'' if is_encoder else 'post_'}quant_conv.conv3d", (*quantiser, 1, 1, 1)
    yield from pair(
        f"{half}.conv_in", outer_width if is_encoder else _COSMOS_LATENTS, width if is_encoder else inner_width
    )
    yield from pair(
        f"{half}.conv_out", inner_width if is_encoder else widths[0], _COSMOS_LATENTS if is_encoder else outer_width
    )
    yield f"{half}.norm_out.norm", (inner_width if is_encoder else widths[0],)
    for part in ("block_1", "block_2"):
        yield from block(f"{half}.mid.{part}", inner_width, inner_width)
    for i in range(2):
        yield f"{half}.mid.attn_1.{i}.norm.norm", (inner_width,)
        for part in ("q", "k", "v", "proj_out"):
            yield f"{half}.mid.attn_1.{i}.{part}.conv3d", (inner_width, inner_width, 1, 1, 1)
    previous_width = width if is_encoder else inner_width
    for i in range(3) if is_encoder else reversed(range(3)):
        prefix = f"{half}.{'down' if is_encoder else 'up'}.{i}"
        for j in range(2 if is_encoder else 3):
            yield from block(f"{prefix}.block.{j}", previous_width, widths[i])
            previous_width = widths[i]
        if i != (2 if is_encoder else 0):
            kernels = (((1, 3, 3), (3, 1, 1)) if is_encoder else ((3, 1, 1), (1, 3, 3))) + ((1, 1, 1),)
            for j, kernel in enumerate(kernels, start=1):
                yield (
                    f"{prefix}.{'downsample' if is_encoder else 'upsample'}.conv{j}.conv3d",
                    (previous_width, previous_width, *kernel),
                )


def _taming(weights: dict[str, torch.Tensor], top: int) -> dict[str, torch.Tensor]:
    """Name weights like taming-transformers; top: the last level."""
    state = {}
    for name, weight in weights.items():
        for i, part in enumerate(("block_1", "attn_1", "block_2")):
            name = name.replace(f".mid.{i}.", f".mid.{part}.")
        name = re.sub(r"encoder\.conv_blocks\.(\d+)", r"encoder.down.\1", name)
        name = re.sub(r"decoder\.conv_blocks\.(\d+)", lambda match: f"decoder.up.{top - int(match[1])}", name)
        state[name.replace(".res.", ".block.")] = weight
    state[CODEBOOK] = torch.randn_like(state.pop("codebook"))
    return state


def _tokenizer(shape: Shape, code_width: int, attention: bool, blocks: int = 2) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    widths = tuple(shape.vq_width * level for level in _LEVELS)
    config = (shape.codes, code_width, _VQ_WIDTH, shape.vq_width, widths, widths[::-1], blocks, attention)
    return dict(LlamaGenVQ(VQConfig(*config)).state_dict())
