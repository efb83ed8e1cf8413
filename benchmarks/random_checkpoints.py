"""Checkpoints of published sizes with random weights, in the published files' layouts, written piece by piece.

Does not know exports or what they cost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from lantern_rt.cli.families import Checkpoints
from lantern_rt.export.models.llamagen_vq import LlamaGenVQ, VQConfig

CLASSES = 1000
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_BLOCK = 1 << 22  # random numbers, which then repeat; what they cost does not
_FIRST_CODE, _BEGIN_OF_IMAGE, _END_OF_TURN = 4, 8197, 8710  # Chameleon's tokens
_LEVELS = (1, 1, 2, 2, 4)  # widths of the image tokenizers' levels, in units of the first
Sizes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Shape:
    """Sizes of a target and of the image tokenizer (`vq_width`: of its first level); `tokens`: a joint vocabulary of
    text and codes, as Chameleon has, with a drafter; without, class-conditional LlamaGen."""

    layers: int
    heads: int
    width: int
    intermediate_size: int
    codes: int
    grid: int
    dtype: torch.dtype
    vq_width: int = 128
    tokens: int | None = None

    @property
    def layer_numbers(self) -> int:
        """Weights of a layer."""
        return 4 * self.width**2 + 3 * self.width * self.intermediate_size


SHAPES = {
    "tiny": Shape(2, 4, 64, 128, 128, 4, torch.bfloat16, 32),
    "tiny-anole": Shape(2, 4, 64, 128, 128, 2, torch.bfloat16, 32, 9000),
    "GPT-B": Shape(12, 12, 768, 2048, 16384, 16, torch.float32),
    "GPT-XL": Shape(36, 20, 1280, 3584, 16384, 16, torch.float32),
    "GPT-3B": Shape(24, 32, 3200, 8704, 16384, 24, torch.float32),
    "Anole-7B": Shape(32, 32, 4096, 11008, 8192, 32, torch.bfloat16, 128, 65536),
}


def write_checkpoints(shape: Shape, folder: Path) -> tuple[str, Checkpoints]:
    """Write all that an export reads; returns the family and where it lies."""
    return _write_anole(shape, folder) if shape.tokens else _write_llamagen(shape, folder)


def _write_llamagen(shape: Shape, folder: Path) -> tuple[str, Checkpoints]:
    target, vq, config = folder / "target.safetensors", folder / "vq.pt", folder / "config.json"
    _write_weights(target, _llamagen(shape), shape.dtype)
    tokenizer = _tokenizer(shape, VQConfig(shape.codes, 8, 256, shape.vq_width, *_widths(shape), 2))
    state = tokenizer.state_dict()
    state["quantize.embedding.weight"] = torch.randn_like(state.pop("codebook"))
    torch.save({"model": state}, vq)
    config.write_text(json.dumps({"n_head": shape.heads}))
    return "llamagen", Checkpoints(target, vq, config=config, grid=shape.grid)


def _llamagen(shape: Shape) -> Sizes:
    """Names and shapes of an official class-conditional LlamaGen transformer."""
    width = shape.width
    yield "tok_embeddings.weight", (shape.codes, width)
    yield "cls_embedding.embedding_table.weight", (CLASSES + 1, width)
    for i in range(shape.layers):
        yield f"layers.{i}.attention.wqkv.weight", (3 * width, width)
        yield f"layers.{i}.attention.wo.weight", (width, width)
        yield f"layers.{i}.feed_forward.w1.weight", (shape.intermediate_size, width)
        yield f"layers.{i}.feed_forward.w3.weight", (shape.intermediate_size, width)
        yield f"layers.{i}.feed_forward.w2.weight", (width, shape.intermediate_size)
        yield f"layers.{i}.attention_norm.weight", (width,)
        yield f"layers.{i}.ffn_norm.weight", (width,)
    yield "norm.weight", (width,)
    yield "output.weight", (shape.codes, width)


def _write_anole(shape: Shape, folder: Path) -> tuple[str, Checkpoints]:
    """A Chameleon folder in Hugging Face's layout, its VQGAN, and LANTERN's drafter of one layer."""
    assert shape.tokens is not None
    target, vq, drafter = folder / "target", folder / "vqgan", folder / "drafter"
    for each in (target, vq, drafter):
        each.mkdir()
    _write_weights(target / "model.safetensors", _chameleon(shape), shape.dtype)
    _write_weights(drafter / "model.safetensors", _drafter(shape), shape.dtype)
    named = {"<s>": 0, "<racm3:break>": _BEGIN_OF_IMAGE, "<reserved08706>": _END_OF_TURN}
    codes = {f"IMGIMG{_letters(code)}Z": _FIRST_CODE + code for code in range(shape.codes)}
    sizes = {
        "model_type": "chameleon",
        "hidden_size": shape.width,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "vocab_size": shape.tokens,
    }
    whole = sizes | {"num_hidden_layers": shape.layers, "vocabulary_map": named | codes}
    (target / "config.json").write_text(json.dumps(whole))
    (drafter / "config.json").write_text(json.dumps(sizes | {"num_hidden_layers": 1}))
    words = {word: _END_OF_TURN + 1 + i for i, word in enumerate(("<unk>", "a", "red", "cube", "on", "sand"))}
    tokenizer = Tokenizer(WordLevel(named | words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(target / "tokenizer.json"))
    _write_vqgan(shape, vq)
    return "anole", Checkpoints(target, vq, drafter)


def _chameleon(shape: Shape) -> Sizes:
    assert shape.tokens is not None
    yield "model.embed_tokens.weight", (shape.tokens, shape.width)
    for i in range(shape.layers):
        yield from _hugging_face_layer(shape, f"model.layers.{i}.")
        yield f"model.layers.{i}.input_layernorm.weight", (shape.width,)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            yield f"model.layers.{i}.{name}.weight", (shape.heads, shape.width // shape.heads)
            yield f"model.layers.{i}.{name}.bias", (shape.heads, shape.width // shape.heads)
    yield "model.norm.weight", (shape.width,)
    yield "lm_head.weight", (shape.tokens, shape.width)


def _drafter(shape: Shape) -> Sizes:
    assert shape.tokens is not None
    yield "embed_tokens.weight", (shape.tokens, shape.width)
    yield "fc.weight", (shape.width, 2 * shape.width)
    yield "fc.bias", (shape.width,)
    yield from _hugging_face_layer(shape, "layers.0.")


def _hugging_face_layer(shape: Shape, prefix: str) -> Sizes:
    for part in "qkvo":
        yield f"{prefix}self_attn.{part}_proj.weight", (shape.width, shape.width)
    for part in ("gate", "up"):
        yield f"{prefix}mlp.{part}_proj.weight", (shape.intermediate_size, shape.width)
    yield f"{prefix}mlp.down_proj.weight", (shape.width, shape.intermediate_size)
    yield f"{prefix}post_attention_layernorm.weight", (shape.width,)


def _letters(code: int) -> str:
    """A code's digits as Chameleon's vocabulary spells them: A is 0."""
    return "".join(chr(ord("A") + int(digit)) for digit in str(code))


def _write_vqgan(shape: Shape, folder: Path) -> None:
    """A VQGAN in taming-transformers' layout."""
    width, top = 256, len(_LEVELS) - 1
    config = VQConfig(shape.codes, width, width, shape.vq_width, *_widths(shape), 2, attention=False)
    state = {"quantize.embedding.weight": torch.randn(shape.codes, width)}
    for name, weight in _tokenizer(shape, config).state_dict().items():
        for i, part in enumerate(("block_1", "attn_1", "block_2")):
            name = name.replace(f".mid.{i}.", f".mid.{part}.")
        name = re.sub(r"encoder\.conv_blocks\.(\d+)", r"encoder.down.\1", name)
        name = re.sub(r"decoder\.conv_blocks\.(\d+)", lambda found: f"decoder.up.{top - int(found[1])}", name)
        if name != "codebook":
            state[name.replace(".res.", ".block.")] = weight
    torch.save({"state_dict": state}, folder / "vqgan.ckpt")
    sizes = {"z_channels": width, "ch": shape.vq_width, "num_res_blocks": 2, "resolution": shape.grid * 2**top}
    parameters = {"embed_dim": width, "n_embed": shape.codes, "ddconfig": sizes}
    (folder / "vqgan.yaml").write_text(yaml.safe_dump({"model": {"params": parameters}}))


def _widths(shape: Shape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    widths = tuple(shape.vq_width * level for level in _LEVELS)
    return widths, widths[::-1]


def _tokenizer(shape: Shape, config: VQConfig) -> LlamaGenVQ:
    torch.manual_seed(0)
    return LlamaGenVQ(config)


def _write_weights(path: Path, sizes: Sizes, dtype: torch.dtype) -> None:
    """A safetensors file, tensor by tensor; matrices keep the size of what they multiply."""
    header: dict[str, object] = {}
    at, listed = 0, list(sizes)
    for name, size in listed:
        end = at + torch.Size(size).numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": size, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator().manual_seed(0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, size in listed:
            if "norm" in name or len(size) == 1:
                one = 0.0 if name.endswith(".bias") else 1.0
                file.write(torch.full(size, one, dtype=dtype).view(torch.uint8).numpy().data)
                continue
            row = torch.randn(_BLOCK, generator=generator) * (0.5 / size[1] ** 0.5)
            block = row.to(dtype).view(torch.uint8).numpy().data
            left = torch.Size(size).numel() * dtype.itemsize
            while left:
                left -= file.write(block[:left])
