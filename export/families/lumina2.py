"""Model family Lumina-mGPT 2.0: a Chameleon decoder with Qwen's vocabulary, and MoVQGAN as image tokenizer.

Prompts and image sizes are as in Lumina-mGPT (`lumina.py`), but a patch has 4 x 4 codes. Prompts start with Qwen's end
of sequence, because Qwen has no start of sequence. Codes are tokens without names. Their ids begin at 155000; in a
smaller vocabulary, they are the last ids. While an image is generated, the guidance scale changes to 4 (`cfg_final`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...errors import CheckpointError
from ...methods import Sampling
from ..checkpoints.deferred import defer_concatenation
from ..checkpoints.files import format_names, make_file_error, read_tokenizer
from ..checkpoints.folders import Checkpoint
from ..family import ModelFamily
from ..model import BundleContents
from ..models.movqgan import read_movqgan
from .common import build_image_model
from .common_chameleon import LUMINA, PROMPT_TOKENS, read_chameleon_config
from .common_lumina import ROW_END, list_lumina_sizes, list_size_token_names, make_lumina_target

_FIRST_CODE = 155000
_GRID = 96  # number of grid rows of an image of 768 pixels
_PATCH = 4  # number of grid rows and columns of a patch
_SAMPLING = Sampling(cfg_scale=4.0, cfg_final=4.0, top_k=4096)  # settings of the published generate.py


def read_lumina2(target: Checkpoint, vq: Path, *, grid: int | None = None) -> BundleContents:
    """Read Lumina-mGPT 2.0 with MoVQGAN.

    `grid` is the number of grid rows of the square image size, a multiple of 4; 96 rows are 768 pixels. Other image
    sizes have about as many codes.
    """
    rows = grid or _GRID
    if rows % _PATCH:
        raise CheckpointError(field="grid", found=str(rows), expected="a multiple of 4; 96 rows are 768 pixels")
    config = read_chameleon_config(target, LUMINA, "Alpha-VLLM/Lumina-mGPT-2.0")  # before large files are read
    image_tokenizer = read_movqgan(vq, target.progress)
    count = image_tokenizer.config.num_codes
    size = config.get_integer("vocab_size")
    if size is None or size <= count:
        raise config.make_error(
            "vocab_size", expected=f"text tokens, and {count} tokens for the codes of the image tokenizer"
        )
    first = min(_FIRST_CODE, size - count)
    names, start = _read_token_ids(target, size, list_size_token_names(rows // _PATCH))
    model = make_lumina_target(target, config, range(first, first + count), names, start, rows, _PATCH)
    decoder, embeddings, condition = model.load_decoder_and_condition()
    row_end = names[ROW_END]
    return build_image_model(
        decoder=decoder,
        code_embeddings=defer_concatenation([embeddings[first : first + count], embeddings[row_end : row_end + 1]]),
        condition=condition,
        vq=image_tokenizer,
        sampling=_SAMPLING,
        sizes=list_lumina_sizes(rows, _PATCH, names),
        row_end=count,
    )


FAMILY = ModelFamily(read_lumina2, model_types=("chameleon",))


def _read_token_ids(
    checkpoint: Checkpoint, vocab_size: int, size_token_names: Sequence[str]
) -> tuple[Mapping[str, int], int]:
    """Return the ids of tokens that are not codes, by name, and the id of the first token of a prompt."""
    path = checkpoint.find_tokenizer_path()
    names = read_tokenizer(path, vocab_size).get_vocab(with_added_tokens=True)
    first, end, begin = PROMPT_TOKENS
    if first in names:
        raise make_file_error(
            path, found=first, expected="Qwen's tokens", remedy="family lumina takes the first Lumina-mGPT"
        )
    settings = checkpoint.read_config_file("tokenizer_config.json")
    start = settings.get("bos_token") or settings.get("eos_token")
    start = start.get("content") if isinstance(start, Mapping) else start
    if not isinstance(start, str):
        raise settings.make_error("eos_token", expected="the name of a token")
    tokens = (start, end, begin, ROW_END, *size_token_names)
    if missing := [name for name in tokens if name not in names]:
        raise make_file_error(path, problem=f"lacks {format_names(missing)}", remedy="give the model's own tokenizer")
    return {name: names[name] for name in tokens}, names[start]
