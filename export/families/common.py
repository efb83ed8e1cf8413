"""What model families share: a model's parts as graphs and fields of the manifest. See docs/adding-a-family.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ...bundle.manifest import DecoderSpec, DecodingDefaults, DrafterSpec, Size
from ...errors import CheckpointError, RequestError
from ...inputs import format_value
from ...methods import Eagle, Lantern, LanternPlusPlus, Sampling
from ..checkpoints.files import TOKENIZER
from ..graph.conditions import Condition
from ..graph.graphs import Graph, named_cases, target_graph
from ..graph.onnx_ops import Value
from ..model import Model
from ..models.decoder import Decoder, DecoderConfig
from ..models.eagle import LoadedDrafter, drafter_graph
from ..models.llamagen_vq import LlamaGenVQ, VQDecoder, VQEncoder
from ..neighbours import MAX_NEIGHBORS

MAX_PAIR_PIXELS = 256  # image height above which a check decodes one image, as two take too much memory
_CHECKED = 128  # pixels a side of the checks of graphs for pictures of any size: 720 take several GB


def image_model(
    *,
    family: str,
    decoder: Decoder,
    code_embeddings: Tensor,
    condition: Condition,
    vq: LlamaGenVQ,
    sampling: Sampling,
    sources: list[tuple[str, Path]],
    drafting: LoadedDrafter | None = None,
    sizes: Sequence[Size] = (),
    row_end: int | None = None,
) -> Model:
    """What a bundle is made from.

    Args:
        family: its name.
        decoder: the target.
        code_embeddings: `[tokens, hidden_size]`, the target's input rows for codes, and behind them, if rows end with a
            token, up to that.
        condition: what makes a prompt prefix rows.
        vq: the image tokenizer.
        sampling: defaults of requests.
        sources: files with roles, without those of the drafter.
        drafting: the drafter.
        sizes: as `Manifest` has them, and so is row_end.
        row_end: the token behind every row of codes but the last.

    Raises:
        CheckpointError: target and tokenizer have not as many codes.
    """
    own = decoder.config
    codes = own.vocab_size
    pixels = own.grid * vq.config.pixels_per_cell
    if vq.config.codes != codes:
        expected = f"{codes}: the VQ tokenizer that belongs to the transformer"
        raise CheckpointError(field="vq", found=f"{vq.config.codes} codes", expected=expected)
    graphs = [target_graph(decoder, code_embeddings)]
    drafter = None
    if drafting is not None:
        sources = [*sources, *drafting.sources]
        graphs.append(drafter_graph(drafting.drafter))
        drafter = DrafterSpec(**decoder_fields(drafting.drafter.config), **drafting.spec_fields)
    return Model(
        graphs=[*graphs, condition.graph, *vq_graphs(vq, own.grid, bool(sizes))],
        code_embeddings=code_embeddings,
        codebook=vq.codebook.numpy(),
        sources=sources,
        drafts_for=drafting and drafting.drafts_for,
        files={} if condition.tokenizer is None else {"tokenizer": (TOKENIZER, condition.tokenizer)},
        fields={
            "family": family,
            "grid_rows": own.grid,
            "grid_columns": own.grid,
            "codebook_size": codes,
            "image_height": pixels,
            "image_width": pixels,
            "sizes": tuple(sizes),
            "row_end": row_end,
            "target": DecoderSpec(**decoder_fields(own), max_positions=own.positions),
            "drafter": drafter,
            "condition": condition.spec,
            "sampling": sampling,
            "decoding": _decoding_defaults(drafter is not None, min(MAX_NEIGHBORS, codes - 1)),
        },
    )


def check_grid(grid: int | None) -> None:
    """Raises: RequestError for a number of code rows that makes no sense."""
    if grid is not None and not 1 <= grid <= 256:
        raise RequestError(field="grid", found=format_value(grid), expected="1 to 256 code rows")


def decoder_fields(sizes: DecoderConfig) -> dict[str, Any]:
    """A decoder's sizes for the manifest."""
    names = ("hidden_size", "num_layers", "num_kv_heads", "head_dim", "vocab_size")
    return {name: getattr(sizes, name) for name in names}


def vq_graphs(tokenizer: LlamaGenVQ, grid: int, varying: bool = False) -> list[Graph]:
    """The graphs `vq_decoder` and `vq_encoder` for a grid of codes, or for any grid if they vary.

    The graphs of varying pictures do not depend on their size, so that small ones check them.
    """
    config = tokenizer.config
    side = min(grid, max(2, _CHECKED // config.pixels_per_cell)) if varying else grid
    cells, pixels = side * side, side * config.pixels_per_cell
    generator = np.random.default_rng(0)
    counts = (2, 1) if pixels <= MAX_PAIR_PIXELS else (1,)
    grids = ((side, side), (2 * side, max(1, side // 2))) if varying else ((cells,), (cells,))
    sizes = [(n, *own) for n, own in zip(counts, grids, strict=False)]
    ids = named_cases(*({"codes": generator.integers(config.codes, size=size)} for size in sizes))
    uniform = (generator.uniform(-1, 1, (n, 3, pixels, pixels)) for n in counts)
    pictures = named_cases(*({"images": drawn.astype(np.float32)} for drawn in uniform))
    codes, image = Value("codes", ("images", cells), "int64"), Value("images", ("images", 3, pixels, pixels))
    latents, read = Value("pre_quant", ("images", config.code_width, grid, grid)), codes
    if varying:
        image, read = replace(image, axes=("images", 3, "height", "width")), replace(codes, axes=("images", "cells"))
        latents = replace(latents, axes=("images", config.code_width, "rows", "columns"))
        codes = replace(codes, axes=("images", "rows", "columns"))
    return [
        Graph("vq_decoder", VQDecoder(tokenizer, None if varying else grid), (codes,), (image,), ids),
        Graph("vq_encoder", VQEncoder(tokenizer), (image,), (read, latents), pictures),
    ]


def _decoding_defaults(drafter: bool, neighbours: int) -> DecodingDefaults:
    """The papers' settings, as far as the neighbour table reaches."""
    if not drafter:
        return DecodingDefaults()
    exact, lantern = Eagle(tree="dynamic-59"), Lantern(tree="dynamic-59", neighbors=min(1000, neighbours), delta=0.2)
    plus = LanternPlusPlus(tree="balanced-25", neighbors=min(10, neighbours), lambda_=2.0)
    return DecodingDefaults(methods=(exact, lantern, plus))
