"""What a drafter borrows from its target, read from a bundle: sizes, head, embeddings, fields of its configuration.

Only the head and the table of embeddings are read; the target's layers are run by the bundle's engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...bundle.files import Bundle
from ...errors import CheckpointError
from ...export.models.decoder import DecoderConfig, rope_table
from ...planning.acceptance_statistics import weights_of
from ..graph_weights import GraphWeights

# Conventions of each family's drafters, of LANTERN's where it has one.
_CONVENTIONS: dict[str, dict[str, Any]] = {
    "llamagen": {"norm_eps": 1e-6, "input_norm": False},
    "scenes": {"norm_eps": 1e-5, "input_norm": False, "prefix_rotation": "identity"},
    "anole": {"norm_eps": 1e-5, "query_key_norm": True, "rotary": "sequence", "rope_style": "half"},
}


@dataclass(frozen=True)
class Borrowed:
    """What is frozen while a drafter learns.

    name, weights: of the target. config: of the drafter to be. head `[codes, width]`, float32. embeddings: to begin
    with, `[tokens, width]`; code c is token `code_offset` + c. fields: of config.json, beyond sizes. neighbors: the
    bundle's table, int64 `[codes, k]`, or None.
    """

    name: str
    weights: str
    config: DecoderConfig
    head: Tensor
    embeddings: Tensor
    code_offset: int
    fields: dict[str, Any]
    neighbors: Tensor | None


def read_borrowed(bundle: Bundle) -> Borrowed:
    """What a drafter of this bundle's target needs.

    Raises: CheckpointError: drafters of its kind are not known here. BundleError: the bundle is damaged.
    """
    manifest = bundle.manifest
    spec, condition = manifest.target, manifest.condition
    known = " and ".join([", ".join([*_CONVENTIONS][:-1]), [*_CONVENTIONS][-1]])
    if manifest.family not in _CONVENTIONS:
        raise CheckpointError(
            f"bundle {manifest.name}: is of family {manifest.family}, expected {known}; how drafters of others read "
            "their targets is not known here"
        )
    graph = GraphWeights(bundle.path("target"))
    config = DecoderConfig(
        hidden_size=spec.hidden_size,
        num_layers=1,
        num_heads=spec.hidden_size // spec.head_dim,
        num_kv_heads=spec.num_kv_heads,
        intermediate_size=graph.shape("layers.0.ffn.gate.weight")[1],
        vocab_size=spec.vocab_size,
        grid=manifest.grid_rows,
        prefix=condition.prefix - 1,
        spare_positions=spec.max_positions - condition.prefix - manifest.codes_per_image,
        final_norm=False,
        **_CONVENTIONS[manifest.family],
    )
    if config.rotary == "grid":  # the drafter turns as the target does, a row earlier
        cos, sin = (graph.read(f"rotary.{part}")[1:] for part in ("cos", "sin"))
        found = torch.stack([cos[:, ::2], sin[:, 1::2]], -1)
        wanted = rope_table(config)
        if found.shape != wanted.shape or not torch.allclose(
            found, wanted, atol=2e-3 if spec.dtype == "float16" else 1e-5
        ):
            raise CheckpointError(
                f"bundle {manifest.name}: its rotary table is not that of base {config.rope_base:.0f}, which drafters "
                f"of family {manifest.family} have"
            )
    codes = torch.from_numpy(np.array(bundle.code_embeddings()))
    embeddings, offset = codes, 0
    if condition.kind == "tokens":
        embeddings = GraphWeights(bundle.path("condition")).read("table.weight")
        offset = _place(bundle, embeddings, codes)
    near = torch.from_numpy(bundle.neighbors().indices.astype(np.int64)) if manifest.neighbors else None
    return Borrowed(
        manifest.name,
        weights_of(manifest)["target"],
        config,
        graph.read("head.weight").T.contiguous(),
        embeddings,
        offset,
        _fields(bundle, config),
        near,
    )


def _place(bundle: Bundle, table: Tensor, codes: Tensor) -> int:
    """The token of code 0."""
    rounded = codes.to(torch.float16).float() if not (table == codes[0]).all(1).any() else codes
    for start in torch.nonzero((table == rounded[0]).all(1)).flatten().tolist():
        if torch.equal(table[start : start + len(codes)], rounded):
            return int(start)
    raise CheckpointError(
        f"bundle {bundle.manifest.name}: its codes do not lie in order among its tokens, expected them in one block"
        "; no drafter of it can be trained"
    )


def _fields(bundle: Bundle, config: DecoderConfig) -> dict[str, Any]:
    """Fields of LANTERN's config.json that tell what a drafter belongs to."""
    condition = bundle.manifest.condition
    if bundle.manifest.family == "anole":
        return {
            "architectures": ["ChameleonForConditionalGeneration"],
            "model_type": "chameleon",
            "max_position_embeddings": config.positions - config.spare_positions + 1,
            "rope_theta": config.rope_base,
            "swin_norm": False,
            "attention_bias": False,
            "mlp_bias": False,
        }
    own: dict[str, Any] = {"input_type": "t2i", "caption_dim": condition.caption_dim}
    if condition.kind == "class":
        own = {"input_type": "c2i", "num_classes": condition.classes}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{name: value for name, value in own.items() if value is not None},
        "cls_token_num": condition.prefix,
        "block_size": bundle.manifest.codes_per_image,
        "rope_base": config.rope_base,
    }
