"""LlamaGen transformers, class- or text-conditional: checkpoint to decoder, code table and condition.

Official files (alone, sharded, or consolidated from FSDP) and folders in LANTERN's layout, which
`lantern_layout.py` tells in official names. Sizes come from the weights where these determine them. The number of
heads and the grid do not show there: they come from a published model's name, a configuration file, or the caller.

Does not know graphs, bundles, tokenizers of images or text encoders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import CheckpointError
from ..checkpoints.deferred import without_weights
from ..checkpoints.files import Weights, config_float, config_int, count_blocks, fill, read_config, shape_of
from ..checkpoints.folders import find_weights, read_weight_files
from ..checkpoints.lantern_layout import is_lantern_layout, official_arguments, official_weights
from .decoder import Decoder, DecoderConfig

_CLASSES, _CAPTIONS = "cls_embedding.embedding_table.weight", "cls_embedding.uncond_embedding"
_DEFAULT_GRID = 16  # 256 pixels at 16 pixels per cell


@dataclass(frozen=True)
class Published:
    """Sizes of a published model."""

    layers: int
    heads: int
    width: int


MODELS: Mapping[str, Published] = {
    "GPT-B": Published(12, 12, 768),
    "GPT-L": Published(24, 16, 1024),
    "GPT-XL": Published(36, 20, 1280),
    "GPT-XXL": Published(48, 24, 1536),
    "GPT-3B": Published(24, 32, 3200),
}

# the decoder's name of a weight inside its layer, and the checkpoint's
_LAYER_NAMES = {
    "attention_norm.weight": "attention_norm.weight",
    "attention.qkv.weight": "attention.wqkv.weight",
    "attention.out.weight": "attention.wo.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "ffn.gate.weight": "feed_forward.w1.weight",
    "ffn.up.weight": "feed_forward.w3.weight",
    "ffn.down.weight": "feed_forward.w2.weight",
}
_FOREIGN = {  # a name found in checkpoints of another kind, and what they are
    "quantize.embedding.weight": "a VQ tokenizer; give it as --vq",
    "fc.weight": "an EAGLE drafter; give it as --drafter",
    "model.vqmodel.quantize.embedding.weight": "a Chameleon model such as Anole",
    "model.embed_tokens.weight": "a Hugging Face decoder (Llama, Chameleon or alike)",
}


class ClassCondition(nn.Module):
    """`class_ids [rows]` to prefix rows; the unconditional row is the last one of the table."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table, requires_grad=False)  # [classes + 1, width]

    def forward(self, class_ids: Tensor) -> tuple[Tensor, Tensor]:
        prefix = self.table[class_ids][:, None]  # [rows, 1, width]
        return prefix, self.table[-1].expand_as(prefix)


