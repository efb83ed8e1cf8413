"""Emu3-Gen, in the published layout (model and image tokenizer in two folders) or in the layout of transformers.

Text and visual tokens share one vocabulary; code c is the visual token c. A prompt is start of sequence, the text,
begin of image, `{rows}*{columns}` as text, image token. The unconditional row has a negative text instead. An
end-of-row token follows every grid row. Configurations of transformers omit fields that equal its defaults.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from ...bundle.conditions import TokenLayout
from ...bundle.manifest import Size
from ...errors import CheckpointError
from ...inputs import format_value, require_library, split_lines
from ...methods import Sampling
from ..checkpoints.deferred import joined
from ..checkpoints.files import Config, file_error, raises_checkpoint_error, read_text, read_tokenizer
from ..checkpoints.folders import Checkpoint
from ..family import Family
from ..graph.conditions import token_condition
from ..model import Model
from ..models.llama import decoder_config, load_decoder, rename_llama
from ..models.movqgan import load_emu3_vq
from ..models.vq_checkpoints import CODEBOOK
from .common import grid_sizes, image_model

# Suffix of every caption, text of the unconditional row, and settings of Emu3's published program.
SUFFIX = " masterpiece, film grained, best quality."
NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)
_SAMPLING = Sampling(cfg_scale=3.0, top_k=2048)
_AREA = 518400  # pixels of an image

START = "<|extra_203|>"
BEGIN = "<|image start|>"
IMAGE = "<|image token|>"
ROW_END = "<|extra_200|>"
# Fields of the published configuration with the ids of these tokens.
_FIELDS = {START: "bos_token_id", BEGIN: "boi_token_id", IMAGE: "img_token_id", ROW_END: "eol_token_id"}
_VISUAL = "<|visual token {:06}|>"
_RANKS = "emu3.tiktoken"
_VISION = "emu3_vision_tokens.txt"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Defaults of the configuration class of transformers.
_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 9216,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_TRANSFORMERS = "emu3"  # `model_type` in the layout of transformers
_PUBLISHED = "Emu3"  # `model_type` in the published layout
_EMBED = "embed_tokens.weight"
_HEAD = "lm_head.weight"
_PREFIXES = ("model.text_model.", "text_model.model.", "model.")
_HEAD_PREFIXES = ("text_model.", "")
_VQ_PREFIXES = ("model.vqmodel.", "vqmodel.")


def read_emu3(
    target: Checkpoint,
    vq: Path | None = None,
    *,
    grid: int | None = None,
) -> Model:
    """Read Emu3-Gen in the layout of transformers or in the published layout.

    Args:
        target: folder with config.json, tokenizer and weights.
        vq: folder of Emu3-VisionTokenizer; None for the layout of transformers, which includes it.
        grid: grid rows of the square image size; None for the published size. Other sizes have about as many pixels.

    Raises:
        CheckpointError: a file is missing or damaged, or belongs to another model.
    """
    config = target.model_config("BAAI/Emu3-Gen-hf", _TRANSFORMERS, _PUBLISHED)
    includes_vq = config.get("model_type") == _TRANSFORMERS
    if includes_vq and vq is not None:
        raise CheckpointError(field="vq", found=str(vq), expected="none: the target includes an image tokenizer")
    if not includes_vq and vq is None:
        raise CheckpointError(field="vq", found="nothing", expected="the folder of Emu3-VisionTokenizer")
    text = config.section("text_config") if "text_config" in config.values else config
    text = replace(text, values=_DEFAULTS | dict(text.values))
    tokenizer, content = _find_tokenizer(target)
    target.read()
    if vq is None:
        vq_checkpoint = target.extract(_find_prefix(target, _VQ_PREFIXES, CODEBOOK))
    else:
        vq_checkpoint = Checkpoint(vq, "vq", target.progress)
        vq_checkpoint.read()
    image_tokenizer = load_emu3_vq(vq_checkpoint)
    scale = image_tokenizer.config.pixels_per_cell
    sizes = grid_sizes(_AREA if grid is None else (grid * scale) ** 2, scale)
    prefix = _find_prefix(target, _PREFIXES, _EMBED)
    head_name = _find_prefix(target, _HEAD_PREFIXES, _HEAD) + _HEAD
    names = {"embed.weight": prefix + _EMBED, "head.weight": head_name}
    rename_llama(target, prefix, names)
    library = read_tokenizer(tokenizer, min(target.shape(name)[0] for name in names), _token_ids(config), content)
    codes = _visual_tokens(tokenizer, library)
    longest = max(rows * (columns + 1) - 1 for rows, columns in sizes)
    (row_end,) = _encode(library, ROW_END)
    decoder, embeddings = load_decoder(
        target, decoder_config(target, text, len(codes), sizes[0][0], max_image_tokens=longest), codes
    )
    layout = prompt_layout(library)
    return image_model(
        decoder=decoder,
        code_embeddings=joined([embeddings[codes.start : codes.stop], embeddings[row_end : row_end + 1]]),
        condition=token_condition(embeddings, decoder.config.prefix, layout, tokenizer, content=content),
        vq=image_tokenizer,
        sampling=_SAMPLING,
        sources=[*target.sources, *vq_checkpoint.sources],
        sizes=[image_size(library, rows, columns, scale) for rows, columns in sizes],
        row_end=len(codes),
    )


FAMILY = Family(read_emu3, side_files=(_RANKS, _VISION), model_types=(_TRANSFORMERS, _PUBLISHED))


def prompt_layout(library: Tokenizer, negative: str = NEGATIVE) -> TokenLayout:
    """Return the tokens of both prefix rows up to begin of image, which the tokens of an image size follow."""
    start, end, uncond = (_encode(library, text) for text in (START, BEGIN, START + negative + BEGIN))
    return TokenLayout(template="{prompt}" + SUFFIX, before=start, after=end, uncond=uncond, negative="{prompt}")


def image_size(library: Tokenizer, rows: int, columns: int, scale: int) -> Size:
    """Return an image size with its prompt tokens, which are the end of both prefix rows.

    Args:
        library: tokenizer of the model.
        rows: grid rows.
        columns: grid columns.
        scale: pixels per cell along each side.
    """
    tokens = _encode(library, f"{rows}*{columns}{IMAGE}")
    return Size(name=f"{columns * scale}x{rows * scale}", rows=rows, columns=columns, tokens=tokens)


def _encode(library: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(library.encode(text, add_special_tokens=False).ids)


def _find_prefix(checkpoint: Checkpoint, prefixes: Sequence[str], name: str) -> str:
    """Return the first prefix with which the checkpoint has the weight `name`, by default the last prefix."""
    # A later check reports the missing weight with that prefix.
    return next((prefix for prefix in prefixes if prefix + name in checkpoint.weights), prefixes[-1])


def _find_tokenizer(checkpoint: Checkpoint) -> tuple[Path, bytes | None]:
    """Return the tokenizer's file, and its content converted to `tokenizer.json` if it has another format."""
    if not (checkpoint.path / _RANKS).is_file():
        return checkpoint.tokenizer(), None
    path = checkpoint.file(_RANKS, "tokenizer")
    vision = split_lines(read_text(checkpoint.file(_VISION, "tokenizer")))
    return path, convert_tiktoken(path, _PATTERN, (*_SPECIAL, *vision))


