"""Autoregressive part of GLM-Image, which generates codes for the diffusion decoder of diffusers' `GlmImagePipeline`.

The target is a folder of diffusers with `vision_language_encoder` and `processor`. A prompt has these tokens: the
text, the numbers of rows and columns of two grids as text, and image start. The target first generates a small grid of
about 256 codes. The grid of the image follows directly, with a code for each 32 x 32 pixels. Codes come before text
tokens in the vocabulary. The published program samples from 128 more ids after the codes, although only the id of image
end has a meaning. Here the target samples codes only. There is no guidance.

A prompt with a source image begins with image start, the codes of the source image, and image end. The target then
generates only the grid of the image. The source image is halved in size, and its encoder computes a code for each
16 x 16 pixels.

Rotary embeddings rotate only the first numbers of each head, in pairs (see `make_rotary_permutation`), by time, row and
column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ...bundle.conditions import TokenLayout
from ...bundle.manifest import Size, SourceImageSpec
from ...inputs import format_value
from ...methods import Sampling
from ..checkpoints.deferred import compute_deferred_tensor, defer_tensor
from ..checkpoints.files import Config, make_file_error, read_tokenizer
from ..checkpoints.folders import Checkpoint
from ..family import ModelFamily
from ..graph.conditions import make_token_condition
from ..model import BundleContents
from ..models.decoder import DecoderConfig
from ..models.llama import load_llama_decoder, make_decoder_config, read_rope_settings, rename_llama_weights
from ..models.source_encoder import SourceImageEncoder, load_source_image_encoder
from .common import build_image_model, encode_text, list_grid_shapes, make_size

MAX_PROMPT = 2048  # maximum number of prompt tokens; the codes of a source image of 1024 pixels take 1024 of them
PIXELS = 32  # height and width of a cell in pixels
_PARTS = ("vision_language_encoder", "processor")
_PREFIX = "model.language_model."
_CODEBOOK = "model.vqmodel.quantize.embedding.weight"
_ENCODER = ("model.visual.", "model.vqmodel.")  # weights of the image encoder
_PATCH_WEIGHT = "model.visual.patch_embed.proj.weight"
_UNUSED = "model.vqmodel.post_quant_conv."
# Files with the settings of the processor. transformers reads the section `image_processor` of the first file. If there
# is no such section, it reads the second file, and for missing settings these defaults.
_PREPROCESSING = ("processor_config.json", "preprocessor_config.json")
_COLOURS = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
# Settings of the processor with other values would give other codes.
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255, "resample": 3}
_FIXED |= {"merge_size": 1, "temporal_patch_size": 1}
_GRID = 32  # number of grid rows of an image of 1024 pixels
_DEFAULT_GRIDS = ((36, 24), (24, 36))  # 768 x 1152 pixels, the published default, and 1152 x 768
_FIRST_SIDE = 16  # rows of the small grid of a square
_TRANSFORMERS_TOP_K = 50  # the default of transformers, for a generation_config.json without top_k


def read_glm_image(target: Checkpoint, *, grid: int | None = None) -> BundleContents:
    """Read the autoregressive part of GLM-Image.

    `grid` is the number of grid rows of the square image size, 32 by default. Other sizes have about as many codes.
    """
    if not all((target.path / part).is_dir() for part in _PARTS):
        raise target.make_error(found="other contents", expected=f"a folder with {' and '.join(_PARTS)}")
    checkpoint, processor = (target.open_subfolder(subfolder) for subfolder in _PARTS)
    config = checkpoint.read_model_config("zai-org/GLM-Image", "glm_image")
    generation = checkpoint.read_config_file("generation_config.json")
    text = config.get_section("text_config").with_defaults({"rms_norm_eps": 1e-5})  # the default of transformers' class
    path = processor.find_tokenizer_path()
    checkpoint.read_weights(name_filter=lambda name: not name.startswith(_UNUSED))
    codes = checkpoint.get_shape(_CODEBOOK)[0]
    encoder = _read_image_encoder(checkpoint, config, processor)
    codebook = checkpoint.weights.pop(_CODEBOOK).float()
    checkpoint.weights = {n: weight for n, weight in checkpoint.weights.items() if not n.startswith(_ENCODER)}
    _split_gate_up_weights(checkpoint)
    names = {"embed.weight": f"{_PREFIX}embed_tokens.weight", "head.weight": "lm_head.weight"}
    rename_llama_weights(checkpoint, _PREFIX, names)
    if (rows := checkpoint.get_shape("head.weight")[0]) < codes:
        raise checkpoint.make_error(
            "head.weight", found=f"{rows} rows", expected=f"at least {codes} rows, one for each code"
        )
    tokenizer = read_tokenizer(path, checkpoint.get_shape("embed.weight")[0])
    image_start_id = _read_token_id(config, "image_start_token_id", tokenizer)
    square_rows = grid or _GRID
    pairs = list_image_grids(square_rows)
    # The weights tell whether there are biases.
    values = {name: value for name, value in text.values.items() if name != "attention_bias"}
    longest = max(math.prod(compute_first_grid_shape(*pair)) + math.prod(pair) for pair in pairs)
    sizes = make_decoder_config(checkpoint, replace(text, values=values), codes, square_rows, max_image_tokens=longest)
    sections, rotary_dim = _read_rotary_sections(text, sizes.head_dim)
    grids = tuple((*compute_first_grid_shape(*pair), *pair) for pair in pairs)
    prefix = min(sizes.prefix, MAX_PROMPT)
    sizes = replace(sizes, prefix=prefix, rotary="grids", grids=grids, rope_sections=sections)
    _reorder_query_key_rows(checkpoint, sizes, rotary_dim)
    decoder, embeddings = load_llama_decoder(checkpoint, sizes, range(codes))
    layout, image_sizes = _make_prompt_layout(path, tokenizer, pairs, image_start_id, sizes)
    top_k = generation.get_integer("top_k", low=0)  # 0: all tokens
    top_k = _TRANSFORMERS_TOP_K if top_k is None else top_k
    model = build_image_model(
        decoder=decoder,
        code_embeddings=embeddings[:codes],
        condition=make_token_condition(embeddings, sizes.prefix, layout, path)._replace(sources=processor.sources),
        vq=None,
        codebook=codebook,
        pixels_per_cell=PIXELS,
        sampling=Sampling(
            temperature=generation.get_number("temperature", 1.0),
            top_k=top_k if top_k < codes else 0,
            top_p=min(1.0, generation.get_number("top_p", 1.0)),
        ),
        sizes=image_sizes,
    )
    if encoder is None:
        return model
    end = _read_token_id(config, "image_end_token_id", tokenizer)
    source = SourceImageSpec(before=(image_start_id,), after=(end,), pixels_per_cell=encoder.patch_size)
    return replace(
        model, graphs=[*model.graphs, encoder.make_graph()], manifest_fields={**model.manifest_fields, "source": source}
    )


FAMILY = ModelFamily(
    read_glm_image,
    download_patterns=("processor/tokenizer.json", "vision_language_encoder/*"),
    optional_files=tuple(f"processor/{name}" for name in _PREPROCESSING),
    model_types=("glm_image",),
)


def list_image_grids(square_rows: int) -> list[tuple[int, int]]:
    """Return rows and columns of all image sizes: a square, and shapes of about the same area."""
    pairs = list_grid_shapes((square_rows * PIXELS) ** 2, PIXELS)
    return [*pairs, *_DEFAULT_GRIDS] if square_rows == _GRID else pairs


def compute_first_grid_shape(rows: int, columns: int) -> tuple[int, int]:
    """Return rows and columns of the small grid of an image, by the published processor's formula."""
    ratio = rows / columns
    return int(math.sqrt(ratio) * _FIRST_SIDE), int(math.sqrt(1 / ratio) * _FIRST_SIDE)


