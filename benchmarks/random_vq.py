"""Writers of image tokenizers with random weights, in the sizes and file layouts of published tokenizers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import yaml
from safetensors.torch import save_file

from lantern_rt.export.models.llamagen_vq import LlamaGenVQ, VQTokenizerConfig
from lantern_rt.export.models.movqgan import Emu3VQ, MoVQ
from lantern_rt.export.models.vq_checkpoints import CODEBOOK

if TYPE_CHECKING:
    from random_bundle import ModelShape

_VQ_WIDTH = 256  # channels at the lowest resolution
_LEVELS = (1, 1, 2, 2, 4)  # channels of each resolution level, as multiples of the first level
_COSMOS_LEVELS = (2, 4, 4)  # channels of each resolution level, as multiples of `vq_width`
_COSMOS_LATENTS = 16  # channels at the lowest resolution
_COSMOS_DIGITS = 6  # digits of a code in finite scalar quantization
_COSMOS_BANDS = 192  # channels after the wavelet transform of the image
_EMU3_LEVELS = (1, 2, 2, 4)  # channels of each resolution level, as multiples of the first level
_EMU3_WIDTH = 4  # channels of Emu3's codes and latents
_FRAMES_LOG2 = 2  # base-2 logarithm of the number of video frames per code grid
Sizes = Iterator[tuple[str, tuple[int, ...]]]


def write_llamagen_vq(shape: ModelShape, folder: Path) -> None:
    """Write LlamaGen's image tokenizer."""
    state = _make_tokenizer_weights(shape, 8, with_attention=True)
    state[CODEBOOK] = torch.randn_like(state.pop("codebook"))
    state["decoder.conv_out.weight"] /= 8  # gives pixels about the contrast of an image
    torch.save({"model": state}, folder / "vq.pt")


def write_vqgan(shape: ModelShape, folder: Path) -> None:
    """Write Chameleon's image tokenizer in the layout of taming-transformers."""
    last_level = len(_LEVELS) - 1
    state = _rename_to_taming(_make_tokenizer_weights(shape, _VQ_WIDTH, with_attention=False), last_level)
    folder.mkdir()
    torch.save({"state_dict": state}, folder / "vqgan.ckpt")
    sizes = {
        "z_channels": _VQ_WIDTH,
        "ch": shape.vq_width,
        "num_res_blocks": 2,
        "resolution": shape.grid * 2**last_level,
    }
    parameters = {"embed_dim": _VQ_WIDTH, "n_embed": shape.codes, "ddconfig": sizes}
    (folder / "vqgan.yaml").write_text(yaml.safe_dump({"model": {"params": parameters}}))


def write_ibq(shape: ModelShape, folder: Path) -> None:
    """Write Emu3.5's image tokenizer."""
    folder.mkdir()
    weights = _make_tokenizer_weights(shape, _VQ_WIDTH, with_attention=True, num_blocks=4)
    save_file(_rename_to_taming(weights, len(_LEVELS) - 1), folder / "model.safetensors")


def _make_movqgan_config(shape: ModelShape) -> VQTokenizerConfig:
    torch.manual_seed(0)
    widths = tuple(shape.vq_width * level for level in _EMU3_LEVELS)
    return VQTokenizerConfig(shape.codes, _EMU3_WIDTH, _EMU3_WIDTH, shape.vq_width, widths, widths[::-1], 2)


def write_movqgan(shape: ModelShape, folder: Path) -> None:
    """Write the image tokenizer of Lumina-mGPT 2.0."""
    state = _rename_to_taming(dict(MoVQ(_make_movqgan_config(shape)).state_dict()), len(_EMU3_LEVELS) - 1)
    folder.mkdir()
    file = folder / "movqgan_270M.ckpt"
    torch.save({name.replace("decoder.post", "post"): weight for name, weight in state.items()}, file)


def write_emu3_vq(shape: ModelShape, folder: Path) -> None:
    """Write Emu3's image tokenizer.

    Kernels over time in the decoder have only the last slice, as an image uses no other slice.
    """
    video = Emu3VQ(_FRAMES_LOG2, _make_movqgan_config(shape))
    state = _rename_to_taming(dict(video.state_dict()), len(_EMU3_LEVELS) - 1)
    for i in range(_FRAMES_LOG2):
        state[f"encoder.time_conv.{i}.weight"] = torch.randn(_EMU3_WIDTH, _EMU3_WIDTH, 4, 3, 3) / 8
        state[f"encoder.time_conv.{i}.bias"] = torch.zeros(_EMU3_WIDTH)
    folder.mkdir()
    save_file(state, folder / "model.safetensors")


