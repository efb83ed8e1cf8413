"""Emu3-Gen: as published (the model in one folder, its image tokenizer in another), or as transformers converts it.

One vocabulary of text and visual tokens; code c is the visual token c. A prompt is start of sequence, the text, begin
of image, `{rows}*{columns}` as text, image token. The unconditional row is the same with a negative text. A row of
codes ends with a token of its own. Transformers' configurations leave out what its classes have as defaults.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from ...bundle.manifest import Size, TokenLayout
from ...engines.contracts import Progress
from ...errors import CheckpointError
from ...inputs import format_value, require_library
from ...methods import Sampling
from ..checkpoints.deferred import joined, without_weights
from ..checkpoints.files import Config, file_error, raises_checkpoint_error, read_text, read_tokenizer
from ..checkpoints.folders import Checkpoint
from ..checkpoints.lora import Adapter
from ..graph.conditions import token_condition
from ..model import Model
from ..models.decoder import Decoder
from ..models.emu3_vq import load_emu3_vq
from ..models.llama import decoder_config, rename_llama
from ..models.vq_checkpoints import CODEBOOK
from ..progress import silent
from .common import check_grid, image_model

# What follows the caption and what the unconditional row says in Emu3's own program, and its settings.
SUFFIX = " masterpiece, film grained, best quality."
NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)
_SAMPLING = Sampling(cfg_scale=3.0, top_k=2048)
_AREA = 518400  # pixels of a picture
_RATIOS = ((1, 1), (4, 3), (3, 4), (3, 2), (2, 3), (16, 9), (9, 16), (2, 1), (1, 2), (21, 9))  # width : height

# Tokens by name, and the field of the published configuration with their ids.
START, BEGIN, IMAGE, ROW_END = "<|extra_203|>", "<|image start|>", "<|image token|>", "<|extra_200|>"
_FIELDS = {START: "bos_token_id", BEGIN: "boi_token_id", IMAGE: "img_token_id", ROW_END: "eol_token_id"}
_VISUAL = "<|visual token {:06}|>"
_RANKS, _VISION = "emu3.tiktoken", "emu3_vision_tokens.txt"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_DEFAULTS = {  # of transformers' class
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 9216,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_MODEL_TYPES = ("emu3", "Emu3")  # of transformers, as published
_EMBED, _HEAD = "embed_tokens.weight", "lm_head.weight"
_PREFIXES, _HEADS = ("model.text_model.", "text_model.model.", "model."), ("text_model.", "")
_VQ_PREFIXES = ("model.vqmodel.", "vqmodel.")


@raises_checkpoint_error
def read_emu3(
    target: Path,
    vq: Path | None = None,
    *,
    grid: int | None = None,
    lora: Sequence[Adapter] = (),
    progress: Progress = silent,
) -> Model:
    """The model in a folder of transformers, or in the published ones.

    Args:
        target: a folder of Emu3-Gen with config.json, tokenizer and weights.
        vq: the folder of Emu3-VisionTokenizer, where target does not hold it.
        grid: rows of codes of a square picture; other sizes have about as many pixels. By default those of the
            published size.
        lora: merged into the decoder.

    Raises: CheckpointError, RequestError.
    """
    check_grid(grid)
    checkpoint = Checkpoint(target, progress=progress, adapters=lora)
    config = checkpoint.model_config("BAAI/Emu3-Gen-hf", *_MODEL_TYPES)
    own_vq = config.get("model_type") == _MODEL_TYPES[0]
    if own_vq and vq is not None:
        raise CheckpointError(field="vq", found=str(vq), expected="none: the target holds its own image tokenizer")
    if not own_vq and vq is None:
        raise CheckpointError(field="vq", found="nothing", expected="the folder of Emu3-VisionTokenizer")
    text = config.section("text_config") if "text_config" in config.values else config
    text = replace(text, values=_DEFAULTS | dict(text.values))
    tokenizer, content = _find_tokenizer(checkpoint)
    checkpoint.read()
    if vq is None:
        images = checkpoint.extract(_prefix(checkpoint, _VQ_PREFIXES, CODEBOOK))
    else:
        images = Checkpoint(vq, "vq", progress)
        images.read()
    image = load_emu3_vq(images)
    scale = image.config.pixels_per_cell
    sizes = grid_sizes(_AREA if grid is None else (grid * scale) ** 2, scale)
    prefix, head = _prefix(checkpoint, _PREFIXES, _EMBED), _prefix(checkpoint, _HEADS, _HEAD)
    names = {"embed.weight": prefix + _EMBED, "head.weight": head + _HEAD}
    rename_llama(checkpoint, prefix, names)
    library = read_tokenizer(tokenizer, min(checkpoint.shape(name)[0] for name in names), _token_ids(config), content)
    codes = _visual_tokens(tokenizer, library)
    longest = max(rows * (columns + 1) - 1 for rows, columns in sizes)
    with without_weights():
        decoder = Decoder(decoder_config(checkpoint, text, len(codes), sizes[0][0], max_image_tokens=longest))
    embeddings = checkpoint.weights.pop("embed.weight")
    (row_end,) = _encode(library, ROW_END)
    checkpoint.weights["head.weight"] = checkpoint.weights["head.weight"][codes.start : codes.stop]
    checkpoint.load_strict(decoder)
    layout, prefix_rows = prompt_layout(library), decoder.config.prefix
    return image_model(
        family="emu3",
        decoder=decoder,
        code_embeddings=joined([embeddings[codes.start : codes.stop], embeddings[row_end : row_end + 1]]),
        condition=token_condition(embeddings, prefix_rows, layout, tokenizer, content=content),
        vq=image,
        sampling=_SAMPLING,
        sources=[*checkpoint.sources, *images.sources],
        sizes=[image_size(library, rows, columns, scale) for rows, columns in sizes],
        row_end=len(codes),
    )


def grid_sizes(area: int, scale: int) -> list[tuple[int, int]]:
    """Rows and columns of codes of `scale` pixels, for pictures of about `area` pixels: a square, then other shapes."""
    sides = ((math.sqrt(area / (wide * high)), wide, high) for wide, high in _RATIOS)
    pairs = ((round(high * side / scale), round(wide * side / scale)) for side, wide, high in sides)
    return list(dict.fromkeys((max(rows, 1), max(columns, 1)) for rows, columns in pairs))


def prompt_layout(library: Tokenizer, negative: str = NEGATIVE) -> TokenLayout:
    """How a caption becomes both rows, up to begin of image; the tokens of a picture's size follow."""
    start, end, uncond = (_encode(library, text) for text in (START, BEGIN, START + negative + BEGIN))
    return TokenLayout(template="{prompt}" + SUFFIX, before=start, after=end, uncond=uncond, negative="{prompt}")


