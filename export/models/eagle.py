"""EAGLE drafters in LANTERN's layout (a folder with config.json and weights), and their graph.

A drafter combines the embedding of a token and the target's hidden state before this token by a linear map. The result
is the input of its layers, which have the same modules as the target's. It has an embedding table, no final norm, and
the output head of its target. The slot of a token has the position before the token's position, so the prefix of a
drafter is one position shorter than the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...engines.contracts import Progress
from ..checkpoints.deferred import skip_weight_allocation
from ..checkpoints.files import wrap_reader_errors
from ..checkpoints.folders import Checkpoint
from ..graph.decoder_graph import CPUDecoderWriter
from ..graph.graphs import Arrays, Graph, make_decoder_graph
from ..graph.onnx_ops import ExportGraphWriter
from ..progress import ignore_progress
from .decoder import Decoder, DecoderConfig, LayerStack
from .llama import read_layer_sizes, read_rope_base, rename_llama_weights


class EagleDrafter(LayerStack):
    """EAGLE drafter: predicts the target's next hidden state from a token and the hidden state before the token.

    The configuration's final norm and output head are ignored; the head is the target's. The embedding table has
    `num_tokens` rows; None: the number of codes.
    """

    def __init__(self, config: DecoderConfig, head: nn.Linear, bias: bool, num_tokens: int | None = None) -> None:
        super().__init__(replace(config, final_norm=False, head_hidden=0))
        self.embed = nn.Embedding(num_tokens or config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.head = head

    def forward(
        self, input_ids: Tensor, target_hidden: Tensor, position_ids: Tensor, mask: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        """Compute one forward pass over new slots, with further arguments and results as in `Decoder.forward`.

        A slot reads a token, `[rows, nodes]`, and the hidden state before the token, `[rows, nodes, hidden_size]`, of
        the target or, for draft tokens, of the drafter.
        """
        x = self.fc(torch.cat([self.embed(input_ids), target_hidden], -1))
        hidden, new_kv = self.run_layers(x, position_ids, mask, past)
        return self.head(hidden), hidden, *new_kv


class LoadedDrafter(NamedTuple):
    """Drafter that was read from its folder.

    `spec_fields` are the fields of `DrafterSpec` that are not sizes. `target_sha256` is that of the target weights that
    the drafter was trained on; None if unknown.
    """

    drafter: EagleDrafter
    spec_fields: dict[str, Any]
    target_sha256: str | None = None


@wrap_reader_errors
def read_drafter(
    folder: Path,
    target_decoder: Decoder,
    num_tokens: int | None = None,
    allowed_config_values: Mapping[str, tuple[Any, ...]] | None = None,
    progress: Progress = ignore_progress,
    **spec_fields: Any,
) -> LoadedDrafter:
    """Read a drafter in LANTERN's layout, which uses the head and the grid of its target.

    Args:
        num_tokens: number of tokens that the drafter embeds; None: the target's number of codes.
        allowed_config_values: values that a field of config.json may have if the drafter belongs to the target, by name
            of the field. Each field may be missing.
        spec_fields: fields of `DrafterSpec` in the manifest that are not sizes.

    Raises:
        CheckpointError: the folder has no drafter, or a drafter for another target.
    """
    checkpoint = Checkpoint(folder, "drafter", progress)
    config = checkpoint.read_config_file()
    checkpoint.read_weights()
    rename_llama_weights(checkpoint, "", {"embed.weight": "embed_tokens.weight"})
    weights = checkpoint.weights
    sizes = target_decoder.config
    if "fc.weight" not in weights or "embed.weight" not in weights:
        expected = "fc.weight and embed_tokens.weight, which every EAGLE drafter has"
        raise checkpoint.make_error(found=checkpoint.format_names(), expected=expected)
    if not isinstance(target_decoder.head, nn.Linear):
        raise checkpoint.make_error(
            problem="EAGLE drafters need a target with a linear head, but this target's has a hidden layer"
        )
    shape = checkpoint.get_shape("embed.weight")
    wanted = (num_tokens or sizes.vocab_size, sizes.hidden_size)
    if shape != wanted:
        expected = f"{list(wanted)}, as the target's {'tokens' if num_tokens else 'codes'}"
        raise checkpoint.make_error("embed.weight", found=f"shape {list(shape)}", expected=expected)
    config.check_sizes_match_weights(vocab_size=shape[0])
    rope_base = read_rope_base(config)  # read in any case, because it rejects scaled positions
    for name, allowed in (allowed_config_values or {}).items():
        config.check_value(name, *allowed, None, remedy="give the drafter that was trained for this target")
    drafter_config = replace(
        sizes,
        **read_layer_sizes(
            checkpoint, config, config.get_integer("num_attention_heads") or sizes.num_heads, head_dim_multiple=4
        ),
        prefix=sizes.prefix - 1,
        norm_eps=config.get_number("rms_norm_eps", 1e-6),
        rope_base=sizes.rope_base if sizes.rotary == "grid" else rope_base,
        input_norm="layers.0.attention_norm.weight" in weights,
    )
    with skip_weight_allocation():
        head = nn.Linear(drafter_config.hidden_size, drafter_config.vocab_size, bias=False)
        drafter = EagleDrafter(drafter_config, head, "fc.bias" in weights, num_tokens)
    weights["head.weight"] = target_decoder.head.weight
    checkpoint.load_module_weights(drafter)
    training = config.get("training")  # `train-drafter` writes this field
    target_sha256 = training.get("target_sha256") if isinstance(training, Mapping) else None
    return LoadedDrafter(drafter, spec_fields, None if target_sha256 is None else str(target_sha256))


def make_drafter_graph(drafter: EagleDrafter) -> Graph:
    hidden_size = drafter.config.hidden_size

    def make_inputs(generator: np.random.Generator, rows: int, nodes: int) -> Arrays:
        return {
            "input_ids": generator.integers(drafter.embed.num_embeddings, size=(rows, nodes)),
            "target_hidden": generator.standard_normal((rows, nodes, hidden_size), dtype=np.float32),
        }

    def write_drafter(ops: ExportGraphWriter) -> None:
        token = ops.op("Gather", ops.add_weight("embed.weight", drafter.embed.weight), "input_ids")
        joint = ops.op("Concat", token, "target_hidden", axis=-1)
        writer = CPUDecoderWriter(ops, drafter)
        writer.write_graph(writer.write_linear(joint, "fc"))

    return make_decoder_graph(drafter, make_inputs, write_drafter)
