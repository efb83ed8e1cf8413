"""Bundles of published sizes with random weights: what a benchmark needs to know a model's cost.

Checkpoints are written in the published files' layouts, piece by piece, and exported as a user would export them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from lantern_rt.export.families.anole import read_anole
from lantern_rt.export.families.llamagen import read_llamagen
from lantern_rt.export.graph.precision import read_precisions
from lantern_rt.export.models.llamagen_vq import LlamaGenVQ, VQConfig
from lantern_rt.export.writer import export_model

CLASSES = 1000
# How much a layer adds to what enters it, how well the drafter reads its token, and how far logits spread: random
# weights whose drafter is right about as often as a trained one, so that every path of the decode loop is walked.
LAYER_GAIN, DRAFTER_NOISE, LOGIT_SPREAD = 0.01, 0.3, 4.0
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_BLOCK = 1 << 22  # random numbers of a weight, which then repeat; what they cost does not
_FIRST_CODE, _BEGIN_OF_IMAGE, _END_OF_TURN = 4, 8197, 8710  # Chameleon's tokens
_VQ_WIDTH = 256  # of the image tokenizers' narrowest part
_LEVELS = (1, 1, 2, 2, 4)  # widths of the image tokenizers' levels, in units of the first
Sizes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Shape:
    """Sizes of a target and of the image tokenizer (`vq_width`: of its first level).

    vocab_size: of a joint vocabulary of text and codes, as Chameleon has; None: class-conditional LlamaGen.
    """

    num_layers: int
    num_heads: int
    hidden_size: int
    intermediate_size: int
    codes: int
    grid: int
    dtype: torch.dtype
    vq_width: int = 128
    vocab_size: int | None = None

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer."""
        return 4 * self.hidden_size**2 + 3 * self.hidden_size * self.intermediate_size


SHAPES = {
    "tiny": Shape(2, 4, 64, 128, 128, 4, torch.bfloat16, 32),
    "tiny-anole": Shape(2, 4, 64, 128, 128, 2, torch.bfloat16, 32, 9000),
    "GPT-B": Shape(12, 12, 768, 2048, 16384, 16, torch.float32),
    "GPT-XL": Shape(36, 20, 1280, 3584, 16384, 16, torch.float32),
    "GPT-3B": Shape(24, 32, 3200, 8704, 16384, 24, torch.float32),
    "Anole-7B": Shape(32, 32, 4096, 11008, 8192, 32, torch.bfloat16, 128, 65536),
}


def random_bundle(shape: Shape, output: Path, compute: str = "float32") -> Path:
    """Write the bundle of a target and a drafter; `output.parent` holds the checkpoints meanwhile."""
    checkpoints = output.with_name(f"{output.name}-checkpoints")
    write_checkpoints(shape, checkpoints, drafter=True)
    export_checkpoints(shape, checkpoints, output, compute=compute)
    shutil.rmtree(checkpoints)
    return output


def export_checkpoints(
    shape: Shape,
    folder: Path,
    output: Path,
    precision: str | None = None,
    compute: str = "float32",
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Path:
    """Export what `write_checkpoints` wrote to `folder`."""
    drafter = folder / "drafter" if (folder / "drafter").exists() else None
    if shape.vocab_size is None:
        model = read_llamagen(folder / "target", folder / "vq.pt", drafter=drafter, grid=shape.grid)
    else:
        model = read_anole(folder / "target", folder / "vqgan", drafter=drafter, grid=shape.grid)
    precisions = read_precisions(precision, compute=compute)
    return export_model(model, output, precisions=precisions, progress=progress)


def write_checkpoints(shape: Shape, folder: Path, drafter: bool) -> None:
    """Write all that an export reads: folders in LANTERN's layout, or Anole's, and an image tokenizer."""
    folder.mkdir(parents=True)
    config: dict[str, Any] = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "rms_norm_eps": 1e-5,
        "vocab_size": shape.vocab_size or shape.codes,
    }
    if shape.vocab_size is None:
        _write_vq(shape, folder)
    else:
        config |= {"model_type": "chameleon", "max_position_embeddings": 4096}
        _write_vqgan(shape, folder / "vqgan")
    _write_folder(folder / "target", _target(shape), shape.dtype, config | {"num_hidden_layers": shape.num_layers})
    if shape.vocab_size is not None:
        _name_tokens(shape, folder / "target")
    if drafter:
        _write_folder(folder / "drafter", _drafter(shape), shape.dtype, config | {"num_hidden_layers": 1})


