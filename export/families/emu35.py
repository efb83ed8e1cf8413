"""Model family Emu3.5-Image, in the published layout: the model and its IBQ image tokenizer in two folders.

The vocabulary is that of Emu3 with more codes. The decoder normalises queries and keys, and its attention heads are
together wider than the hidden states. A prompt has the text in the published template, begin of image,
`{rows}*{columns}` as text, and the image token. The unconditional row has a constant text. The published model may
write a text before the image; here it generates the image at once.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from ...bundle.conditions import TokenLayout
from ...methods import Sampling
from ..checkpoints.folders import Checkpoint
from ..family import ModelFamily
from ..model import BundleContents
from ..models.llamagen_vq import HALF_LEVEL
from ..models.vq_checkpoints import load_vqgan
from .common import encode_text
from .common_emu3 import BEGIN, START, TOKENIZER_FILES, build_emu3_model, find_tokenizer, is_emu35_config

# Values of the published program: template, template of the unconditional row, sampling settings, and rows and columns
# of the image sizes, the default first.
_TEMPLATE = "You are a helpful assistant for t2i task. USER: {prompt} ASSISTANT: "
_NEGATIVE = "You are a helpful assistant. USER: {prompt} ASSISTANT: "
_SAMPLING = Sampling(cfg_scale=5.0, top_k=5120)
SIZES = ((55, 73), (41, 97), (47, 85), (52, 78), (64, 64), (73, 55), (85, 47), (78, 52))

_ANSWER = "<|extra_100|>"
_CHECKPOINT = "model.ckpt"  # weights of an image tokenizer without safetensors


def read_emu35(target: Checkpoint, vq: Path) -> BundleContents:
    """Read Emu3.5-Image; `vq` is the folder of Emu3.5-VisionTokenizer, or its file."""
    config = target.read_model_config("BAAI/Emu3.5-Image", "Emu3")
    tokenizer_file = find_tokenizer(target)
    file = vq / _CHECKPOINT
    has_safetensors = (vq / "model.safetensors").is_file() or not file.is_file()
    vq_checkpoint = Checkpoint(vq if has_safetensors else file, "vq", target.progress)
    image_tokenizer = load_vqgan(vq_checkpoint, match_by_product=True)
    bias = image_tokenizer.decoder.conv_out.bias
    assert bias is not None
    bias.data = bias.data - HALF_LEVEL
    target.read_weights()
    return build_emu3_model(
        target,
        config,
        tokenizer_file,
        image_tokenizer,
        grids=SIZES,
        make_layout=_make_prompt_layout,
        sampling=_SAMPLING,
    )


FAMILY = ModelFamily(read_emu35, optional_files=TOKENIZER_FILES, model_types=("Emu3",), accepts_config=is_emu35_config)


def _make_prompt_layout(tokenizer: Tokenizer) -> TokenLayout:
    end = _ANSWER + BEGIN
    start, after, uncond = (
        encode_text(tokenizer, text) for text in (START, end, START + _NEGATIVE.replace("{prompt}", "") + end)
    )
    return TokenLayout(template=_TEMPLATE, before=start, after=after, uncond=uncond, negative=_NEGATIVE)
