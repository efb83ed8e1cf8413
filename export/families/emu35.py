"""Model family Emu3.5-Image, in the published layout: the model and its IBQ image tokenizer in two folders.

The vocabulary is that of Emu3 with more codes. The decoder normalises queries and keys, and its attention heads are
together wider than the hidden states. A prompt has the text in the published template, begin of image,
`{rows}*{columns}` as text, and the image token. The unconditional row has a constant text. The published model may
write a text before the image; here it generates the image at once.
"""

from __future__ import annotations

from pathlib import Path

from ...bundle.conditions import TokenLayout
from ...methods import Sampling
from ..checkpoints.deferred import defer_concatenation
from ..checkpoints.files import read_tokenizer
from ..checkpoints.folders import Checkpoint
from ..family import ModelFamily
from ..graph.conditions import make_token_condition
from ..model import BundleContents
from ..models.llama import load_llama_decoder, make_decoder_config, rename_llama_weights
from ..models.vq_checkpoints import load_vqgan
from .common import build_image_model
from .common_emu3 import (
    BEGIN,
    DEFAULTS,
    RANKS,
    ROW_END,
    START,
    VISION,
    encode_text,
    find_tokenizer,
    find_visual_token_ids,
    is_emu35_config,
    make_emu3_image_size,
    read_special_token_ids,
)

# Values of the published program: template, template of the unconditional row, sampling settings, and rows and columns
# of the image sizes, the default first.
_TEMPLATE = "You are a helpful assistant for t2i task. USER: {prompt} ASSISTANT: "
_NEGATIVE = "You are a helpful assistant. USER: {prompt} ASSISTANT: "
_SAMPLING = Sampling(cfg_scale=5.0, top_k=5120)
SIZES = ((55, 73), (41, 97), (47, 85), (52, 78), (64, 64), (73, 55), (85, 47), (78, 52))

_ANSWER = "<|extra_100|>"
# The published program truncates pixels to integers, but `output.images` rounds them. Subtracting half a level before
# rounding gives the same integers.
_HALF_LEVEL = 1 / 255
_CHECKPOINT = "model.ckpt"  # weights of an image tokenizer without safetensors


def read_emu35(target: Checkpoint, vq: Path) -> BundleContents:
    """Read Emu3.5-Image.

    Args:
        target: folder with config.json, emu3.tiktoken, emu3_vision_tokens.txt and weights.
        vq: folder of Emu3.5-VisionTokenizer, or its file.

    Raises:
        CheckpointError: a file is missing or damaged, or belongs to another model.
    """
    config = target.read_model_config("BAAI/Emu3.5-Image", "Emu3").with_defaults(DEFAULTS)
    tokenizer, tokenizer_json = find_tokenizer(target)
    file = vq / _CHECKPOINT
    has_safetensors = (vq / "model.safetensors").is_file() or not file.is_file()
    vq_checkpoint = Checkpoint(vq if has_safetensors else file, "vq", target.progress)
    image_tokenizer = load_vqgan(vq_checkpoint, match_by_product=True)
    bias = image_tokenizer.decoder.conv_out.bias
    assert bias is not None
    bias.data = bias.data - _HALF_LEVEL
    target.read_weights()
    names = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
    rename_llama_weights(target, "model.", names)
    library = read_tokenizer(
        tokenizer, min(target.get_shape(name)[0] for name in names), read_special_token_ids(config), tokenizer_json
    )
    codes = find_visual_token_ids(tokenizer, library)
    longest = max(rows * (columns + 1) - 1 for rows, columns in SIZES)
    sizes = make_decoder_config(target, config, len(codes), SIZES[0][0], max_image_tokens=longest)
    decoder, embeddings = load_llama_decoder(target, sizes, codes)
    (row_end,) = encode_text(library, ROW_END)
    end = _ANSWER + BEGIN
    layout = TokenLayout(
        template=_TEMPLATE,
        before=encode_text(library, START),
        after=encode_text(library, end),
        uncond=encode_text(library, START + _NEGATIVE.replace("{prompt}", "") + end),
        negative=_NEGATIVE,
    )
    scale = image_tokenizer.config.pixels_per_cell
    return build_image_model(
        decoder=decoder,
        code_embeddings=defer_concatenation([embeddings[codes.start : codes.stop], embeddings[row_end : row_end + 1]]),
        condition=make_token_condition(
            embeddings, decoder.config.prefix, layout, tokenizer, tokenizer_json=tokenizer_json
        ),
        vq=image_tokenizer,
        sampling=_SAMPLING,
        sources=[*target.sources, *vq_checkpoint.sources],
        sizes=[make_emu3_image_size(library, rows, columns, scale) for rows, columns in SIZES],
        default_grid=SIZES[0],
        row_end=len(codes),
    )


FAMILY = ModelFamily(read_emu35, optional_files=(RANKS, VISION), model_types=("Emu3",), accepts_config=is_emu35_config)