def make_rotary_permutation(head_dim: int, rotary_dim: int) -> Tensor:
    """Return a permutation of the numbers of a head, `[head_dim]`, that converts between two layouts of rotated pairs.

    The published model rotates pairs (i, i + rotary_dim / 2) and this decoder pairs (i, i + head_dim / 2). Queries and
    keys may be permuted, because a permutation does not change their products.
    """
    pairs = torch.arange(rotary_dim).view(2, -1)
    others = torch.arange(rotary_dim, head_dim).view(2, -1)
    return torch.cat([pairs, others], 1).flatten()


def _read_token_id(config: Config, field: str, tokenizer: Tokenizer) -> int:
    token = config.get_integer(field)
    if token is None or tokenizer.id_to_token(token) is None:
        raise config.make_error(field, expected="a token of the tokenizer")
    return token


def _read_image_encoder(checkpoint: Checkpoint, config: Config, processor: Checkpoint) -> SourceImageEncoder | None:
    """Load the encoder of source images; return None if the checkpoint was saved without it."""
    if not any(name.startswith(_ENCODER[0]) for name in checkpoint.weights):
        return None
    prefix = "model."
    weights = {n.removeprefix(prefix): weight for n, weight in checkpoint.weights.items() if n.startswith(_ENCODER)}
    part = replace(checkpoint, weights=weights, prefix=prefix, stored_names={})
    patch_size = checkpoint.get_shape(_PATCH_WEIGHT, 4)[2]
    colours = _read_colours(processor, patch_size)
    return load_source_image_encoder(part, config.get_section("vision_config"), *colours)


