"""Readers of weights and sizes of Llama-style decoders in the layout of transformers, checked against config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..checkpoints.deferred import defer_concatenation, skip_weight_allocation
from ..checkpoints.files import Config
from ..checkpoints.folders import Checkpoint
from .decoder import Decoder, DecoderConfig

_ROPE_FIELDS = ("rope_theta", "partial_rotary_factor")  # beside the section of rotary settings in older files
_MAX_PROMPT = 2048  # maximum number of prompt tokens, since a request's prompt has at most 2000 characters
_LAYER = "layers.0.attention"
_KINDS = ("weight", "bias")
# Names of weights in transformers by the decoder's names; both follow the number of the layer.
LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    **{f"attention.{p}.weight": f"self_attn.{p[0]}_proj.weight" for p in ("query", "key", "value", "out")},
    **{f"attention.{p}.bias": f"self_attn.{p[0]}_proj.bias" for p in ("query", "key", "value")},
    **{f"attention.qkv.{kind}": f"self_attn.{{q,k,v}}_proj.{kind}" for kind in _KINDS},
    **{f"attention.{p}_norm.{kind}": f"self_attn.{p[0]}_norm.{kind}" for p in ("query", "key") for kind in _KINDS},
    "attention_post_norm.weight": "post_self_attn_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_post_norm.weight": "post_mlp_layernorm.weight",
    **{f"ffn.{p}.weight": f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")},
}


def rename_llama_weights(checkpoint: Checkpoint, prefix: str, other_names: Mapping[str, str]) -> None:
    """Rename the weights of the layers and of the final norm, with a `prefix` in the files, to the decoder's names.

    The projections to queries, keys and values, `[heads * head_dim, hidden_size]`, are joined to one weight, and their
    biases to one bias. A row of a query or key norm, `[rows, head_dim]`, may belong to several heads (Lumina-mGPT), and
    is then repeated for each of them. `other_names` are names in the files, by name in the decoder, of further weights.

    Raises:
        CheckpointError: a projection is missing, or shapes do not match.
    """
    layers = {f"layers.*.{ours}": f"{prefix}layers.*.{theirs}" for ours, theirs in LAYER_NAMES.items()}
    checkpoint.rename_weights({"norm.weight": f"{prefix}norm.weight", **layers, **other_names})
    for i in range(checkpoint.count_layers("layers.")):
        parts = [f"layers.{i}.attention.{part}.weight" for part in ("query", "key", "value")]
        query, key, value = (checkpoint.get_shape(name) for name in parts)
        if key != value or query[1] != key[1]:
            shapes = f"shapes {query}, {key}, {value}"
            expected = "key and value of equal shape, as wide as the query"
            raise checkpoint.make_error(f"layers.{i}.attention.qkv.weight", found=shapes, expected=expected)
        checkpoint.weights[f"layers.{i}.attention.qkv.weight"] = defer_concatenation(
            [checkpoint.weights.pop(p) for p in parts]
        )
        biases = [f"layers.{i}.attention.{part}.bias" for part in ("query", "key", "value")]
        if any(name in checkpoint.weights for name in biases):
            sizes = [checkpoint.get_shape(name, 1) for name in biases]
            if sizes != [query[:1], key[:1], value[:1]]:
                raise checkpoint.make_error(
                    f"layers.{i}.attention.qkv.bias", found=f"{sizes}", expected="one bias per row"
                )
            checkpoint.weights[f"layers.{i}.attention.qkv.bias"] = defer_concatenation(
                [checkpoint.weights.pop(b) for b in biases]
            )
        for part, (width, _) in (("query", query), ("key", key)):
            for name in (f"layers.{i}.attention.{part}_norm.{kind}" for kind in _KINDS):
                norm = checkpoint.weights.get(name)
                norm = norm[None] if norm is not None and norm.ndim == 1 else norm  # one row for all heads (Qwen3)
                if norm is not None and norm.ndim == 2 and norm.numel() and width % norm.numel() == 0:
                    checkpoint.weights[name] = norm.repeat_interleave(width // norm.numel(), 0)


def read_layer_sizes(
    checkpoint: Checkpoint, config: Config, num_heads: int | None, head_dim_multiple: int, num_extra_layers: int = 0
) -> dict[str, Any]:
    """Return the fields of `DecoderConfig` that the weights determine, checked against the configuration.

    `head_dim_multiple` must divide the width of a head. The number of layers in the configuration does not include
    `num_extra_layers`.
    """
    qkv = f"{_LAYER}.qkv.weight"
    rows, width = checkpoint.get_shape(qkv)
    layers = checkpoint.count_layers("layers.")
    intermediate_size = checkpoint.get_shape("layers.0.ffn.gate.weight")[0]
    config.check_sizes_match_weights(
        hidden_size=width, num_hidden_layers=layers - num_extra_layers, intermediate_size=intermediate_size
    )
    supported = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "swin_norm": False}
    supported["tie_word_embeddings"] = bool(checkpoint.tied_weights)  # transformers would ignore a head in the files
    for name, needed in supported.items():
        config.check_value(name, needed, None, remedy="other decoders are not supported")
    queries = checkpoint.get_shape(f"{_LAYER}.out.weight")[1]  # the width of all heads together
    if (
        num_heads is None
        or queries % num_heads
        or queries // num_heads % head_dim_multiple
        or (config.get("head_dim") or width // num_heads) != queries // num_heads
    ):
        expected = f"a number that divides the width {queries} into heads of a multiple of {head_dim_multiple} numbers"
        raise config.make_error("num_attention_heads", found=str(num_heads), expected=expected)
    head_dim = queries // num_heads
    num_kv_heads, rest = divmod(rows - queries, 2 * head_dim)
    configured = config.get_integer("num_key_value_heads")
    if rest or num_kv_heads < 1 or num_heads % num_kv_heads or configured not in (None, num_kv_heads):
        expected = f"rows of {num_heads} heads of {head_dim} numbers and {configured or 'some'} key heads"
        raise checkpoint.make_error(qkv, found=f"{rows} rows", expected=expected)
    return {
        "hidden_size": width,
        "num_layers": layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "intermediate_size": intermediate_size,
        "head_width": 0 if queries == width else head_dim,
        "query_key_norm": f"{_LAYER}.query_norm.weight" in checkpoint.weights,
        "rms_head_norm": {f"{_LAYER}.query_norm.{kind}" in checkpoint.weights for kind in _KINDS} == {True, False},
        "qkv_bias": f"{_LAYER}.qkv.bias" in checkpoint.weights,
        "post_norms": "layers.0.ffn_post_norm.weight" in checkpoint.weights,
    }


def make_decoder_config(
    checkpoint: Checkpoint,
    config: Config,
    vocab_size: int,
    grid: int,
    head_hidden: int = 0,
    max_image_tokens: int = 0,
    has_position_limit: bool = True,
) -> DecoderConfig:
    """Return the sizes of a decoder in the layout of transformers, whose weights have the decoder's names.

    Args:
        grid: number of grid rows and columns of the default image.
        head_hidden: width of the head's hidden layer; 0: a linear head.
        max_image_tokens: maximum number of tokens of an image; 0: `grid * grid`.
        has_position_limit: whether `max_position_embeddings` limits the tokens of prompt and image together. A prompt
            has at most 2048 tokens in any case.

    Raises:
        CheckpointError: the decoder does not support the configuration, or the weights have other sizes.
    """
    sizes = read_layer_sizes(checkpoint, config, config.get_integer("num_attention_heads"), head_dim_multiple=2)
    tokens = max_image_tokens or grid**2
    positions = config.get_integer("max_position_embeddings") if has_position_limit else tokens + _MAX_PROMPT
    if positions is None or positions < tokens + 2:
        raise config.make_error("max_position_embeddings", expected=f"more than the {tokens} codes of an image")
    return DecoderConfig(
        **sizes,
        vocab_size=vocab_size,
        grid=grid,
        prefix=min(positions - tokens, _MAX_PROMPT),
        max_image_tokens=max_image_tokens,
        norm_eps=config.get_number("rms_norm_eps", 1e-6),
        rope_base=read_rope_base(config),
        rotary="sequence",
        rope_style="half",
        head_hidden=head_hidden,
    )


def load_llama_decoder(
    checkpoint: Checkpoint, config: DecoderConfig, code_token_range: range | None = None
) -> tuple[Decoder, Tensor]:
    """Load a decoder, and return it with the embeddings of its vocabulary, `[tokens, hidden_size]`.

    `code_token_range` are the token ids of the codes, if the vocabulary has other tokens too, whose rows of the head
    are left out.
    """
    with skip_weight_allocation():
        decoder = Decoder(config)
    embeddings = checkpoint.weights.pop("embed.weight")
    if code_token_range is not None:
        checkpoint.weights["head.weight"] = checkpoint.weights["head.weight"][
            code_token_range.start : code_token_range.stop
        ]
    checkpoint.load_module_weights(decoder)
    return decoder, embeddings


def load_prefix_decoder(decoder: Decoder, checkpoint: Checkpoint) -> Decoder:
    """Load a decoder for prefixes, which has the weights in `checkpoint` instead of those of `decoder` by these names.

    The `checkpoint` of the result has only its own weights.
    """
    with skip_weight_allocation():
        prefix_decoder = Decoder(decoder.config)
    replace(checkpoint, weights=decoder.state_dict() | checkpoint.weights).load_module_weights(prefix_decoder)
    object.__setattr__(prefix_decoder, "checkpoint", checkpoint)
    return prefix_decoder


def read_rope_settings(config: Config) -> Config:
    """Read the settings of the rotary embedding, with the precedence of transformers. Scaled positions are an error.

    `rope_scaling` replaces the whole section `rope_parameters`. Fields beside the section hold where it lacks them.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    section = config.get(name) or {}
    is_plain = isinstance(section, Mapping) and section.get("rope_type", section.get("type", "default")) == "default"
    # Some configurations have a section for each kind of layer.
    if not is_plain or any(isinstance(value, Mapping) for value in section.values()):
        raise config.make_error(name, expected="plain positions (default)")
    outer = {field: value for field in _ROPE_FIELDS if (value := config.get(field)) is not None}
    return Config(config.path, {**outer, **section})


def read_rope_base(config: Config) -> float:
    return read_rope_settings(config).get_number("rope_theta", 10000.0)