def write_cosmos_tokenizer(shape: ModelShape, folder: Path) -> None:
    """Write the Cosmos image tokenizer, including the convolution kernels over time."""
    generator = torch.Generator().manual_seed(0)
    folder.mkdir()
    for module_name in ("encoder", "decoder"):
        state = {}
        for name, size in _yield_cosmos_weights(module_name, shape.vq_width):
            fans = torch.Size(size[1:]).numel()
            normed = ".norm" in name
            state[f"{name}.weight"] = torch.ones(size) if normed else torch.randn(size, generator=generator) / fans**0.5
            state[f"{name}.bias"] = torch.zeros(size[0])
        save_file(state, folder / f"{module_name}.safetensors")


def _yield_cosmos_weights(module_name: str, width: int) -> Sizes:
    """Yield names and shapes of the weights of the encoder or the decoder."""

    def yield_conv_pair(name: str, in_channels: int, out_channels: int) -> Sizes:
        yield f"{name}.0.conv3d", (out_channels, in_channels, 1, 3, 3)
        yield f"{name}.1.conv3d", (out_channels, out_channels, 3, 1, 1)

    def yield_residual_block(name: str, in_channels: int, out_channels: int) -> Sizes:
        for i, previous_width in ((1, in_channels), (2, out_channels)):
            yield f"{name}.norm{i}.norm", (previous_width,)
            yield from yield_conv_pair(f"{name}.conv{i}", previous_width, out_channels)
        if in_channels != out_channels:
            yield f"{name}.nin_shortcut.conv3d", (out_channels, in_channels, 1, 1, 1)

    is_encoder = module_name == "encoder"
    widths = [width * level for level in _COSMOS_LEVELS]
    inner_width = widths[-1]
    outer_width = _COSMOS_BANDS
    quantiser = (_COSMOS_DIGITS, _COSMOS_LATENTS) if is_encoder else (_COSMOS_LATENTS, _COSMOS_DIGITS)
    yield f"{'' if is_encoder else 'post_'}quant_conv.conv3d", (*quantiser, 1, 1, 1)
    yield from yield_conv_pair(
        f"{module_name}.conv_in", outer_width if is_encoder else _COSMOS_LATENTS, width if is_encoder else inner_width
    )
    yield from yield_conv_pair(
        f"{module_name}.conv_out",
        inner_width if is_encoder else widths[0],
        _COSMOS_LATENTS if is_encoder else outer_width,
    )
    yield f"{module_name}.norm_out.norm", (inner_width if is_encoder else widths[0],)
    for part in ("block_1", "block_2"):
        yield from yield_residual_block(f"{module_name}.mid.{part}", inner_width, inner_width)
    for i in range(2):
        yield f"{module_name}.mid.attn_1.{i}.norm.norm", (inner_width,)
        for part in ("q", "k", "v", "proj_out"):
            yield f"{module_name}.mid.attn_1.{i}.{part}.conv3d", (inner_width, inner_width, 1, 1, 1)
    previous_width = width if is_encoder else inner_width
    for i in range(3) if is_encoder else reversed(range(3)):
        prefix = f"{module_name}.{'down' if is_encoder else 'up'}.{i}"
        for j in range(2 if is_encoder else 3):
            yield from yield_residual_block(f"{prefix}.block.{j}", previous_width, widths[i])
            previous_width = widths[i]
        if i != (2 if is_encoder else 0):
            kernels = (((1, 3, 3), (3, 1, 1)) if is_encoder else ((3, 1, 1), (1, 3, 3))) + ((1, 1, 1),)
            for j, kernel in enumerate(kernels, start=1):
                yield (
                    f"{prefix}.{'downsample' if is_encoder else 'upsample'}.conv{j}.conv3d",
                    (previous_width, previous_width, *kernel),
                )


def _rename_to_taming(weights: dict[str, torch.Tensor], last_level: int) -> dict[str, torch.Tensor]:
    """Return the weights under the names of taming-transformers; `last_level` is the index of the lowest resolution."""
    state = {}
    for name, weight in weights.items():
        for i, part in enumerate(("block_1", "attn_1", "block_2")):
            name = name.replace(f".mid.{i}.", f".mid.{part}.")
        name = re.sub(r"encoder\.conv_blocks\.(\d+)", r"encoder.down.\1", name)
        name = re.sub(r"decoder\.conv_blocks\.(\d+)", lambda match: f"decoder.up.{last_level - int(match[1])}", name)
        state[name.replace(".res.", ".block.")] = weight
    state[CODEBOOK] = torch.randn_like(state.pop("codebook"))
    return state


def _make_tokenizer_weights(
    shape: ModelShape, code_width: int, with_attention: bool, num_blocks: int = 2
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    widths = tuple(shape.vq_width * level for level in _LEVELS)
    config = (shape.codes, code_width, _VQ_WIDTH, shape.vq_width, widths, widths[::-1], num_blocks, with_attention)
    return dict(LlamaGenVQ(VQTokenizerConfig(*config)).state_dict())