def _read_colours(processor: Checkpoint, patch_size: int) -> list[list[float]]:
    """Return the means and the standard deviations of red, green and blue with which images are normalised."""
    files = [processor.read_config_file(name) for name in _PREPROCESSING if (processor.path / name).is_file()]
    sections = [file.get_section("image_processor") for file in files if file.get("image_processor")]
    settings = [*sections, *reversed(files), Config(processor.path, {})][0]
    for name, value in {**_FIXED, "patch_size": patch_size}.items():
        settings.check_value(name, value, None, remedy="other preprocessing of source images is not supported")
    colours = []
    for name, default in _COLOURS.items():
        numbers = settings.get(name, default)
        low = 0 if name == "image_std" else -math.inf
        is_valid = isinstance(numbers, list) and all(type(n) in (int, float) and low < n < math.inf for n in numbers)
        if not is_valid or len(numbers) != 3:
            raise settings.make_error(name, expected=f"three {'numbers' if low else 'positive numbers'}")
        colours.append([float(number) for number in numbers])
    return colours


def _split_gate_up_weights(checkpoint: Checkpoint) -> None:
    for i in range(checkpoint.count_layers(f"{_PREFIX}layers.")):
        at = f"{_PREFIX}layers.{i}.mlp"
        joint = checkpoint.weights.pop(f"{at}.gate_up_proj.weight", None)
        if joint is not None:  # a later check reports a missing weight
            checkpoint.weights |= dict(
                zip((f"{at}.gate_proj.weight", f"{at}.up_proj.weight"), joint.chunk(2), strict=True)
            )


def _read_rotary_sections(text_config: Config, head_dim: int) -> tuple[tuple[int, int, int], int]:
    """Return the numbers of pairs that are rotated by time, row and column, and of rotated numbers in a head."""
    rope = read_rope_settings(text_config)
    rotary_dim = int(head_dim * rope.get_number("partial_rotary_factor", 1.0))
    sections = rope.get("mrope_section", [8, 12, 12])
    valid = isinstance(sections, list) and len(sections) == 3 and all(type(n) is int and n >= 0 for n in sections)
    if not valid or 2 * sum(sections) != rotary_dim or (head_dim - rotary_dim) % 2:
        expected = f"three numbers of pairs, together {rotary_dim // 2} of heads of {head_dim} numbers"
        raise rope.make_error("mrope_section", found=format_value(sections), expected=expected)
    return (sections[0], sections[1], sections[2]), rotary_dim


def _reorder_query_key_rows(checkpoint: Checkpoint, config: DecoderConfig, rotary_dim: int) -> None:
    """Permute the rows of query and key weights in the checkpoint by `make_rotary_permutation`."""
    heads = config.num_heads + config.num_kv_heads
    numbers = torch.arange((heads + config.num_kv_heads) * config.head_dim).view(-1, config.head_dim)
    # Values are not rotated, so the rows of the last heads keep their places.
    numbers[:heads] = numbers[:heads, make_rotary_permutation(config.head_dim, rotary_dim)]
    order = numbers.flatten()
    for name, weight in checkpoint.weights.items():
        if ".attention.qkv." in name:
            checkpoint.weights[name] = _permute_rows(weight, order)


def _permute_rows(weight: Tensor, permutation: Tensor) -> Tensor:
    return defer_tensor(lambda: compute_deferred_tensor(weight)[permutation], weight.shape, weight.dtype)


def _make_prompt_layout(
    path: Path, tokenizer: Tokenizer, grid_shapes: Sequence[tuple[int, int]], image_start_id: int, config: DecoderConfig
) -> tuple[TokenLayout, list[Size]]:
    """Return the layout of prompts, and the image sizes with the tokens that end their prompts."""
    sizes: list[Size] = []
    for number, (rows, columns) in enumerate(grid_shapes):
        small = compute_first_grid_shape(rows, columns)
        grids = (f"<sop>{rows} {columns}<eop>", f"<sop>{small[0]} {small[1]}<eop>")
        (first, *tokens), second = (encode_text(tokenizer, text) for text in grids)
        if first != tokenizer.token_to_id("<sop>"):
            raise make_file_error(path, problem="lacks <sop>", remedy="give the model's own tokenizer")
        sizes.append(
            make_size(
                rows,
                columns,
                PIXELS,
                tokens=(*tokens, *second, image_start_id),
                source_tokens=(*tokens, image_start_id),
                first_grid=small,
                first_position=number * config.max_sequence_length + config.prefix,
            )
        )
    return TokenLayout(after=(first,), uncond=(first,)), sizes
