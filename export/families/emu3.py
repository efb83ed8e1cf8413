"""Model family Emu3-Gen, in the published layout (two folders) or in the layout of transformers.

In the published layout, the model and the image tokenizer have a folder each. Text and visual tokens share one
vocabulary; code c is the visual token c. A prompt has these tokens: start of sequence, the text, begin of image,
`{rows}*{columns}` as text, image token. The unconditional row has a negative text instead of the prompt's text. An
end-of-row token follows every grid row. Configurations of transformers omit fields that have their default value.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from ...bundle.conditions import TokenLayout
from ...errors import CheckpointError
from ...methods import Sampling
from ..checkpoints.folders import Checkpoint
from ..family import ModelFamily
from ..model import BundleContents
from ..models.movqgan import load_emu3_vq
from ..models.vq_checkpoints import CODEBOOK
from .common import encode_text, list_grid_shapes
from .common_emu3 import BEGIN, START, TOKENIZER_FILES, build_emu3_model, find_tokenizer, is_emu35_config

# Values of Emu3's published program: suffix of every caption, text of the unconditional row, sampling settings.
SUFFIX = " masterpiece, film grained, best quality."
NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)
_SAMPLING = Sampling(cfg_scale=3.0, top_k=2048)
_AREA = 518400  # number of pixels of an image: 720 x 720

_TRANSFORMERS = "emu3"  # `model_type` in the layout of transformers
_PUBLISHED = "Emu3"  # `model_type` in the published layout
_HEAD = "lm_head.weight"
_PREFIXES = ("model.text_model.", "text_model.model.", "model.")
_HEAD_PREFIXES = ("text_model.", "")
_VQ_PREFIXES = ("model.vqmodel.", "vqmodel.")


def read_emu3(
    target: Checkpoint,
    vq: Path | None = None,
    *,
    grid: int | None = None,
) -> BundleContents:
    """Read Emu3-Gen in the layout of transformers, which includes the image tokenizer, or in the published layout.

    `grid` is the number of grid rows of the square image size. The other sizes have about as many pixels.
    """
    config = target.read_model_config("BAAI/Emu3-Gen-hf", _TRANSFORMERS, _PUBLISHED)
    includes_vq = config.get("model_type") == _TRANSFORMERS
    if includes_vq and vq is not None:
        raise CheckpointError(field="vq", found=str(vq), expected="none: the target includes an image tokenizer")
    if not includes_vq and vq is None:
        raise CheckpointError(field="vq", found="nothing", expected="the folder of Emu3-VisionTokenizer")
    tokenizer_file = find_tokenizer(target)
    target.read_weights()
    if vq is None:
        vq_checkpoint = target.extract_weights(_find_weight_prefix(target, _VQ_PREFIXES, CODEBOOK))
    else:
        vq_checkpoint = Checkpoint(vq, "vq", target.progress)
        vq_checkpoint.read_weights()
    image_tokenizer = load_emu3_vq(vq_checkpoint)
    scale = image_tokenizer.config.pixels_per_cell
    return build_emu3_model(
        target,
        config,
        tokenizer_file,
        image_tokenizer,
        grids=list_grid_shapes(_AREA if grid is None else (grid * scale) ** 2, scale),
        make_layout=make_emu3_prompt_layout,
        sampling=_SAMPLING,
        prefix=_find_weight_prefix(target, _PREFIXES, "embed_tokens.weight"),
        head_name=_find_weight_prefix(target, _HEAD_PREFIXES, _HEAD) + _HEAD,
    )


FAMILY = ModelFamily(
    read_emu3,
    optional_files=TOKENIZER_FILES,
    model_types=(_TRANSFORMERS, _PUBLISHED),
    accepts_config=lambda config: not is_emu35_config(config),
)


def make_emu3_prompt_layout(tokenizer: Tokenizer, negative_text: str = NEGATIVE) -> TokenLayout:
    """Return the layout of prompts up to begin of image; the tokens of an image size follow."""
    start, end, uncond = (encode_text(tokenizer, text) for text in (START, BEGIN, START + negative_text + BEGIN))
    return TokenLayout(template="{prompt}" + SUFFIX, before=start, after=end, uncond=uncond, negative="{prompt}")


def _find_weight_prefix(checkpoint: Checkpoint, prefixes: Sequence[str], name: str) -> str:
    """Return the prefix with which the checkpoint has a weight that it must have, or the last."""
    # If the weight is missing, a later check reports the weight with the last prefix.
    return next((prefix for prefix in prefixes if prefix + name in checkpoint.weights), prefixes[-1])
