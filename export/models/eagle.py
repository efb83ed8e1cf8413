"""EAGLE drafters in LANTERN's layout: a folder of config.json and weights, and their graph.

A drafter is one or more layers of the shared decoder behind a linear map of a token's embedding and the hidden
state before it. It has its own embedding table, borrows the target's head, and has no final norm. The slot that
holds a token sits one position before it: a drafter of LlamaGen has a rotary table that starts one row later.

Does not know how drafts are grown or accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import CheckpointError
from ..checkpoints.deferred import without_weights
from ..checkpoints.files import Weights, config_float, config_int, count_blocks, fill, read_config, shape_of
from ..checkpoints.folders import find_weights, read_weight_files
from ..graph.decoder_graph import cache_values, node_values, write_head, write_layers
from ..graph.graphs import Arrays, Flat, Graph, decoder_cases, decoder_outputs
from ..graph.onnx_ops import Ops, Value
from .decoder import Decoder, DecoderConfig, DeepHead, Layer, rotary_table
from .hf_decoder import rename_layers, rope_base


class EagleDrafter(nn.Module):
    """Predicts the target's next hidden state from its last one and the token that followed."""

    turns: Tensor

    def __init__(
        self, config: DecoderConfig, head: nn.Linear | DeepHead, bias: bool, tokens: int | None = None
    ) -> None:
        """`tokens`: rows of the embedding table, where it holds more than the codes."""
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(tokens or config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.layers = nn.ModuleList(Layer(config, config.input_norm or i > 0) for i in range(config.num_layers))
        self.register_buffer("turns", rotary_table(config), persistent=False)
        self.head = head

    def forward(
        self,
        input_ids: Tensor,
        target_hidden: Tensor,
        position_ids: Tensor,
        mask: Tensor,
        past: list[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """One pass over new slots: `input_ids [rows, nodes]`, `target_hidden [rows, nodes, width]`.

        The rest, and the results, as in `Decoder.forward`; the hidden states are predictions.
        """
        x = self.fc(torch.cat([self.embed(input_ids), target_hidden], -1))
        turn = self.turns[position_ids]
        fresh = []
        for layer, (past_key, past_value) in zip(self.layers, past, strict=True):
            x, key, value = layer(x, turn, mask, past_key, past_value)
            fresh.append((key, value))
        return self.head(x), x, fresh


@dataclass(frozen=True)
class DrafterFiles:
    """A drafter and the files it came from, with roles."""

    drafter: EagleDrafter
    files: list[tuple[str, Path]]


def read_drafter(folder: Path, target: Decoder, tokens: int | None = None) -> DrafterFiles:
    """The drafter in a folder, for a target whose head and grid it shares.

    `tokens`: the size of the vocabulary that the drafter embeds, where that holds more than the target's codes.
    """
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise CheckpointError(f"{folder}: expected a folder with config.json and weights")
    found = find_weights(folder)
    path = found.files[0] if len(found.files) == 1 else folder  # for messages
    weights = read_weight_files(found, keep=lambda name: not name.endswith(".inv_freq"))
    if "fc.weight" not in weights or "embed_tokens.weight" not in weights:
        raise CheckpointError(f"{path}: has no fc.weight and embed_tokens.weight, so this is no EAGLE drafter")
    if not isinstance(target.head, nn.Linear):
        raise CheckpointError(f"{path}: the target's head has a hidden layer; EAGLE drafters borrow a plain one")
    config = _infer(weights, path, config_path, target.config, tokens or target.config.vocab_size)
    with without_weights():
        head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        drafter = EagleDrafter(config, head, "fc.bias" in weights, tokens)
    renamed, shown = rename_layers(weights, "", config.num_layers, config.hidden_size, path)
    renamed["embed.weight"], shown["embed.weight"] = renamed.pop("embed_tokens.weight"), "embed_tokens.weight"
    fill(drafter, renamed | {"head.weight": target.head.weight}, path, shown)
    index = [] if found.index is None else [("drafter_index", found.index)]
    files = [("drafter", file) for file in found.files]
    return DrafterFiles(drafter, [*index, *files, ("drafter_config", config_path)])


def drafter_graph(drafter: EagleDrafter) -> Graph:
    """The graph of a drafter."""
    config = drafter.config
    past, new = cache_values(config.num_layers, config.num_kv_heads, config.head_dim)

    def inputs(generator: np.random.Generator, rows: int, nodes: int) -> Arrays:
        return {
            "input_ids": generator.integers(drafter.embed.num_embeddings, size=(rows, nodes)),
            "target_hidden": generator.standard_normal((rows, nodes, config.hidden_size), dtype=np.float32),
        }

    return Graph(
        role="drafter",
        module=Flat(drafter, leading=4),
        inputs=(
            Value("input_ids", ("rows", "nodes"), "int64"),
            Value("target_hidden", ("rows", "nodes", config.hidden_size)),
            *node_values(),
            *past,
        ),
        outputs=(*decoder_outputs(config.vocab_size, config.hidden_size), *new),
        cases=tuple(decoder_cases(inputs, past, config.positions, max(config.prefix, 2))),
        write=lambda ops: _write(ops, drafter),
    )


def _write(ops: Ops, drafter: EagleDrafter) -> None:
    token = ops.op("Gather", ops.weight("embed.weight", drafter.embed.weight), "input_ids")
    joint = ops.op("Concat", token, "target_hidden", axis=-1)
    x = write_layers(ops, drafter.layers, drafter.turns, ops.linear(joint, "fc", drafter.fc.weight, drafter.fc.bias))
    hidden = ops.op("Identity", x, name="hidden_states")
    write_head(ops, hidden, drafter.head)


def _infer(weights: Weights, path: Path, config_path: Path, target: DecoderConfig, tokens: int) -> DecoderConfig:
    arguments = read_config(config_path)
    vocabulary, width = shape_of(weights, "embed_tokens.weight", 2, path)
    if (vocabulary, width) != (tokens, target.hidden_size):
        kind = "codes" if tokens == target.vocab_size else "tokens"
        raise CheckpointError(
            f"{path}: the drafter has {vocabulary} {kind} of width {width}, the target {tokens} of {target.hidden_size}"
        )
    layers = count_blocks(weights, "layers.")
    if not layers:
        raise CheckpointError(f"{path}: missing weight layers.0.self_attn.q_proj.weight")
    known = {
        "hidden_size": width,
        "vocab_size": vocabulary,
        "num_hidden_layers": layers,
        "intermediate_size": shape_of(weights, "layers.0.mlp.gate_proj.weight", 2, path)[0],
    }
    for name, found in known.items():
        if config_int(arguments, name, config_path) not in (None, found):
            raise CheckpointError(f"{config_path}: {name} is {arguments[name]}, but the weights have {found}")
    heads = config_int(arguments, "num_attention_heads", config_path) or target.num_heads
    if width % heads or width // heads % 4:
        raise CheckpointError(f"{config_path}: {heads} heads do not fit the width {width}")
    keys = shape_of(weights, "layers.0.self_attn.k_proj.weight", 2, path)[0]
    num_kv_heads = keys // (width // heads)
    if keys % (width // heads) or not num_kv_heads or heads % num_kv_heads:
        raise CheckpointError(f"{path}: k_proj has {keys} rows, which {heads} heads of {width // heads} do not explain")
    return replace(
        target,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=known["intermediate_size"],
        prefix=target.prefix - 1,
        norm_eps=config_float(arguments, "rms_norm_eps", 1e-6, config_path),
        rope_base=target.rope_base if target.rotary == "grid" else rope_base(arguments, config_path),
        input_norm="layers.0.input_layernorm.weight" in weights,
        final_norm=False,
        query_key_norm="layers.0.self_attn.q_norm.weight" in weights,
    )