def image_size(library: Tokenizer, rows: int, columns: int, scale: int) -> Size:
    """The size of a picture, with the tokens that announce it, which both rows end with."""
    tokens = _encode(library, f"{rows}*{columns}{IMAGE}")
    return Size(name=f"{columns * scale}x{rows * scale}", rows=rows, columns=columns, tokens=tokens)


def _encode(library: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(library.encode(text, add_special_tokens=False).ids)


def _prefix(checkpoint: Checkpoint, prefixes: Sequence[str], name: str) -> str:
    """The prefix that a weight has here; the last one if it is missing, which is refused later."""
    return next((prefix for prefix in prefixes if prefix + name in checkpoint.weights), prefixes[-1])


def _find_tokenizer(checkpoint: Checkpoint) -> tuple[Path, bytes | None]:
    """The file with the tokenizer, and its content as a `tokenizer.json` if it is none. Raises: CheckpointError."""
    if not (checkpoint.path / _RANKS).is_file():
        return checkpoint.tokenizer(), None
    path = checkpoint.file(_RANKS, "tokenizer")
    vision = read_text(checkpoint.file(_VISION, "tokenizer")).splitlines()
    return path, convert_tiktoken(path, _PATTERN, (*_SPECIAL, *vision))


def _token_ids(config: Config) -> dict[str, int]:
    """The ids by name that a configuration tells, in either layout. Raises: CheckpointError."""
    names = config.get("vocabulary_map", {})
    if not isinstance(names, Mapping):
        raise config.error("vocabulary_map", expected="ids by the names of tokens")
    ids = {name: names.get(name, config.get(field)) for name, field in _FIELDS.items()}
    return {name: one for name, one in ids.items() if one is not None}


def _visual_tokens(path: Path, library: Tokenizer) -> range:
    tokens = library.get_vocab(with_added_tokens=True)
    first, count = tokens.get(_VISUAL.format(0)), sum(name.startswith("<|visual token ") for name in tokens)
    if missing := [name for name in _FIELDS if name not in tokens]:
        raise file_error(path, problem=f"lacks {', '.join(missing)}", remedy="give the model's own tokenizer")
    if first is None or any(tokens.get(_VISUAL.format(code)) != first + code for code in range(count)):
        raise file_error(path, found=f"{count} visual tokens", expected="those of codes 0, 1, ... in a row")
    return range(first, first + count)


@raises_checkpoint_error
def convert_tiktoken(path: Path, pattern: str, special: Sequence[str]) -> bytes:
    """The content of a `tokenizer.json` for a file of tiktoken: lines of a token in base 64 and its rank.

    Args:
        path: the file of ranks.
        pattern: what parts a text, after it is composed (Unicode NFC).
        special: tokens that have the ids behind the ranks.

    Raises:
        CheckpointError: the file holds no ranks 0, 1, ... of tokens that contain all bytes.
        EngineError: transformers is not installed.
    """
    require_library("transformers", str(path), "export")
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converter: Any = TikTokenConverter(path, pattern, extra_special_tokens=special)  # type: ignore[no-untyped-call]
    converter.load_tiktoken_bpe = _read_ranks  # the library's own reader needs the package tiktoken
    tokenizer = converter.converted()
    tokenizer.normalizer = normalizers.NFC()
    return str(tokenizer.to_str()).encode()


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for line in read_text(path).splitlines():
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise file_error(path, found=format_value(line), expected="a token in base 64 and its rank") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise file_error(path, problem="expected the ranks 0, 1, ..., each once, and all bytes among the tokens")
    return ranks
