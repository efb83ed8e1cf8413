"""Reader of LlamaGen's transformers and of families that use LlamaGen's layout.

A transformer is an official file, a folder with shards of an official file, or a folder in LANTERN's layout, which has
Llama's names of weights and fields. The weights determine all sizes except the number of heads and the grid. These come
from a configuration file or from the published model with equal sizes; the caller may also give the grid.
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
from ..checkpoints.files import Config, read_config, read_training_arguments
from ..checkpoints.folders import Checkpoint
from ..graph.conditions import CaptionCondition, CaptionProjection, ClassCondition, make_text_condition
from ..model import BundleContents
from ..models.decoder import Decoder, DecoderConfig
from ..models.llama import (
    load_llama_decoder,
    load_prefix_decoder,
    read_layer_sizes,
    read_rope_settings,
    rename_llama_weights,
)
from ..models.t5 import read_text_encoder
from ..models.vq_checkpoints import read_llamagen_vq
from .common import build_image_model, check_grid_rows

_CELL = 16  # pixels per cell along each side, in the published image tokenizers


class PublishedModelSize(NamedTuple):
    """Sizes of a published model, and the numbers of grid rows that it was trained for, by class or by text."""

    num_layers: int
    hidden_size: int
    num_heads: int
    class_grid_rows: tuple[int, ...]
    text_grid_rows: tuple[int, ...] = ()


MODELS = (
    PublishedModelSize(12, 768, 12, (16, 24)),  # GPT-B
    PublishedModelSize(24, 1024, 16, (16, 24)),  # GPT-L
    PublishedModelSize(36, 1280, 20, (24,), (16, 32)),  # GPT-XL
    PublishedModelSize(48, 1536, 24, (24,)),  # GPT-XXL
    PublishedModelSize(24, 3200, 32, (24,)),  # GPT-3B
)


class LlamaGenVariant(NamedTuple):
    """Differences of another family's files from LlamaGen's layout."""

    config_fields: Collection[str] = ()  # names of fields that only this family's configuration has
    # Names of matrices in the files that LlamaGen does not have and that are not part of the decoder.
    extra_weights: Collection[str] = ()
    # Name in the files, by name in the decoder, of each decoder weight that LlamaGen does not have.
    weight_names: Mapping[str, str] = {}
    published_sizes: Sequence[PublishedModelSize] = MODELS
    # Whether the decoder has a second head for the cell below, with one more layer (NAR). The number of layers in the
    # configuration does not include this layer.
    two_heads: bool = False
    # Name in the files, by name in the decoder, of each weight that passes over prefixes read instead. Such a model
    # has no embeddings of the unconditional prompt.
    prefix_weights: Mapping[str, str] = {}


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
_UNUSED = "condition_embeddings"  # buffer that some versions save with the weights


class LlamaGenTransformer(NamedTuple):
    """Transformer that was read from a checkpoint."""

    decoder: Decoder
    code_embeddings: Tensor  # embeddings of the codes, float32 `[codes, hidden_size]`
    condition: ClassCondition | CaptionProjection  # module that computes the prefix rows
    is_lantern_layout: bool
    config: Config  # configuration; empty if there is no configuration file
    extra_weights: dict[str, Tensor]  # weights that LlamaGen does not have, float32, by their names in the files
    prefix_decoder: Decoder | None = None  # for passes over prefixes; None: `decoder`


def read_llamagen_transformer(
    checkpoint: Checkpoint,
    *,
    config: Path | None = None,
    grid: int | None = None,
    weights: str | None = None,
    variant: LlamaGenVariant = _PLAIN,
) -> LlamaGenTransformer:
    """Read the transformer in a file or folder. Takes the arguments of `read_llamagen`, and the family's variant."""
    if weights not in (None, "model", "ema"):
        raise RequestError(field="weights", found=format_value(weights), expected="model or ema")
    checkpoint.prefer_ema = None if weights is None else weights == "ema"
    values, is_lantern_layout = _read_weights(checkpoint, config, variant)
    codes, code_width = checkpoint.get_shape("embed.weight")
    values.check_sizes_match_weights(vocab_size=codes, hidden_size=code_width)
    for name in (*variant.extra_weights, *(name for name in variant.weight_names if name not in checkpoint.weights)):
        checkpoint.get_shape(name)
    condition, prefix = _extract_condition(checkpoint, values)
    _check_feed_forward_width(checkpoint, values)
    read_rope_settings(values)  # rejects scaled positions
    known_sizes = checkpoint.count_layers("layers.") - variant.two_heads, code_width
    published_size = next((model for model in variant.published_sizes if model[:2] == known_sizes), None)
    num_heads = _choose_num_heads(checkpoint, values, published_size)
    sizes = DecoderConfig(
        **read_layer_sizes(checkpoint, values, num_heads, head_dim_multiple=4, num_extra_layers=int(variant.two_heads)),
        vocab_size=codes,
        two_heads=variant.two_heads,
        grid=_choose_grid_rows(checkpoint, values, prefix, isinstance(condition, ClassCondition), grid, published_size),
        prefix=prefix,
        norm_eps=values.get_number("rms_norm_eps", 1e-6 if is_lantern_layout else 1e-5),
        rope_base=values.get_number("rope_base", 10000.0),
    )
    extra_weights = {name: checkpoint.weights.pop(name).float() for name in variant.extra_weights}
    prefix_weights = checkpoint.extract_renamed_weights(variant.prefix_weights)
    decoder, embeddings = load_llama_decoder(checkpoint, sizes)
    prefix_decoder = load_prefix_decoder(decoder, prefix_weights) if variant.prefix_weights else None
    return LlamaGenTransformer(
        decoder, embeddings.float(), condition, is_lantern_layout, values, extra_weights, prefix_decoder
    )