def _target(shape: Shape) -> Sizes:
    """Names and shapes of a target's weights."""
    width, anole = shape.hidden_size, shape.vocab_size is not None
    yield "model.embed_tokens.weight", (shape.vocab_size or shape.codes, width)
    if not anole:
        yield "model.cls_embedding.embedding_table.weight", (CLASSES + 1, width)
    for i in range(shape.num_layers):
        yield from _layer(shape, f"model.layers.{i}.")
        yield f"model.layers.{i}.input_layernorm.weight", (width,)
        for name in ("self_attn.q_norm", "self_attn.k_norm") if anole else ():
            yield f"model.layers.{i}.{name}.weight", (shape.num_heads, width // shape.num_heads)
            yield f"model.layers.{i}.{name}.bias", (shape.num_heads, width // shape.num_heads)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (shape.vocab_size or shape.codes, width)


def _drafter(shape: Shape) -> Sizes:
    """LANTERN's drafter of one layer."""
    yield "embed_tokens.weight", (shape.vocab_size or shape.codes, shape.hidden_size)
    yield "fc.weight", (shape.hidden_size, 2 * shape.hidden_size)
    yield "fc.bias", (shape.hidden_size,)
    yield from _layer(shape, "layers.0.")


def _layer(shape: Shape, prefix: str) -> Sizes:
    for part in "qkvo":
        yield f"{prefix}self_attn.{part}_proj.weight", (shape.hidden_size, shape.hidden_size)
    for part in ("gate", "up"):
        yield f"{prefix}mlp.{part}_proj.weight", (shape.intermediate_size, shape.hidden_size)
    yield f"{prefix}mlp.down_proj.weight", (shape.hidden_size, shape.intermediate_size)
    yield f"{prefix}post_attention_layernorm.weight", (shape.hidden_size,)


def _name_tokens(shape: Shape, folder: Path) -> None:
    """Chameleon's names of image tokens, in which a code's digits are letters (A is 0), and a small tokenizer."""
    named = {"<s>": 0, "<racm3:break>": _BEGIN_OF_IMAGE, "<reserved08706>": _END_OF_TURN}
    letters = str.maketrans("0123456789", "ABCDEFGHIJ")
    codes = {f"IMGIMG{str(code).translate(letters)}Z": _FIRST_CODE + code for code in range(shape.codes)}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocabulary_map": named | codes}))
    words = {word: _END_OF_TURN + 1 + i for i, word in enumerate(("<unk>", "a", "red", "cube", "on", "sand"))}
    tokenizer = Tokenizer(WordLevel(named | words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def _write_vq(shape: Shape, folder: Path) -> None:
    """LlamaGen's image tokenizer."""
    state = _tokenizer(shape, 8, attention=True)
    state["quantize.embedding.weight"] = torch.randn_like(state.pop("codebook"))
    torch.save({"model": state}, folder / "vq.pt")


def _write_vqgan(shape: Shape, folder: Path) -> None:
    """Chameleon's, in taming-transformers' layout."""
    top = len(_LEVELS) - 1
    state = {}
    for name, weight in _tokenizer(shape, _VQ_WIDTH, attention=False).items():
        for i, part in enumerate(("block_1", "attn_1", "block_2")):
            name = name.replace(f".mid.{i}.", f".mid.{part}.")
        name = re.sub(r"encoder\.conv_blocks\.(\d+)", r"encoder.down.\1", name)
        name = re.sub(r"decoder\.conv_blocks\.(\d+)", lambda found: f"decoder.up.{top - int(found[1])}", name)
        state[name.replace(".res.", ".block.")] = weight
    state["quantize.embedding.weight"] = torch.randn_like(state.pop("codebook"))
    folder.mkdir()
    torch.save({"state_dict": state}, folder / "vqgan.ckpt")
    sizes = {"z_channels": _VQ_WIDTH, "ch": shape.vq_width, "num_res_blocks": 2, "resolution": shape.grid * 2**top}
    parameters = {"embed_dim": _VQ_WIDTH, "n_embed": shape.codes, "ddconfig": sizes}
    (folder / "vqgan.yaml").write_text(yaml.safe_dump({"model": {"params": parameters}}))


def _tokenizer(shape: Shape, code_width: int, attention: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    widths = tuple(shape.vq_width * level for level in _LEVELS)
    config = VQConfig(shape.codes, code_width, _VQ_WIDTH, shape.vq_width, widths, widths[::-1], 2, attention=attention)
    return dict(LlamaGenVQ(config).state_dict())


def _write_folder(folder: Path, sizes: Sizes, dtype: torch.dtype, config: dict[str, Any]) -> None:
    """A configuration and a safetensors file, tensor by tensor."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, object] = {}
    at, listed = 0, list(sizes)
    for name, size in listed:
        end = at + torch.Size(size).numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": size, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for seed, (name, size) in enumerate(listed, start=1):
            block = _weight(name, size, seed).to(dtype).flatten().view(torch.uint8).numpy().data
            left = torch.Size(size).numel() * dtype.itemsize
            while left:
                left -= file.write(block[:left])


def _weight(name: str, size: tuple[int, ...], seed: int) -> torch.Tensor:
    """A weight, or the numbers that repeat in it. Tables of target and drafter are the same."""
    if "norm" in name or len(size) == 1:
        return torch.full(size, 0.0 if name.endswith(".bias") else 1.0)
    generator = torch.Generator().manual_seed(0 if "embed" in name else seed)
    width = size[1]
    if name == "fc.weight":  # hands the token's embedding on
        return torch.eye(*size).add_(torch.randn(size, generator=generator), alpha=DRAFTER_NOISE / width**0.5)
    numbers = torch.randn(min(_BLOCK, size[0] * width), generator=generator)
    adds = name.endswith((".o_proj.weight", ".down_proj.weight"))
    spread = LOGIT_SPREAD if name == "lm_head.weight" else LAYER_GAIN if adds else 0.5
    return numbers if "embed" in name else numbers * (spread / width**0.5)
