"""Transformers in LlamaGen's layout, for the families that build on it, and their conditions.

A transformer is an official file, a folder of its shards, or a folder in LANTERN's layout, which has Llama's names of
weights and fields. The weights determine all sizes except the number of heads and the grid. These come from a
configuration file, from the published model with equal sizes, or, for the grid, from the caller.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ...errors import CheckpointError, RequestError
from ...inputs import format_value
from ..checkpoints.files import Config, read_config
from ..checkpoints.folders import Checkpoint
from ..graph.conditions import CaptionCondition, ClassCondition, text_condition
from ..model import Model
from ..models.decoder import Decoder, DecoderConfig
from ..models.llama import layer_sizes, load_decoder, rename_llama
from ..models.t5 import read_text_encoder
from ..models.vq_checkpoints import read_vq
from .common import check_grid, image_model

_CELL = 16  # pixels per cell along each side, in the published image tokenizers


class KnownSize(NamedTuple):
    """Sizes of a published model, with the grid rows that it was trained for, by condition."""

    num_layers: int
    hidden_size: int
    num_heads: int
    class_grids: tuple[int, ...]
    text_grids: tuple[int, ...] = ()


MODELS = (
    KnownSize(12, 768, 12, (16, 24)),  # GPT-B
    KnownSize(24, 1024, 16, (16, 24)),  # GPT-L
    KnownSize(36, 1280, 20, (24,), (16, 32)),  # GPT-XL
    KnownSize(48, 1536, 24, (24,)),  # GPT-XXL
    KnownSize(24, 3200, 32, (24,)),  # GPT-3B
)


class LlamaGenVariant(NamedTuple):
    """Differences of another family's files from LlamaGen's layout.

    Args:
        arguments: further fields of the configuration.
        extra: names of further matrices in the files, which do not belong to the decoder.
        names: names in the files of the decoder's further weights, by the decoder's names.
        two_heads: `two_heads` of `DecoderConfig`; the configuration does not count the last layer.
    """

    arguments: Collection[str] = ()
    extra: Collection[str] = ()
    names: Mapping[str, str] = {}
    models: Sequence[KnownSize] = MODELS
    two_heads: bool = False


_PLAIN = LlamaGenVariant()
_CONDITION_NAMES = {
    "classes": "cls_embedding.embedding_table.weight",
    "captions.uncond": "cls_embedding.uncond_embedding",
    "captions.first": "cls_embedding.cap_proj.fc1.weight",
    "captions.second": "cls_embedding.cap_proj.fc2.weight",
}
_NAMES = {
    "embed.weight": "tok_embeddings.weight",
    "head.weight": "output.weight",
    "layers.*.attention.qkv.weight": "layers.*.attention.wqkv.weight",
    "layers.*.attention.out.weight": "layers.*.attention.wo.weight",
    "layers.*.ffn.gate.weight": "layers.*.feed_forward.w1.weight",
    "layers.*.ffn.up.weight": "layers.*.feed_forward.w3.weight",
    "layers.*.ffn.down.weight": "layers.*.feed_forward.w2.weight",
    **_CONDITION_NAMES,
}
_LANTERN_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    **{ours: f"model.{theirs}" for ours, theirs in _CONDITION_NAMES.items()},
}
# Official arguments by LANTERN's names of fields, where the names differ.
_FIELDS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_kv_head",
    "intermediate_size": "ffn_hidden",
    "rms_norm_eps": "norm_eps",
    "input_type": "model_type",
}
# Arguments of the official program, and further fields of this project's small checkpoints.
_ARGUMENTS = {"n_layer", "n_head", "n_kv_head", "dim", "ffn_hidden", "multiple_of", "ffn_dim_multiplier", "rope_base"}
_ARGUMENTS |= {"norm_eps", "initializer_range", "token_dropout_p", "attn_dropout_p", "resid_dropout_p", "ffn_dropout_p"}
_ARGUMENTS |= {"drop_path_rate", "num_classes", "caption_dim", "class_dropout_prob", "model_type", "vocab_size"}
_ARGUMENTS |= {"cls_token_num", "block_size", "max_batch_size", "max_seq_len"}
_UNUSED = (".inv_freq", "condition_embeddings")  # buffers that some versions save with the weights


class LlamaGen(NamedTuple):
    """Parts of a transformer.

    Args:
        code_embeddings: embeddings of the codes, float32 `[codes, hidden_size]`.
        condition: module that computes the prefix rows.
        lantern: whether the files are in LANTERN's layout.
        config: the configuration, empty if there is no file.
        extra: weights of families that have more than LlamaGen, by their names in the files, float32.
    """

    decoder: Decoder
    code_embeddings: Tensor
    condition: ClassCondition | CaptionCondition
    checkpoint: Checkpoint
    lantern: bool
    config: Config
    extra: dict[str, Tensor]


def read_transformer(
    checkpoint: Checkpoint,
    *,
    config: Path | None = None,
    grid: int | None = None,
    weights: str | None = None,
    variant: LlamaGenVariant = _PLAIN,
) -> LlamaGen:
    """Read the transformer in a file or folder.

    Args:
        checkpoint: `target` of `read_llamagen`.
        config: `config` of `read_llamagen`.
        grid: `grid` of `read_llamagen`.
        weights: `weights` of `read_llamagen`.
        variant: differences of another family's files.

    Raises:
        CheckpointError: a file is missing or damaged, or is not a LlamaGen transformer.
        RequestError: `weights` is unknown.
    """
    if weights not in (None, "model", "ema"):
        raise RequestError(field="weights", found=format_value(weights), expected="model or ema")
    checkpoint.averaged = None if weights is None else weights == "ema"
    values, lantern = _read_weights(checkpoint, config, variant)
    codes, code_width = checkpoint.shape("embed.weight")
    values.check_sizes(vocab_size=codes, hidden_size=code_width)
    for name in (*variant.extra, *(name for name in variant.names if name not in checkpoint.weights)):
        checkpoint.shape(name)
    condition, prefix = _extract_condition(checkpoint, values)
    _check_feed_forward(checkpoint, values)
    known_sizes = checkpoint.count("layers.") - variant.two_heads, code_width
    known = next((model for model in variant.models if model[:2] == known_sizes), None)
    num_heads = _choose_num_heads(checkpoint, values, known)
    sizes = DecoderConfig(
        **layer_sizes(checkpoint, values, num_heads, head_multiple=4, uncounted=int(variant.two_heads)),
        vocab_size=codes,
        two_heads=variant.two_heads,
        grid=_choose_grid(checkpoint, values, prefix, isinstance(condition, ClassCondition), grid, known),
        prefix=prefix,
        norm_eps=values.number("rms_norm_eps", 1e-6 if lantern else 1e-5),
        rope_base=values.number("rope_base", 10000.0),
    )
    extra = {name: checkpoint.weights.pop(name).float() for name in variant.extra}
    decoder, embeddings = load_decoder(checkpoint, sizes)
    return LlamaGen(decoder, embeddings.float(), condition, checkpoint, lantern, values, extra)


def llamagen_model(
    transformer: LlamaGen, vq: Path, *, weights: str | None, text_encoder: Path | None = None, **fields: Any
) -> Model:
    """Return the contents of a bundle with LlamaGen's image tokenizer.

    Args:
        vq: file of the image tokenizer.
        weights: `weights` of `read_llamagen`.
        text_encoder: `text_encoder` of `read_llamagen`.
        fields: other arguments of `image_model`.

    Raises:
        CheckpointError: a file is missing or damaged, or the target takes no text.
    """
    checkpoint = transformer.checkpoint
    image_tokenizer, vq_sources = read_vq(vq, checkpoint.progress, checkpoint.averaged)
    sources = [*checkpoint.sources, *vq_sources]
    module = transformer.condition
    if text_encoder is None:
        condition = module.make_condition()
    elif isinstance(module, ClassCondition):
        raise CheckpointError("the target is class-conditional and takes no text", field="text_encoder")
    else:
        encoder = read_text_encoder(text_encoder, module.uncond.shape[1], checkpoint.progress)
        condition = text_condition(encoder.encoder, encoder.tokenizer, module)
        sources += encoder.sources
    model = image_model(
        decoder=transformer.decoder,
        code_embeddings=transformer.code_embeddings,
        condition=condition,
        vq=image_tokenizer,
        sources=sources,
        **fields,
    )
    return replace(model, weights=weights)


def _read_weights(checkpoint: Checkpoint, config: Path | None, variant: LlamaGenVariant) -> tuple[Config, bool]:
    """Read weights, rename them, and return the configuration, and whether the files are in LANTERN's layout."""
    path = checkpoint.path
    folder_config = (path if path.is_dir() else path.parent) / "config.json"
    if path.is_dir() and folder_config.is_file():
        checkpoint.model_config("jadohu/LlamaGen-T2I")  # before the weights are read
    checkpoint.read(keep=lambda name: not name.endswith(_UNUSED))
    arguments = _ARGUMENTS | {*variant.arguments}
    lantern = any(_LANTERN_NAMES[name] in checkpoint.weights for name in ("classes", "captions.uncond"))
    if config is not None:
        checkpoint.sources.append(("config", config))
    elif folder_config.is_file() and (
        path.is_dir() or lantern or read_config(folder_config).values.keys() <= arguments
    ):
        config = folder_config
        checkpoint.sources += [] if path.is_dir() else [("target_config", config)]
    elif lantern:
        raise checkpoint.error(problem="LlamaGen in LANTERN's layout without its config.json", remedy="give its folder")
    values = Config(path, {}) if config is None else read_config(config)
    if lantern:
        rename_llama(checkpoint, "model.", _LANTERN_NAMES)
    else:
        checkpoint.rename(_NAMES | {**variant.names})
        values = Config(values.path, values.values, _FIELDS)
        if ("config", values.path) in checkpoint.sources:  # the argument `config`, not a file of the checkpoint
            values.check_names(arguments)
    names = checkpoint.weights.keys()
    if "embed.weight" not in names or not {"classes", "captions.uncond"} & names:
        first = ", ".join(sorted(map(checkpoint.name_in_files, names))[:3])
        contents = f"no class or caption embeddings with tok_embeddings, but {first}"
        raise checkpoint.error(found=contents, expected="a LlamaGen transformer")
    return values, lantern