def build_llamagen_model(
    transformer: LlamaGenTransformer, vq: Path, *, weights: str | None, text_encoder: Path | None = None, **fields: Any
) -> BundleContents:
    """Return the contents of a bundle with LlamaGen's image tokenizer. `fields` are for `build_image_model`."""
    checkpoint = transformer.decoder.checkpoint
    image_tokenizer = read_llamagen_vq(vq, checkpoint.progress, checkpoint.prefer_ema)
    module = transformer.condition
    assert isinstance(module, ClassCondition | CaptionCondition)
    if text_encoder is None:
        condition = module.make_condition()
    elif isinstance(module, ClassCondition):
        raise CheckpointError("the target is class-conditional and takes no text", field="text_encoder")
    else:
        encoder = read_text_encoder(text_encoder, module.uncond.shape[1], checkpoint.progress)
        condition = make_text_condition(encoder.encoder, encoder.tokenizer, module)._replace(sources=encoder.sources)
    model = build_image_model(
        decoder=transformer.decoder,
        code_embeddings=transformer.code_embeddings,
        condition=condition,
        vq=image_tokenizer,
        **fields,
    )
    return replace(model, weights=weights)


def _read_weights(checkpoint: Checkpoint, config: Path | None, variant: LlamaGenVariant) -> tuple[Config, bool]:
    """Read and rename the weights; return the configuration, and whether the files are in LANTERN's layout."""
    path = checkpoint.path
    folder_config = (path if path.is_dir() else path.parent) / "config.json"
    if path.is_dir() and folder_config.is_file():
        checkpoint.read_model_config("jadohu/LlamaGen-T2I")  # before the weights are read
    checkpoint.read_weights(name_filter=lambda name: not name.endswith(_UNUSED))
    config_fields = _ARGUMENTS | {*variant.config_fields}
    is_lantern_layout = any(_LANTERN_NAMES[name] in checkpoint.weights for name in ("classes", "captions.uncond"))
    if config is not None:
        checkpoint.sources.append(("config", config))
    elif folder_config.is_file() and (
        path.is_dir() or is_lantern_layout or read_config(folder_config).values.keys() <= config_fields
    ):
        config = folder_config
        checkpoint.sources += [] if path.is_dir() else [("target_config", config)]
    elif is_lantern_layout:
        raise checkpoint.make_error(
            problem="LlamaGen in LANTERN's layout without its config.json", remedy="give the folder with both"
        )
    sizes = _read_training_sizes(path)
    values = Config(path, sizes) if config is None else read_config(config).with_defaults(sizes)
    if is_lantern_layout:
        rename_llama_weights(checkpoint, "model.", _LANTERN_NAMES)
    else:
        checkpoint.rename_weights(_NAMES | {**variant.weight_names})
        values = Config(values.path, values.values, _FIELDS)
        if ("config", values.path) in checkpoint.sources:  # the argument `config`, not a file of the checkpoint
            values.reject_unknown_fields(config_fields)
    names = checkpoint.weights.keys()
    captions = "captions.first" if variant.prefix_weights else "captions.uncond"
    if "embed.weight" not in names or not {"classes", captions} & names:
        expected = "a LlamaGen transformer, with class or caption embeddings and tok_embeddings"
        raise checkpoint.make_error(found=checkpoint.format_names(), expected=expected)
    return values, is_lantern_layout


