"""Causal text encoders, such as Qwen3: decoders whose last hidden states are text embeddings.

A text is padded on the right with one token, at the last position of the longest text. The padding sees the text and
not itself. The empty text is a padding that sees nothing: attention gives zeros there. In module and graph, it sees one
past column, whose keys and values are zeros, and which no other token sees.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...engines.contracts import Progress
from ..checkpoints.deferred import skip_weight_allocation
from ..checkpoints.files import Config, read_tokenizer, wrap_reader_errors
from ..checkpoints.folders import Checkpoint
from ..graph.decoder_graph import CPUDecoderWriter
from ..graph.onnx_ops import ExportGraphWriter
from ..progress import ignore_progress
from .decoder import DecoderConfig, LayerStack, RMSNorm
from .llama import make_decoder_config, rename_llama_weights
from .t5 import LoadedTextEncoder

_HIDDEN = -1e9  # added to the scores of hidden columns; finite, as in the other graphs


class CausalEncoder(LayerStack):
    """Text encoder. `padding` is the token id of padding; a text has at most `config.prefix` tokens."""

    def __init__(self, config: DecoderConfig, padding: int) -> None:
        super().__init__(config)
        self.padding = padding
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, token_ids: Tensor, token_mask: Tensor) -> Tensor:
        """Return the states of the tokens, and after them those of the empty text, `[rows, tokens + 1, hidden_size]`.

        `token_ids [rows, tokens]` are padded on the right, where `token_mask` is 0.
        """
        is_text = F.pad(token_mask, (0, 1)) > 0
        is_empty_text = F.pad(token_mask * 0, (0, 1), value=1) > 0
        positions = torch.where(is_text, is_text.cumsum(1) - 1, self.config.prefix - 1)
        sees = (positions[:, :, None] >= positions[:, None]) & is_text[:, None] & ~is_empty_text[:, :, None]
        sees = torch.cat([is_empty_text[:, :, None], sees], 2)
        x = self.embed(F.pad(token_ids, (0, 1), value=self.padding))
        mask = torch.where(sees, 0.0, _HIDDEN).to(x.dtype)[:, None]
        nothing = x.new_zeros(1, len(x), self.config.num_kv_heads, self.config.head_dim)
        states: Tensor = self.norm(self.run_layers(x, positions, mask, [nothing] * (2 * len(self.layers)))[0])
        return states


@wrap_reader_errors
def read_qwen3_encoder(
    folder: Path, width: int, max_tokens: int, progress: Progress = ignore_progress
) -> LoadedTextEncoder:
    """Read the text encoder of a folder such as Qwen3-1.7B, whose states must have a `width`."""
    checkpoint = Checkpoint(folder, "text_encoder", progress)
    config = checkpoint.read_model_config("Qwen/Qwen3-1.7B", "qwen3")
    tokenizer = checkpoint.find_tokenizer_path()
    settings = checkpoint.read_config_file("tokenizer_config.json")
    if config.get_integer("hidden_size") != width:  # checked before gigabytes are read
        expected = f"{width}, the width of the transformer's captions"
        raise config.make_error("hidden_size", expected=expected, remedy="give the text encoder of the model")
    config.check_value("use_sliding_window", False, None)
    settings.check_value("padding_side", "right", None)
    checkpoint.read_weights(lambda name: name != "lm_head.weight")
    rename_llama_weights(checkpoint, "model.", {"embed.weight": "model.embed_tokens.weight"})
    tokens, _ = checkpoint.get_shape("embed.weight")
    names = read_tokenizer(tokenizer, tokens).get_vocab(with_added_tokens=True)
    padding = names.get(settings.get("pad_token", ""))
    if padding is None:
        raise settings.make_error("pad_token", expected=f"a token of {tokenizer.name}")
    values = {**config.values, "tie_word_embeddings": None}  # an encoder has no head
    sizes = make_decoder_config(checkpoint, Config(config.path, values), tokens, grid=1)
    with skip_weight_allocation():
        encoder = CausalEncoder(replace(sizes, prefix=max_tokens), padding)
    checkpoint.load_module_weights(encoder)
    return LoadedTextEncoder(encoder, tokenizer.read_bytes(), checkpoint.sources)


class _EncoderWriter(CPUDecoderWriter):
    def write_output_head(self, hidden: str, hidden_for_cell_below: str | None = None) -> None:
        """An encoder has no head."""


def write_causal_encoder(ops: ExportGraphWriter, encoder: CausalEncoder) -> str:
    """Write the graph of `CausalEncoder.forward` with the inputs `token_ids` and `token_mask`; return its output."""
    config = encoder.config

    def append(tokens: str, value: int) -> str:
        return ops.op("Pad", tokens, ops.int_vector(0, 0, 0, 1), ops.add_weight(f"token_{value}", torch.tensor(value)))

    is_text = ops.op("Cast", append("token_mask", 0), to=9)
    is_empty_text = ops.op("Cast", append(ops.op("Mul", "token_mask", ops.int_vector(0)), 1), to=9)
    axis = ops.add_weight("axis", torch.tensor(1))
    counts = ops.op("CumSum", append("token_mask", 0), axis)
    places = ops.op("Sub", counts, ops.int_vector(1))
    positions = ops.op("Where", is_text, places, ops.int_vector(config.prefix - 1), name="position_ids")
    in_rows, in_columns = (ops.op("Unsqueeze", positions, ops.int_vector(axis)) for axis in (2, 1))
    empty_column = ops.op("Unsqueeze", is_empty_text, ops.int_vector(2))
    sees = ops.op("And", ops.op("GreaterOrEqual", in_rows, in_columns), ops.op("Unsqueeze", is_text, ops.int_vector(1)))
    sees = ops.op("Concat", empty_column, ops.op("And", sees, ops.op("Not", empty_column)), axis=2)
    mask = ops.op("Where", sees, ops.add_number("zero", 0.0), ops.add_number("hidden", _HIDDEN))
    ops.op("Unsqueeze", mask, ops.int_vector(1), name="attention_mask")
    rows = ops.op("Shape", "token_ids", start=0, end=1)
    entry = ops.int_vector(config.num_kv_heads, config.head_dim)
    shape = ops.op("Concat", ops.int_vector(1), rows, entry, axis=0)
    for i in range(config.num_layers):
        for part in ("key", "value"):
            ops.op("Expand", ops.add_number("zero", 0.0), shape, name=f"past_key_values.{i}.{part}")
    table = ops.add_weight("embed.weight", encoder.embed.weight)
    _EncoderWriter(ops, encoder).write_graph(ops.op("Gather", table, append("token_ids", encoder.padding)))
    return "hidden_states"
