"""Conversion of a family's PyTorch modules to a bundle's graphs and manifest fields; see docs/adding-a-family.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor

from ...bundle.manifest import DecodingDefaults, Preset, Size
from ...bundle.order import GroupOrderSpec
from ...engines.contracts import TensorSpec
from ...engines.function_tensors import declare_image_tensors
from ...errors import CheckpointError, RequestError
from ...inputs import format_value
from ...methods import Eagle, GroupDecoding, Lantern, LanternPlusPlus, Sampling
from ..checkpoints.deferred import list_concatenated_tensors
from ..checkpoints.files import TOKENIZER
from ..graph.conditions import PromptCondition
from ..graph.graphs import Graph, make_prefix_graph, make_target_graph, name_test_cases
from ..model import BundleContents
from ..models.decoder import Decoder
from ..models.eagle import LoadedDrafter, make_drafter_graph
from ..models.llamagen_vq import LlamaGenVQ, VQDecoder, VQEncoder
from ..neighbours import MAX_NEIGHBORS

_RATIOS = ((1, 1), (4, 3), (3, 4), (3, 2), (2, 3), (16, 9), (9, 16), (2, 1), (1, 2), (21, 9))  # width : height
MAX_PAIR_PIXELS = 256  # maximum image height in test cases with two images; larger pairs take too much memory
_TEST_PIXELS = 128  # image height in test cases of graphs for any size; 720 pixels would take several gigabytes


def build_image_model(
    *,
    decoder: Decoder,
    prefix_decoder: Decoder | None = None,
    code_embeddings: Tensor,
    condition: PromptCondition,
    vq: LlamaGenVQ | None,
    sampling: Sampling,
    drafter: LoadedDrafter | None = None,
    sizes: Sequence[Size] = (),
    default_grid: tuple[int, int] | None = None,
    row_end: int | None = None,
    order: GroupOrderSpec | None = None,
    codebook: Tensor | None = None,
    pixels_per_cell: int = 0,
) -> BundleContents:
    """Return the contents of a bundle.

    Args:
        prefix_decoder: decoder for passes over prefixes (`load_prefix_decoder`); None: `decoder`.
        code_embeddings: the target's input embeddings of all image tokens, `[tokens, hidden_size]`. The first rows
            belong to the codes. Further rows belong to other tokens, the last of which is the end-of-row token, or to
            the learned vectors of `order`.
        vq: image tokenizer; None: the bundle generates codes for another program, and needs `codebook` and
            `pixels_per_cell`.
        sizes: image sizes of the manifest; empty: only the default size.
        default_grid: rows and columns of the default image; None: the square grid of the decoder's configuration.
        row_end: index in `code_embeddings` of the end-of-row token, which follows every grid row except the last; None:
            rows end without a token.
        order: groups of cells that are generated in one forward pass; None: one cell at a time.
        codebook: codebook vectors `[codes, width]`.
        pixels_per_cell: height and width of a cell in pixels.

    Raises:
        CheckpointError: the image tokenizer has another number of codes than the target.
    """
    config = decoder.config
    num_codes = config.vocab_size
    sources = [*decoder.checkpoint.sources]
    if vq is not None:
        pixels_per_cell = vq.config.pixels_per_cell
        codebook = vq.codebook
        sources += vq.checkpoint.sources
        if vq.config.num_codes != num_codes:
            expected = f"{num_codes}: the VQ tokenizer that belongs to the transformer"
            raise CheckpointError(field="vq", found=f"{vq.config.num_codes} codes", expected=expected)
    assert codebook is not None
    rows, columns = default_grid or (config.grid, config.grid)
    embeddings_of_codes = list_concatenated_tensors(code_embeddings)[0]
    graphs = [make_target_graph(decoder, embeddings_of_codes)]
    if prefix_decoder is not None:
        graphs.append(make_prefix_graph(prefix_decoder, embeddings_of_codes))
    sources += condition.sources
    drafter_spec = None
    if drafter is not None:
        sources += drafter.drafter.checkpoint.sources
        graphs.append(make_drafter_graph(drafter.drafter))
        drafter_spec = drafter.drafter.config.make_drafter_spec(**drafter.spec_fields)
    return BundleContents(
        graphs=[
            *graphs,
            condition.graph,
            *(make_vq_graphs(vq, config.grid, accepts_any_size=len(sizes) > 1) if vq else []),
        ],
        code_embeddings=code_embeddings,
        codebook=codebook.numpy(),
        sources=[*dict.fromkeys(sources)],
        target_sha256=drafter and drafter.target_sha256,
        extra_files={} if condition.tokenizer_json is None else {"tokenizer": (TOKENIZER, condition.tokenizer_json)},
        manifest_fields={
            "grid_rows": rows,
            "grid_columns": columns,
            "codebook_size": num_codes,
            "image_height": rows * pixels_per_cell,
            "image_width": columns * pixels_per_cell,
            "sizes": tuple(sizes),
            "row_end": row_end,
            "order": order,
            **({} if order is None else {"presets": {"strict": Preset(method=GroupDecoding())}}),
            "target": config.make_target_spec(),
            "drafter": drafter_spec,
            "condition": condition.spec,
            "sampling": sampling,
            "decoding": _make_default_decoding(drafter is not None, min(MAX_NEIGHBORS, num_codes - 1)),
        },
    )


def make_size(rows: int, columns: int, pixels_per_cell: int, **fields: Any) -> Size:
    name = f"{columns * pixels_per_cell}x{rows * pixels_per_cell}"
    return Size(name=name, rows=rows, columns=columns, **fields)


def encode_text(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def list_grid_shapes(image_pixels: int, pixels_per_cell: int) -> list[tuple[int, int]]:
    """Return rows and columns of grids with different aspect ratios and about the same area, the square first."""
    sides = ((math.sqrt(image_pixels / (wide * high)), wide, high) for wide, high in _RATIOS)
    pairs = ((round(high * side / pixels_per_cell), round(wide * side / pixels_per_cell)) for side, wide, high in sides)
    return list(dict.fromkeys((max(rows, 1), max(columns, 1)) for rows, columns in pairs))


def check_grid_rows(grid: int | None) -> None:
    """Raise RequestError unless `grid` is None or a number of grid rows in 1 .. 256."""
    if grid is not None and not 1 <= grid <= 256:
        raise RequestError(field="grid", found=format_value(grid), expected="1 to 256 grid rows")


def make_vq_graphs(image_tokenizer: LlamaGenVQ, grid: int, accepts_any_size: bool = False) -> list[Graph]:
    """Return the graphs `vq_decoder` and `vq_encoder` of an image tokenizer, for square grids or for any size."""
    config = image_tokenizer.config
    side = min(grid, max(2, _TEST_PIXELS // config.pixels_per_cell)) if accepts_any_size else grid
    pixels = side * config.pixels_per_cell
    batches = (2, 1) if pixels <= MAX_PAIR_PIXELS else (1,)
    grids = ((side, side), (2 * side, max(1, side // 2))) if accepts_any_size else ((side * side,), (side * side,))
    generator = np.random.default_rng(0)
    shapes = [(images, *axes) for images, axes in zip(batches, grids, strict=False)]
    decoder_cases = name_test_cases(*({"codes": generator.integers(config.num_codes, size=shape)} for shape in shapes))
    uniform = (generator.uniform(-1, 1, (images, 3, pixels, pixels)) for images in batches)
    encoder_cases = name_test_cases(*({"images": images.astype(np.float32)} for images in uniform))
    grid_axes = ("rows", "columns") if accepts_any_size else (grid, grid)
    codes, image, encoded = declare_image_tensors(None if accepts_any_size else grid * grid, pixels, pixels)
    latents = TensorSpec("pre_quant", ("float32",), ("images", config.code_width, *grid_axes))
    decoder = VQDecoder(image_tokenizer, None if accepts_any_size else grid)
    return [
        Graph("vq_decoder", decoder, (codes,), (image,), decoder_cases),
        Graph("vq_encoder", VQEncoder(image_tokenizer), (image,), (encoded, latents), encoder_cases),
    ]


def _make_default_decoding(has_drafter: bool, max_neighbors: int) -> DecodingDefaults:
    """Return the methods of drafters with the settings of the papers; none without a drafter."""
    if not has_drafter:
        return DecodingDefaults()
    exact = Eagle(tree="dynamic-59")
    lantern = Lantern(tree="dynamic-59", neighbors=min(1000, max_neighbors), delta=0.2)
    plus = LanternPlusPlus(tree="balanced-25", neighbors=min(10, max_neighbors), lambda_=2.0)
    return DecodingDefaults(methods=(exact, lantern, plus))