def _extract_condition(checkpoint: Checkpoint, config: Config) -> tuple[ClassCondition | CaptionCondition, int]:
    """Move the condition's weights to a module; return it and the number of prefix positions."""
    weights = checkpoint.weights
    if "classes" in weights:
        rows, _ = checkpoint.shape("classes")
        config.expect("input_type", "c2i", None)
        config.check_sizes(num_classes=rows - 1, cls_token_num=1)
        return ClassCondition(weights.pop("classes").float()), 1
    names = ("captions.first", "captions.second", "captions.uncond")
    first, second, (prefix, caption_dim) = (list(checkpoint.shape(name)) for name in names)
    config.expect("input_type", "t2i", "t2i2", None)  # t2i2: second stage of training
    config.check_sizes(caption_dim=caption_dim, cls_token_num=prefix)
    if first[1] != caption_dim or second[1] != first[0]:
        shapes = f"shapes {first}, {second}, {[prefix, caption_dim]}"
        raise checkpoint.error(found=f"caption weights of {shapes}", expected="matching shapes")
    return CaptionCondition(*(weights.pop(name).float() for name in names)), prefix


def _check_feed_forward(checkpoint: Checkpoint, config: Config) -> None:
    multiple = config.integer("multiple_of")
    if multiple is not None:
        rows = checkpoint.shape("layers.0.ffn.gate.weight")[0]
        factor = 1.0 if config.get("ffn_dim_multiplier") is None else config.number("ffn_dim_multiplier", 1.0)
        width = int(factor * (8 * checkpoint.shape("embed.weight")[1] // 3))
        if rows != -(-width // multiple) * multiple:
            raise config.error(
                "multiple_of", expected=f"a divisor of {rows}, the rows of the weights, to which it rounds {width} up"
            )


def _choose_num_heads(checkpoint: Checkpoint, config: Config, known: KnownSize | None) -> int:
    if heads := config.integer("num_attention_heads"):
        return heads
    if known:
        return known.num_heads
    problem = "the weights do not show the number of heads, and no published model has their sizes"
    field = config.names.get("num_attention_heads", "num_attention_heads")
    remedy = (
        f'give {{"{field}": 12}}, with your number, in a JSON file: as --config, or as config.json beside the weights'
    )
    raise checkpoint.error(problem=problem, remedy=remedy)


def _choose_grid(
    checkpoint: Checkpoint,
    config: Config,
    prefix: int,
    is_class_conditional: bool,
    grid: int | None,
    known: KnownSize | None,
) -> int:
    """Return the grid rows in weights, configuration and `grid`, which must agree, or else the known model's."""
    cell_counts: list[tuple[str, int]] = []
    if "freqs_cis" in checkpoint.weights:
        cell_counts.append((f"{checkpoint.path}: freqs_cis", checkpoint.shape("freqs_cis", 3)[0] - prefix))
        del checkpoint.weights["freqs_cis"]
    if block := config.integer("block_size"):
        cell_counts.append((f"{config.path}: block_size", block))
    for field, cells in cell_counts:
        rows = isqrt(max(cells, 0))
        if not rows or rows**2 != cells:
            raise CheckpointError(
                field=field, found=f"{format_value(cells)} codes", expected="the codes of a square grid"
            )
        if grid not in (None, rows):
            raise CheckpointError(
                field=field, found=f"a grid of {format_value(rows)}", expected=f"{grid}, as given elsewhere"
            )
        grid = rows
    grids: tuple[int, ...] = ()
    if known:
        grids = known.class_grids if is_class_conditional else known.text_grids
    if grid is None and len(grids) != 1:
        choices = " or ".join(f"{rows} ({rows * _CELL} pixels)" for rows in grids or (16, 24, 32))
        raise CheckpointError("the weights do not show the grid of codes", field="grid", expected=choices)
    grid = grid or grids[0]
    check_grid(grid)
    return grid