def _read_training_sizes(path: Path) -> dict[str, Any]:
    """Return the sizes that the arguments of LlamaGen's training program determine; None if a file has none."""
    arguments = read_training_arguments(path)
    image_size = arguments.get_integer("image_size")
    cell = arguments.get_integer("downsample_size") or arguments.get_integer("downsample_ratio") or _CELL
    cells = (image_size // cell) ** 2 if image_size else None
    names = ("num_classes", "cls_token_num")
    return {"block_size": cells, **{name: arguments.get(name) for name in names}}


def _extract_condition(checkpoint: Checkpoint, config: Config) -> tuple[ClassCondition | CaptionProjection, int]:
    """Move the condition's weights from the checkpoint to a module; return the module and the prefix length."""
    weights = checkpoint.weights
    if "classes" in weights:
        rows, _ = checkpoint.get_shape("classes")
        config.check_value("input_type", "c2i", None)
        config.check_sizes_match_weights(num_classes=rows - 1, cls_token_num=1)
        return ClassCondition(weights.pop("classes").float()), 1
    has_uncond = "captions.uncond" in weights
    names = ("captions.first", "captions.second", *(["captions.uncond"] if has_uncond else []))
    first, second, *uncond = (list(checkpoint.get_shape(name)) for name in names)
    prefix, caption_dim = uncond[0] if uncond else (config.get_integer("cls_token_num"), first[1])
    if prefix is None:
        raise config.make_error("cls_token_num", expected="the number of text tokens")
    config.check_value("input_type", "t2i", "t2i2", None)  # t2i2: second stage of training
    config.check_sizes_match_weights(caption_dim=caption_dim, cls_token_num=prefix)
    if first[1] != caption_dim or second[1] != first[0]:
        shapes = f"shapes {first}, {second}, {[prefix, caption_dim]}"
        raise checkpoint.make_error(found=f"caption weights of {shapes}", expected="shapes that match each other")
    make_condition = CaptionCondition if has_uncond else CaptionProjection
    return make_condition(*(weights.pop(name).float() for name in names)), prefix


def _check_feed_forward_width(checkpoint: Checkpoint, config: Config) -> None:
    multiple = config.get_integer("multiple_of")
    if multiple is not None:
        rows = checkpoint.get_shape("layers.0.ffn.gate.weight")[0]
        factor = config.get_number("ffn_dim_multiplier", 1.0)
        width = int(factor * (8 * checkpoint.get_shape("embed.weight")[1] // 3))
        rounded = -(-width // multiple) * multiple
        if rows != rounded:
            problem = f"{multiple} rounds the width {width} up to {rounded}, but the weights have {rows}"
            raise config.make_error("multiple_of", problem)


def _choose_num_heads(checkpoint: Checkpoint, config: Config, published_size: PublishedModelSize | None) -> int:
    if heads := config.get_integer("num_attention_heads"):
        return heads
    if published_size:
        return published_size.num_heads
    problem = "the weights do not show the number of heads, and no published model has their sizes"
    field = config.aliases.get("num_attention_heads", "num_attention_heads")
    remedy = (
        f'give {{"{field}": 12}}, with your number, in a JSON file: as --config, or as config.json beside the weights'
    )
    raise checkpoint.make_error(problem=problem, remedy=remedy)


def _choose_grid_rows(
    checkpoint: Checkpoint,
    config: Config,
    prefix_length: int,
    is_class_conditional: bool,
    grid: int | None,
    published_size: PublishedModelSize | None,
) -> int:
    """Return the number of grid rows.

    The weights, the configuration and `grid` may each give the number, and must not contradict each other. If none of
    them gives it, the published model with the same sizes does.
    """
    cell_counts: list[tuple[str, int]] = []
    if "freqs_cis" in checkpoint.weights:
        cell_counts.append((f"{checkpoint.path}: freqs_cis", checkpoint.get_shape("freqs_cis", 3)[0] - prefix_length))
        del checkpoint.weights["freqs_cis"]
    if block := config.get_integer("block_size"):
        cell_counts.append((f"{config.path}: block_size", block))
    for field, cells in cell_counts:
        rows = isqrt(max(cells, 0))
        if not rows or rows**2 != cells:
            raise CheckpointError(
                field=field, found=f"{format_value(cells)} codes", expected="a square number of codes"
            )
        if grid not in (None, rows):
            raise CheckpointError(
                field=field,
                found=f"a grid of {format_value(rows)}",
                expected=f"{grid} rows, as in the other files or options",
            )
        grid = rows
    grids: tuple[int, ...] = ()
    if published_size:
        grids = published_size.class_grid_rows if is_class_conditional else published_size.text_grid_rows
    if grid is None and len(grids) != 1:
        choices = " or ".join(f"{rows} ({rows * _CELL} pixels)" for rows in grids or (16, 24, 32))
        raise CheckpointError("the weights do not show the grid of codes", field="grid", expected=choices)
    grid = grid or grids[0]
    check_grid_rows(grid)
    return grid