def _token_ids(config: Config) -> dict[str, int]:
    """Return the token ids in a configuration of either layout, by name."""
    names = config.get("vocabulary_map", {})
    if not isinstance(names, Mapping):
        raise config.error("vocabulary_map", expected="ids by the names of tokens")
    ids = {name: names.get(name, config.get(field)) for name, field in _FIELDS.items()}
    return {name: token for name, token in ids.items() if token is not None}


def _visual_tokens(path: Path, library: Tokenizer) -> range:
    tokens = library.get_vocab(with_added_tokens=True)
    first = tokens.get(_VISUAL.format(0))
    count = sum(name.startswith("<|visual token ") for name in tokens)
    if missing := [name for name in _FIELDS if name not in tokens]:
        raise file_error(path, problem=f"lacks {', '.join(missing)}", remedy="give the model's own tokenizer")
    if first is None or any(tokens.get(_VISUAL.format(code)) != first + code for code in range(count)):
        raise file_error(
            path, found=f"{count} visual tokens", expected="tokens of codes 0, 1, ... with consecutive ids"
        )
    return range(first, first + count)


@raises_checkpoint_error
def convert_tiktoken(path: Path, pattern: str, special: Sequence[str]) -> bytes:
    """Convert a tiktoken file to the content of a `tokenizer.json`.

    Args:
        path: file with a token in base 64 and its rank per line.
        pattern: regular expression that splits a text, after Unicode normalisation (NFC).
        special: special tokens, whose ids follow the ranks.

    Raises:
        CheckpointError: the ranks are not 0, 1, ..., or a byte is not a token.
        EngineError: transformers is not installed.
    """
    require_library("transformers", str(path), "export")
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converter: Any = TikTokenConverter(path, pattern, extra_special_tokens=special)  # type: ignore[no-untyped-call]
    converter.load_tiktoken_bpe = _read_ranks  # the default reader needs the package tiktoken
    tokenizer = converter.converted()
    tokenizer.normalizer = normalizers.NFC()
    return str(tokenizer.to_str()).encode()


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for line in split_lines(read_text(path)):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise file_error(path, found=format_value(line), expected="a token in base 64 and its rank") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise file_error(path, problem="expected the ranks 0, 1, ..., each once, and a token for every byte")
    return ranks