class CaptionCondition(nn.Module):
    """Left-padded text embeddings to prefix rows; the unconditional rows come from a stored caption."""

    def __init__(self, first: Tensor, second: Tensor, uncond: Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(first, requires_grad=False), nn.Parameter(second, requires_grad=False)
        self.uncond = nn.Parameter(uncond, requires_grad=False)  # [prefix, caption_dim]

    def project(self, captions: Tensor) -> Tensor:
        """`[..., caption_dim]` to `[..., width]`."""
        return F.linear(F.gelu(F.linear(captions, self.first), approximate="tanh"), self.second)

    def forward(self, caption_embeds: Tensor, caption_mask: Tensor) -> tuple[Tensor, Tensor]:
        prefix = self.project(caption_embeds * caption_mask[..., None])  # [rows, prefix, width]
        return prefix, self.project(self.uncond).expand_as(prefix)


@dataclass(frozen=True)
class LlamaGen:
    """A transformer taken apart. `classes` or `caption_dim` is set, by what images are conditioned on.

    `files`: what it was read from, with roles: `target`, `target_index`, `config`.
    """

    decoder: Decoder
    code_embeddings: Tensor  # [codes, width]
    condition: ClassCondition | CaptionCondition
    classes: int | None
    caption_dim: int | None
    files: tuple[tuple[str, Path], ...] = ()


@dataclass(frozen=True)
class _Checkpoint:
    """Weights and arguments under official names; `names` and `fields` map these to what the files call them."""

    path: Path
    weights: Weights
    source: Path
    arguments: Mapping[str, Any]
    names: Mapping[str, str]
    fields: Mapping[str, str]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a matrix that must be there."""
        shown = self.names.get(name, name)
        held = {shown: self.weights[name]} if name in self.weights else {}
        return shape_of(held, shown, 2, self.path)

    def field(self, name: str) -> str:
        return self.fields.get(name, name)

    def integer(self, name: str) -> int | None:
        return config_int({self.field(name): self.arguments.get(name)}, self.field(name), self.source)

    def number(self, name: str, default: float) -> float:
        return config_float({self.field(name): self.arguments.get(name, default)}, self.field(name), 0, self.source)


def read_llamagen(
    path: Path, *, model: str | None = None, config: Path | None = None, grid: int | None = None
) -> LlamaGen:
    """Read a transformer from a file or folder.

    `model` is a published name. `config` is a JSON file with the model's arguments, by default the folder's
    `config.json`. Raises CheckpointError that names what is missing, unexpected, or contradicts another.
    """
    found = find_weights(path)
    weights = _without_prefix(read_weight_files(found))
    beside = (path if path.is_dir() else path.parent) / "config.json"
    if config is None and beside.is_file() and (path.is_dir() or is_lantern_layout(weights)):
        config = beside
    checkpoint = _open(path, weights, config)
    weights = checkpoint.weights
    weights.pop("condition_embeddings", None)
    frequencies = weights.pop("freqs_cis", None)
    _check_family(weights, path)
    sizes = _infer(checkpoint, model, grid, frequencies)
    with without_weights():
        decoder = Decoder(sizes)
    names = {"norm.weight": "norm.weight", "head.weight": "output.weight"}
    for i in range(sizes.num_layers):
        names |= {f"layers.{i}.{ours}": f"layers.{i}.{theirs}" for ours, theirs in _LAYER_NAMES.items()}
    back = {theirs: ours for ours, theirs in names.items()}
    code_embeddings = weights.pop("tok_embeddings.weight").float()
    condition, classes, caption_dim = _take_condition(checkpoint)
    shown = {ours: checkpoint.names.get(theirs, theirs) for ours, theirs in names.items()}
    fill(decoder, {back.get(name, name): tensor for name, tensor in weights.items()}, path, shown)
    files = [("target_index", found.index)] if found.index else []
    files += [("target", file) for file in found.files] + ([("config", config)] if config else [])
    return LlamaGen(decoder, code_embeddings, condition, classes, caption_dim, tuple(files))


def _without_prefix(weights: Weights) -> Weights:
    """Weights without what data-parallel training or compiling puts before every name."""
    for prefix in ("module.", "_orig_mod."):
        if weights and all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


def _open(path: Path, weights: Weights, config: Path | None) -> _Checkpoint:
    """The checkpoint in official names, whichever layout it has."""
    arguments = {} if config is None else read_config(config)
    source = config or path
    if not is_lantern_layout(weights):
        return _Checkpoint(path, weights, source, arguments, {}, {})
    if config is None:
        raise CheckpointError(f"{path}: LlamaGen in LANTERN's layout, but no config.json beside it; give its folder")
    weights, names = official_weights(weights, path)
    arguments, fields = official_arguments(arguments, source)
    return _Checkpoint(path, weights, source, arguments, names, fields)


def _check_family(weights: Weights, path: Path) -> None:
    if (_CLASSES in weights or _CAPTIONS in weights) and "tok_embeddings.weight" in weights:
        return
    for name, kind in _FOREIGN.items():
        if name in weights:
            raise CheckpointError(f"{path}: found {kind}; expected a LlamaGen transformer")
    raise CheckpointError(
        f"{path}: found no class or caption embeddings with tok_embeddings, but {', '.join(sorted(weights)[:3])}; "
        "expected a LlamaGen transformer"
    )


def _take_condition(
    checkpoint: _Checkpoint,
) -> tuple[ClassCondition | CaptionCondition, int | None, int | None]:
    weights = checkpoint.weights
    if _CLASSES in weights:
        table = weights.pop(_CLASSES)
        return ClassCondition(table), len(table) - 1, None
    names = ["cls_embedding.cap_proj.fc1.weight", "cls_embedding.cap_proj.fc2.weight", _CAPTIONS]
    for name in names:
        checkpoint.shape(name)
    first, second, uncond = (weights.pop(name).float() for name in names)  # small, and multiplied at export
    if first.shape[1] != uncond.shape[1] or second.shape[1] != first.shape[0]:
        raise CheckpointError(
            f"{checkpoint.path}: caption weights {list(first.shape)}, {list(second.shape)} and {list(uncond.shape)} "
            "do not fit"
        )
    return CaptionCondition(first, second, uncond), None, uncond.shape[1]


def _infer(checkpoint: _Checkpoint, model: str | None, grid: int | None, frequencies: Tensor | None) -> DecoderConfig:
    path, source, weights = checkpoint.path, checkpoint.source, checkpoint.weights
    codes, width = checkpoint.shape("tok_embeddings.weight")
    layers = count_blocks(weights, "layers.")
    if not layers:
        missing = checkpoint.names.get("norm.weight", "norm.weight").replace("norm.weight", "layers.0")
        raise CheckpointError(f"{path}: missing weights {missing}.*")
    intermediate_size = checkpoint.shape("layers.0.feed_forward.w1.weight")[0]
    joint = checkpoint.shape("layers.0.attention.wqkv.weight")[0]
    known = {"dim": width, "n_layer": layers, "vocab_size": codes, "ffn_hidden": intermediate_size}
    if _CLASSES in weights:
        prefix, kind = 1, "c2i"
        known["num_classes"] = checkpoint.shape(_CLASSES)[0] - 1
    else:
        kind = "t2i"
        prefix, known["caption_dim"] = checkpoint.shape(_CAPTIONS)
    known["cls_token_num"] = prefix
    for name, count in known.items():
        given = checkpoint.integer(name)
        if given not in (None, count) and not (kind == "t2i" and name == "num_classes"):
            raise CheckpointError(f"{source}: {checkpoint.field(name)} is {given}, but the weights have {count}")
    if checkpoint.arguments.get("model_type", kind) != kind:
        raise CheckpointError(
            f"{source}: {checkpoint.field('model_type')} is {checkpoint.arguments['model_type']!r}, "
            f"but the weights are of kind {kind}"
        )

    block = checkpoint.integer("block_size")
    if grid is None and block is None and checkpoint.fields:
        raise CheckpointError(f"{source}: has no block_size; give --grid (16 for 256 pixels, 32 for 512)")
    heads = _heads(checkpoint, layers, width, model)
    head_dim = width // heads
    num_kv_heads, rest = divmod(joint - width, 2 * head_dim)
    given = checkpoint.integer("n_kv_head")
    if rest or num_kv_heads < 1 or heads % num_kv_heads or given not in (None, num_kv_heads):
        raise CheckpointError(
            f"{path}: wqkv has {joint} rows, which {heads} heads of {head_dim} and "
            f"{given or 'some'} key heads do not explain; check the number of heads"
        )
    if head_dim % 4:
        raise CheckpointError(
            f"{path}: {heads} heads of {head_dim} numbers; the rotary embedding needs a multiple of 4"
        )
    return DecoderConfig(
        hidden_size=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        vocab_size=codes,
        grid=grid or _grid(path, prefix, frequencies, block, source),
        prefix=prefix,
        norm_eps=checkpoint.number("norm_eps", 1e-5),
        rope_base=checkpoint.number("rope_base", 10000.0),
    )


def _heads(checkpoint: _Checkpoint, layers: int, width: int, model: str | None) -> int:
    path, source, field = checkpoint.path, checkpoint.source, checkpoint.field("n_head")
    given = checkpoint.integer("n_head")
    fitting = next((name for name, sizes in MODELS.items() if (sizes.layers, sizes.width) == (layers, width)), None)
    hint = f"; its sizes are those of {fitting}" if fitting else ""
    if model is not None:
        if model not in MODELS:
            raise CheckpointError(f"model {model!r} is unknown; expected one of {', '.join(MODELS)}")
        sizes = MODELS[model]
        if (sizes.layers, sizes.width) != (layers, width):
            raise CheckpointError(
                f"{path}: has {layers} layers of width {width}, but {model} has {sizes.layers} of {sizes.width}{hint}"
            )
        if given not in (None, sizes.heads):
            raise CheckpointError(f"{source}: {field} is {given}, but {model} has {sizes.heads}")
        return sizes.heads
    if given is None:
        raise CheckpointError(
            f"{path}: the number of heads does not show in the weights; give --model ({', '.join(MODELS)}) or a "
            f"--config with {field}{hint}"
        )
    if width % given:
        raise CheckpointError(f"{source}: {field} is {given}, which does not divide the width {width}")
    return given


def _grid(path: Path, prefix: int, frequencies: Tensor | None, block: int | None, source: Path) -> int:
    for cells, where in (
        (None if frequencies is None else frequencies.shape[0] - prefix, f"{path}: freqs_cis"),
        (block, f"{source}: block_size"),
    ):
        if cells is not None:
            if cells < 1 or isqrt(cells) ** 2 != cells:
                raise CheckpointError(f"{where} tells of {cells} codes, which is no square grid; give --grid")
            return isqrt(cells)
    return _DEFAULT_GRID
