"""T5 text encoders of the v1.1 kind (flan-t5-xl is one): the module of transformers, its weights mapped, and its ops.

A token's place counts only relative to other tokens, through one learned bias per head that all layers share. So
padding may stand on either side: hidden by the mask, it leaves the other rows as they are. Everything is computed
in float32: activations of these encoders leave the range of float16.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...engines.contracts import Progress
from ...inputs import format_error, require_library
from ..checkpoints.deferred import without_weights
from ..checkpoints.files import Config, file_error, listing, raises_checkpoint_error, read_tokenizer
from ..checkpoints.folders import Checkpoint
from ..graph.decoder_graph import write_rms_norm
from ..graph.onnx_ops import Ops
from ..progress import silent

_HIDDEN = -1e9  # added to the scores of padding; finite, as in the other graphs
_SECOND = "encoder.embed_tokens.weight"  # the table of tokens, `shared.weight`, under its second name


class TextEncoder(NamedTuple):
    """A `T5Stack` with the content of its `tokenizer.json`, and the files of both with roles."""

    encoder: Any
    tokenizer: bytes
    sources: list[tuple[str, Path]]


@raises_checkpoint_error
def read_text_encoder(folder: Path, caption_dim: int, progress: Progress = silent) -> TextEncoder:
    """The encoder in a folder such as flan-t5-xl's, as transformers saves it: a whole T5, or the encoder alone.

    Args:
        folder: config.json, tokenizer.json and weights.
        caption_dim: the width of captions, which must be the encoder's.

    Raises:
        CheckpointError: no T5, one of another width, or a tokenizer of other tokens.
        EngineError: transformers is not installed.
    """
    checkpoint = Checkpoint(folder, "text_encoder", progress)
    config, tokenizer = checkpoint.model_config("google/flan-t5-xl", "t5"), checkpoint.tokenizer()
    width = config.integer("d_model")
    if width != caption_dim:  # before gigabytes are read
        expected = f"{caption_dim}, the width of the transformer's captions"
        raise config.error("d_model", expected=expected, remedy="LlamaGen's text models take flan-t5-xl (2048)")
    encoder = _read_t5(checkpoint, config)
    end = config.integer("eos_token_id") or 1
    last = read_tokenizer(tokenizer, encoder.config.vocab_size).encode("a").ids[-1:]
    if last != [end]:
        expected = f"{end}, the eos_token_id of config.json"
        raise file_error(tokenizer, "last token of a text", found=str(*last), expected=expected)
    return TextEncoder(encoder, tokenizer.read_bytes(), checkpoint.sources)


def _read_t5(checkpoint: Checkpoint, config: Config) -> Any:
    config.expect("feed_forward_proj", "gated-gelu")
    buckets = config.integer("relative_attention_num_buckets") or 32
    distance = config.integer("relative_attention_max_distance") or 128
    if buckets % 4 or distance <= buckets // 4:
        found = f"{buckets} for distances to {distance}"
        raise config.error("relative_attention_num_buckets", found=found, expected="a multiple of 4, and farther")
    require_library("transformers", str(checkpoint.path), "export")
    from transformers import T5Config, T5EncoderModel

    checkpoint.read(lambda name: not name.startswith(("decoder.", "lm_head.")), (_SECOND,))
    weights = checkpoint.extract("encoder.")
    shared = checkpoint.weights.pop("shared.weight", None)
    if shared is not None and not torch.equal(weights.weights.setdefault("embed_tokens.weight", shared), shared):
        raise checkpoint.error("shared.weight", f"differs from {_SECOND}", expected="one table of tokens")
    if checkpoint.weights:
        raise checkpoint.error(found=f"weights {listing(checkpoint.weights)}", expected="those of a T5")
    config.check_sizes(num_layers=weights.count("block."))  # before as many are built
    logger = logging.getLogger("transformers")
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        with without_weights():
            encoder = T5EncoderModel(T5Config.from_dict(dict(config.values))).encoder
    except Exception as error:  # the library's checks of a configuration share no base class
        raise config.error(found=format_error(error), expected="the configuration of a T5") from error
    finally:
        logger.setLevel(level)
    weights.load_strict(encoder)
    return encoder


def write_encoder(ops: Ops, encoder: Any, most: int) -> tuple[str, str]:
    """Ops from `token_ids` and `token_mask [rows, tokens]` to hidden states, and the mask as float.

    `most`: the largest number of tokens that the graph takes.
    """
    weights: dict[str, Tensor] = encoder.state_dict()
    config, attention = encoder.config, encoder.block[0].layer[0].SelfAttention
    mask = ops.op("Cast", "token_mask", to=1)
    hidden = ops.op("Mul", ops.op("Sub", mask, ops.number("one", 1.0)), ops.number("hidden", -_HIDDEN))
    hidden = ops.op("Unsqueeze", hidden, ops.ints(1, 2))  # [rows, 1, 1, tokens]
    tokens = ops.op("Shape", "token_ids", start=1, end=2)
    ends = ops.op("Concat", tokens, tokens, axis=0)
    # Distances are those of fewer tokens in any corner of the table [1, heads, most, most].
    distances = ops.weight("distance_bias", attention.compute_bias(most, most).float())
    bias = ops.op("Add", ops.op("Slice", distances, ops.ints(0, 0), ends, ops.ints(2, 3)), hidden)

    def linear(x: str, name: str) -> str:
        return ops.linear(x, f"{name}.weight", weights[f"{name}.weight"])

    def norm(x: str, name: str) -> str:
        return write_rms_norm(ops, x, f"{name}.weight", weights[f"{name}.weight"], config.layer_norm_epsilon)

    x = ops.op("Gather", ops.weight("embed_tokens.weight", weights["embed_tokens.weight"]), "token_ids")
    for i in range(config.num_layers):
        at = f"block.{i}.layer.0"
        normed = norm(x, f"{at}.layer_norm")
        query, key, value = (
            ops.reshape(linear(normed, f"{at}.SelfAttention.{part}"), 0, 0, config.num_heads, config.d_kv)
            for part in "qkv"
        )  # each [rows, tokens, heads, d_kv]
        scores = ops.op("MatMul", ops.transpose(query, 0, 2, 1, 3), ops.transpose(key, 0, 2, 3, 1))
        shares = ops.op("Softmax", ops.op("Add", scores, bias), axis=-1)
        mixed = ops.transpose(ops.op("MatMul", shares, ops.transpose(value, 0, 2, 1, 3)), 0, 2, 1, 3)
        joined = ops.reshape(mixed, 0, 0, config.num_heads * config.d_kv)
        x = ops.op("Add", x, linear(joined, f"{at}.SelfAttention.o"))
        at = f"block.{i}.layer.1"
        normed = norm(x, f"{at}.layer_norm")
        gate = ops.op("Gelu", linear(normed, f"{at}.DenseReluDense.wi_0"), approximate="tanh")
        active = ops.op("Mul", gate, linear(normed, f"{at}.DenseReluDense.wi_1"))
        x = ops.op("Add", x, linear(active, f"{at}.DenseReluDense.wo"))
    return norm(x, "final_layer_norm"), mask
