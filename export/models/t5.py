"""T5 text encoders of version 1.1, such as flan-t5-xl: the module from transformers, and its graph.

T5 adds a learned bias to attention scores, which depends on the head and on the distance between two tokens. All layers
share this bias. Absolute positions do not matter, so masked padding on either side does not change the states of other
tokens. All computations are in float32, because activations of these encoders exceed the range of float16.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...engines.contracts import Progress
from ...inputs import format_error, require_library, reraise_error_of_signal_handler
from ..checkpoints.deferred import skip_weight_allocation
from ..checkpoints.files import Config, format_names, make_file_error, read_tokenizer, wrap_reader_errors
from ..checkpoints.folders import Checkpoint
from ..graph.decoder_graph import write_rms_norm
from ..graph.onnx_ops import ExportGraphWriter
from ..progress import ignore_progress

_HIDDEN = -1e9  # added to the scores of padding; finite, as in the other graphs
_TIED_TABLE = "encoder.embed_tokens.weight"  # second name of the embedding table, `shared.weight`


class LoadedTextEncoder(NamedTuple):
    """Text encoder, with the content of its `tokenizer.json` and its files by role."""

    encoder: Any  # a `T5Stack` of transformers, or a `CausalEncoder`
    tokenizer: bytes
    sources: list[tuple[str, Path]]


@wrap_reader_errors
def read_text_encoder(folder: Path, caption_dim: int, progress: Progress = ignore_progress) -> LoadedTextEncoder:
    """Read the text encoder of a folder such as flan-t5-xl, which may contain a whole T5 or only the encoder.

    `caption_dim` is the width of the text embeddings that the target takes.
    """
    checkpoint = Checkpoint(folder, "text_encoder", progress)
    config = checkpoint.read_model_config("google/flan-t5-xl", "t5")
    tokenizer = checkpoint.find_tokenizer_path()
    if config.get_integer("d_model") != caption_dim:  # checked before gigabytes are read
        expected = f"{caption_dim}, the width of the transformer's captions"
        raise config.make_error("d_model", expected=expected, remedy="LlamaGen's text models take flan-t5-xl (2048)")
    encoder = _read_t5_encoder(checkpoint, config)
    end = config.get_integer("eos_token_id") or 1
    last = read_tokenizer(tokenizer, encoder.config.vocab_size).encode("a").ids[-1:]
    if last != [end]:
        expected = f"{end}, the eos_token_id of config.json"
        raise make_file_error(tokenizer, "last token of a text", found=str(*last), expected=expected)
    return LoadedTextEncoder(encoder, tokenizer.read_bytes(), checkpoint.sources)


def _read_t5_encoder(checkpoint: Checkpoint, config: Config) -> Any:
    config.check_value("feed_forward_proj", "gated-gelu")
    buckets = config.get_integer("relative_attention_num_buckets") or 32
    distance = config.get_integer("relative_attention_max_distance") or 128
    if buckets % 4 or distance <= buckets // 4:
        raise config.make_error(
            "relative_attention_num_buckets",
            found=f"{buckets} buckets for distances up to {distance}",
            expected="a multiple of 4 below 4 * relative_attention_max_distance",
        )
    require_library("transformers", str(checkpoint.path), "export")
    from transformers import T5Config, T5EncoderModel

    checkpoint.read_weights(lambda name: not name.startswith(("decoder.", "lm_head.")), (_TIED_TABLE,))
    weights = checkpoint.extract_weights("encoder.")
    shared = checkpoint.weights.pop("shared.weight", None)
    if shared is not None and not torch.equal(weights.weights.setdefault("embed_tokens.weight", shared), shared):
        raise checkpoint.make_error("shared.weight", f"differs from {_TIED_TABLE}", expected="one table of tokens")
    if checkpoint.weights:
        raise checkpoint.make_error(found=f"weights {format_names(checkpoint.weights)}", expected="weights of a T5")
    # checked before as many layers are built
    config.check_sizes_match_weights(num_layers=weights.count_layers("block."))
    logger = logging.getLogger("transformers")
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        with skip_weight_allocation():
            encoder = T5EncoderModel(T5Config.from_dict(dict(config.values))).encoder
    except Exception as error:  # the library's checks of a configuration share no base class
        reraise_error_of_signal_handler(error)
        raise config.make_error(found=format_error(error), expected="the configuration of a T5") from error
    finally:
        logger.setLevel(level)
    weights.load_module_weights(encoder)
    return encoder


def write_t5_encoder(ops: ExportGraphWriter, encoder: Any, max_tokens: int) -> tuple[str, str]:
    """Write the graph of a T5 encoder, whose inputs are `token_ids` and `token_mask`, `[rows, tokens]`.

    Returns the hidden states, `[rows, tokens, d_model]`, and the mask in float32. `max_tokens` limits a text.
    """
    weights: dict[str, Tensor] = encoder.state_dict()
    config = encoder.config
    attention = encoder.block[0].layer[0].SelfAttention
    mask = ops.op("Cast", "token_mask", to=1)
    hidden = ops.op("Mul", ops.op("Sub", mask, ops.add_number("one", 1.0)), ops.add_number("hidden", -_HIDDEN))
    hidden = ops.op("Unsqueeze", hidden, ops.int_vector(1, 2))  # [rows, 1, 1, tokens]
    tokens = ops.op("Shape", "token_ids", start=1, end=2)
    ends = ops.op("Concat", tokens, tokens, axis=0)
    # The bias depends on distances only, so shorter texts use a corner of [1, heads, max_tokens, max_tokens].
    distances = ops.add_weight("distance_bias", attention.compute_bias(max_tokens, max_tokens).float())
    bias = ops.op("Add", ops.op("Slice", distances, ops.int_vector(0, 0), ends, ops.int_vector(2, 3)), hidden)

    def write_linear(x: str, name: str) -> str:
        return ops.write_linear(x, f"{name}.weight", weights[f"{name}.weight"])

    def write_norm(x: str, name: str) -> str:
        return write_rms_norm(ops, x, f"{name}.weight", weights[f"{name}.weight"], config.layer_norm_epsilon)

    x = ops.op("Gather", ops.add_weight("embed_tokens.weight", weights["embed_tokens.weight"]), "token_ids")
    for i in range(config.num_layers):
        layer = f"block.{i}.layer.0"
        normed = write_norm(x, f"{layer}.layer_norm")
        query, key, value = (
            ops.reshape(write_linear(normed, f"{layer}.SelfAttention.{part}"), 0, 0, config.num_heads, config.d_kv)
            for part in "qkv"
        )  # each [rows, tokens, heads, d_kv]
        scores = ops.op("MatMul", ops.transpose(query, 0, 2, 1, 3), ops.transpose(key, 0, 2, 3, 1))
        shares = ops.op("Softmax", ops.op("Add", scores, bias), axis=-1)
        mixed = ops.transpose(ops.op("MatMul", shares, ops.transpose(value, 0, 2, 1, 3)), 0, 2, 1, 3)
        merged_heads = ops.reshape(mixed, 0, 0, config.num_heads * config.d_kv)
        x = ops.op("Add", x, write_linear(merged_heads, f"{layer}.SelfAttention.o"))
        layer = f"block.{i}.layer.1"
        normed = write_norm(x, f"{layer}.layer_norm")
        gate = ops.op("Gelu", write_linear(normed, f"{layer}.DenseReluDense.wi_0"), approximate="tanh")
        active = ops.op("Mul", gate, write_linear(normed, f"{layer}.DenseReluDense.wi_1"))
        x = ops.op("Add", x, write_linear(active, f"{layer}.DenseReluDense.wo"))
    return write_norm(x, "final_layer_norm"), mask
