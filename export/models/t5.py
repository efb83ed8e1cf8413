"""T5 text encoders of the v1.1 kind (flan-t5-xl is one): the module of transformers, its weights mapped, and its ops.

A token's place counts only relative to other tokens, through one learned bias per head that all layers share. So
padding may stand on either side: hidden by the mask, it leaves the other rows as they are. Everything is computed
in float32: activations of these encoders leave the range of float16.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checks import brief, require_library
from ...errors import CheckpointError
from ..checkpoints.deferred import without_weights
from ..checkpoints.files import TOKENIZER, listing, read_config, read_tokenizer, refusing
from ..checkpoints.folders import read_checkpoint
from ..graph.decoder_graph import write_rms_norm
from ..graph.onnx_ops import Ops

_HIDDEN = -1e9  # added to the scores of padding; finite, as in the other graphs
_SECOND = "encoder.embed_tokens.weight"  # the table of tokens, `shared.weight`, under its second name


@refusing
def read_text_encoder(folder: Path, caption_dim: int) -> tuple[Any, bytes, list[tuple[str, Path]]]:
    """The `T5Stack` in a folder such as flan-t5-xl's, for captions of a width, its `tokenizer.json`, and its files.

    Raises: CheckpointError, also for another width or a tokenizer of other tokens; EngineError without transformers.
    """
    path = folder / TOKENIZER
    if not path.is_file():
        cure = "save it there with transformers' AutoTokenizer" if folder.is_dir() else "give the folder of flan-t5-xl"
        raise CheckpointError(f"{folder}: found no {TOKENIZER}, expected a text encoder's folder with one; {cure}")
    encoder, sources = read_t5(folder, caption_dim)
    end = read_config(folder / "config.json").whole("eos_token_id") or 1
    if read_tokenizer(path, encoder.config.vocab_size).encode("a").ids[-1:] != [end]:
        raise CheckpointError(
            f"{path}: does not end a text with token {end}, as config.json says; give both of one model"
        )
    return encoder, path.read_bytes(), [*sources, ("text_tokenizer", path)]


@refusing
def read_t5(folder: Path, caption_dim: int | None = None) -> tuple[Any, list[tuple[str, Path]]]:
    """The encoder in a folder as transformers saves it, of a whole T5 or of the encoder alone; and its files.

    caption_dim: the width it must have. Raises: CheckpointError; EngineError if transformers is not installed.
    """
    wanted = "the folder of a T5 encoder such as flan-t5-xl, found no config.json"
    config = read_config(folder / "config.json", wanted)
    config.expect("model_type", "t5")
    config.expect("feed_forward_proj", "gated-gelu")
    width, buckets = config.whole("d_model"), config.whole("relative_attention_num_buckets") or 32
    distance = config.whole("relative_attention_max_distance") or 128
    if caption_dim not in (None, width):  # before gigabytes are read
        raise CheckpointError(
            f"{folder}: the text encoder has width {width}, but the transformer's captions {caption_dim}; "
            "LlamaGen's text models take flan-t5-xl (2048)"
        )
    if buckets % 4 or distance <= buckets // 4:
        raise config.error(f"{buckets} buckets for distances to {distance}, expected a multiple of 4, and more")
    require_library("transformers", str(folder), "export")
    from transformers import T5Config, T5EncoderModel

    checkpoint = read_checkpoint(folder, lambda name: not name.startswith(("decoder.", "lm_head.")), (_SECOND,))
    weights, shared = checkpoint.take("encoder."), checkpoint.weights.pop("shared.weight", None)
    if shared is not None and not torch.equal(weights.weights.setdefault("embed_tokens.weight", shared), shared):
        raise checkpoint.error(f"shared.weight and {_SECOND} differ, expected one table of tokens")
    if checkpoint.weights:
        raise checkpoint.error(f"unexpected weights {listing(checkpoint.weights)}, expected a T5's")
    config.agree(num_layers=weights.count("block."))  # before as many are built
    logger = logging.getLogger("transformers")
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        with without_weights():
            encoder = T5EncoderModel(T5Config.from_dict(dict(config.values))).encoder
    except Exception as error:  # the library's checks of a configuration share no base class
        raise config.error(f"expected the configuration of a T5, found {brief(error)}") from error
    finally:
        logger.setLevel(level)
    weights.load_strict(encoder)
    return encoder, [*checkpoint.sources("text_encoder"), ("text_encoder_config", config.path)]


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
        return ops.linear(x, name, weights[f"{name}.weight"])

    def norm(x: str, name: str) -> str:
        return write_rms_norm(ops, x, name, weights[f"{name}.weight"], config.layer_norm_epsilon)

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
