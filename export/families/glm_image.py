"""The autoregressive part of GLM-Image: codes for the diffusion decoder of diffusers' `GlmImagePipeline`.

The target is a folder of diffusers with `vision_language_encoder` and `processor`. A prompt is the text, rows and
columns of two grids as text, and image start. The target then generates a small grid of about 256 codes, and at once
the grid of the image, with a code for each 32 x 32 pixels. Codes come first in the vocabulary, before text. The
published program samples from 128 more ids behind the codes, of which only image end means something; here the target
samples codes only. There is no guidance.

A prompt with a source image begins with image start, the codes of that image, and image end. The target then generates
the grid of the image only. The image encoder makes the codes of the source at half its size: a code for 16 x 16 pixels.

The first numbers of each head are rotated, in pairs a half apart (`rotated_order`), by time, row and column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ...bundle.conditions import TokenLayout
from ...bundle.manifest import Size, SourceSpec
from ...inputs import format_value
from ...methods import Sampling
from ..checkpoints.deferred import compute_tensor, defer_tensor
from ..checkpoints.files import Config, file_error, read_tokenizer
from ..checkpoints.folders import Checkpoint
from ..family import Family
from ..graph.conditions import token_condition
from ..model import Model
from ..models.decoder import DecoderConfig
from ..models.llama import decoder_config, load_decoder, rename_llama
from ..models.source_encoder import SourceEncoder, load_source_encoder
from .common import grid_sizes, image_model

MAX_PROMPT = 2048  # tokens, of which the codes of a source image of 1024 pixels are 1024
PIXELS = 32  # pixels along each side of a cell
_PARTS = ("vision_language_encoder", "processor")
_PREFIX = "model.language_model."
_CODEBOOK = "model.vqmodel.quantize.embedding.weight"
_ENCODER = ("model.visual.", "model.vqmodel.")  # weights of the image encoder
_UNUSED = "model.vqmodel.post_quant_conv."
# names of the processor's configuration, and its colours where a checkpoint has none of these files
_PREPROCESSING = ("processor_config.json", "preprocessor_config.json")
_COLOURS = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_GRID = 32  # grid rows of 1024 pixels
_DEFAULT_GRIDS = ((36, 24), (24, 36))  # 768 x 1152 pixels, the published default, and 1152 x 768
_FIRST_SIDE = 16  # rows of the small grid of a square
_TRANSFORMERS_TOP_K = 50  # top-k of transformers where generation_config.json has none


def read_glm_image(target: Checkpoint, *, grid: int | None = None) -> Model:
    """Read the autoregressive part of GLM-Image.

    Args:
        target: folder with `vision_language_encoder` and `processor`.
        grid: grid rows of the square image size, 32 by default, for 1024 pixels. Other sizes have about as many codes.

    Raises:
        CheckpointError: a file is missing or damaged, or belongs to another model.
    """
    if not all((target.path / part).is_dir() for part in _PARTS):
        raise target.error(found="other contents", expected=f"a folder with {' and '.join(_PARTS)}")
    checkpoint, processor = (target.part(part) for part in _PARTS)
    config = checkpoint.model_config("zai-org/GLM-Image", "glm_image")
    generation = checkpoint.config("generation_config.json")
    text = config.section("text_config")
    path = processor.tokenizer()
    checkpoint.read(keep=lambda name: not name.startswith(_UNUSED))
    codes = checkpoint.shape(_CODEBOOK)[0]
    encoder = _read_encoder(checkpoint, config, processor)
    codebook = checkpoint.weights.pop(_CODEBOOK).float()
    checkpoint.weights = {n: weight for n, weight in checkpoint.weights.items() if not n.startswith(_ENCODER)}
    _split_gates(checkpoint)
    names = {"embed.weight": f"{_PREFIX}embed_tokens.weight", "head.weight": "lm_head.weight"}
    rename_llama(checkpoint, _PREFIX, names)
    if (rows := checkpoint.shape("head.weight")[0]) < codes:
        raise checkpoint.error("head.weight", found=f"{rows} rows", expected=f"more than {codes}, the codes")
    tokenizer = read_tokenizer(path, checkpoint.shape("embed.weight")[0])
    image_start = _read_token_id(config, "image_start_token_id", tokenizer)
    square = grid or _GRID
    pairs = image_grids(square)
    # The weights tell whether there are biases.
    values = {name: value for name, value in text.values.items() if name != "attention_bias"}
    longest = max(math.prod(first_grid(*pair)) + math.prod(pair) for pair in pairs)
    sizes = decoder_config(checkpoint, replace(text, values=values), codes, square, max_image_tokens=longest)
    sections, rotated = _rotated_pairs(text, sizes.head_dim)
    grids = tuple((*first_grid(*pair), *pair) for pair in pairs)
    prefix = min(sizes.prefix, MAX_PROMPT)
    sizes = replace(sizes, prefix=prefix, rotary="grids", grids=grids, rope_sections=sections)
    _reorder(checkpoint, sizes, rotated)
    decoder, embeddings = load_decoder(checkpoint, sizes, range(codes))
    layout, image_sizes = _prompt_layout(path, tokenizer, pairs, image_start, sizes)
    top_k = generation.integer("top_k") or _TRANSFORMERS_TOP_K
    model = image_model(
        decoder=decoder,
        code_embeddings=embeddings[:codes],
        condition=token_condition(embeddings, sizes.prefix, layout, path),
        vq=None,
        codebook=codebook,
        pixels_per_cell=PIXELS,
        sampling=Sampling(
            temperature=generation.number("temperature", 1.0),
            top_k=top_k if top_k < codes else 0,
            top_p=generation.number("top_p", 1.0),
        ),
        sources=[*checkpoint.sources, *processor.sources],
        sizes=image_sizes,
    )
    if encoder is None:
        return model
    end = _read_token_id(config, "image_end_token_id", tokenizer)
    source = SourceSpec(before=(image_start,), after=(end,), pixels_per_cell=encoder.patch)
    return replace(model, graphs=[*model.graphs, encoder.make_graph()], fields={**model.fields, "source": source})


FAMILY = Family(
    read_glm_image,
    files=("processor/tokenizer.json", "vision_language_encoder/*"),
    side_files=tuple(f"processor/{name}" for name in _PREPROCESSING),
    model_types=("glm_image",),
)


def image_grids(square: int) -> list[tuple[int, int]]:
    """Return rows and columns of the image sizes: a square, and other shapes with about as many cells."""
    pairs = grid_sizes((square * PIXELS) ** 2, PIXELS)
    return [*pairs, *_DEFAULT_GRIDS] if square == _GRID else pairs


def first_grid(rows: int, columns: int) -> tuple[int, int]:
    """Return rows and columns of the small grid of an image of `rows` x `columns` cells, as the published processor."""
    ratio = rows / columns
    return int(math.sqrt(ratio) * _FIRST_SIDE), int(math.sqrt(1 / ratio) * _FIRST_SIDE)


def rotated_order(head_dim: int, rotated: int) -> Tensor:
    """Return the order of a head's numbers in which pairs are half a head apart, `[head_dim]`.

    The decoder rotates pairs (i, i + head_dim / 2), and the published model pairs (i, i + rotated / 2). Products of
    queries and keys are the same in any order.

    Args:
        head_dim: number of numbers of a head.
        rotated: number of numbers that are rotated, from the first.
    """
    pairs = torch.arange(rotated).view(2, -1)
    others = torch.arange(rotated, head_dim).view(2, -1)
    return torch.cat([pairs, others], 1).flatten()


def _read_token_id(config: Config, field: str, tokenizer: Tokenizer) -> int:
    token = config.integer(field)
    if token is None or tokenizer.id_to_token(token) is None:
        raise config.error(field, expected="a token of the tokenizer")
    return token


def _read_encoder(checkpoint: Checkpoint, config: Config, processor: Checkpoint) -> SourceEncoder | None:
    """Load the image encoder; None if the checkpoint was saved without it."""
    if not any(name.startswith(_ENCODER[0]) for name in checkpoint.weights):
        return None
    prefix = "model."
    weights = {n.removeprefix(prefix): weight for n, weight in checkpoint.weights.items() if n.startswith(_ENCODER)}
    part = replace(checkpoint, weights=weights, prefix=prefix, names={})
    return load_source_encoder(part, config.section("vision_config"), *_read_colours(processor))


def _read_colours(processor: Checkpoint) -> list[list[float]]:
    """Return mean and standard deviation of red, green and blue, by which images are normalised."""
    values: Mapping[str, Any] = _COLOURS
    if name := next((name for name in _PREPROCESSING if (processor.path / name).is_file()), None):
        file = processor.config(name)
        values = file.get("image_processor", file.values)
    colours = []
    for field in _COLOURS:
        numbers = values.get(field)
        if not isinstance(numbers, list) or len(numbers) != 3 or not all(type(n) is float and n > 0 for n in numbers):
            raise processor.error(found=f"{field} {format_value(numbers)}", expected="three positive numbers")
        colours.append(numbers)
    return colours


def _split_gates(checkpoint: Checkpoint) -> None:
    for i in range(checkpoint.count(f"{_PREFIX}layers.")):
        at = f"{_PREFIX}layers.{i}.mlp"
        joint = checkpoint.weights.pop(f"{at}.gate_up_proj.weight", None)
        if joint is not None:  # a later check reports a missing weight
            checkpoint.weights |= dict(
                zip((f"{at}.gate_proj.weight", f"{at}.up_proj.weight"), joint.chunk(2), strict=True)
            )


def _rotated_pairs(text: Config, head_dim: int) -> tuple[tuple[int, int, int], int]:
    """Return how many pairs are rotated by time, row and column, and how many numbers of a head are rotated."""
    rope = text.section("rope_parameters")
    rotated = int(head_dim * rope.number("partial_rotary_factor", 1.0))
    sections = rope.get("mrope_section", [8, 12, 12])
    valid = isinstance(sections, list) and len(sections) == 3 and all(type(n) is int and n >= 0 for n in sections)
    if not valid or 2 * sum(sections) != rotated or (head_dim - rotated) % 2:
        expected = f"three numbers of pairs, together {rotated // 2} of heads of {head_dim} numbers"
        raise rope.error("mrope_section", found=format_value(sections), expected=expected)
    return (sections[0], sections[1], sections[2]), rotated


def _reorder(checkpoint: Checkpoint, config: DecoderConfig, rotated: int) -> None:
    """Sort the rows of queries and keys into `rotated_order`."""
    heads = config.num_heads + config.num_kv_heads
    numbers = torch.arange((heads + config.num_kv_heads) * config.head_dim).view(-1, config.head_dim)
    numbers[:heads] = numbers[:heads, rotated_order(config.head_dim, rotated)]
    order = numbers.flatten()
    for name, weight in checkpoint.weights.items():
        if ".attention.qkv." in name:
            checkpoint.weights[name] = _reorder_rows(weight, order)


def _reorder_rows(weight: Tensor, order: Tensor) -> Tensor:
    return defer_tensor(lambda: compute_tensor(weight)[order], weight.shape, weight.dtype)


def _prompt_layout(
    path: Path, tokenizer: Tokenizer, pairs: Sequence[tuple[int, int]], image_start: int, config: DecoderConfig
) -> tuple[TokenLayout, list[Size]]:
    """Return the layout of prompts, and the image sizes with the tokens that end their prompts."""
    sizes: list[Size] = []
    for number, (rows, columns) in enumerate(pairs):
        small = first_grid(rows, columns)
        grids = (f"<sop>{rows} {columns}<eop>", f"<sop>{small[0]} {small[1]}<eop>")
        (first, *tokens), second = (tokenizer.encode(text, add_special_tokens=False).ids for text in grids)
        if first != tokenizer.token_to_id("<sop>"):
            raise file_error(path, problem="lacks <sop>", remedy="give the model's own tokenizer")
        sizes.append(
            Size(
                name=f"{columns * PIXELS}x{rows * PIXELS}",
                rows=rows,
                columns=columns,
                tokens=(*tokens, *second, image_start),
                source_tokens=(*tokens, image_start),
                first_grid=small,
                first_position=number * config.length + config.prefix,
            )
        )
    return TokenLayout(after=(first,), uncond=(first,)), sizes
