"""Model family SimpleAR: a Qwen2 decoder that generates codes of NVIDIA's Cosmos tokenizer.

A prompt has the tokens text to image, the caption, and start of image. The unconditional row has a negative text
instead of the caption. The token id of code c is the number of text tokens plus c. The published program may also
sample text tokens, which it decodes as code 0; here the target samples codes only. The prompt does not contain the
image size. The model was trained on square images.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from ...bundle.conditions import TokenLayout
from ...bundle.manifest import Size
from ...methods import Sampling
from ..checkpoints.files import make_file_error, read_tokenizer
from ..checkpoints.folders import Checkpoint
from ..family import ModelFamily
from ..graph.conditions import make_token_condition
from ..model import BundleContents
from ..models.cosmos_vq import load_cosmos_vq
from ..models.llama import load_llama_decoder, make_decoder_config, rename_llama_weights
from .common import build_image_model, encode_text, list_grid_shapes, make_size

# Tokens, texts and guidance of the published generate.py. Its top-k is left out here, because it allows all codes.
START = "<|t2i|>"
BEGIN = "<|soi|>"
TEMPLATE = "A highly realistic image of {prompt}"
NEGATIVE = (
    "An image of aerial view, overexposed, low quality, deformation, a poor composition, bad hands, bad teeth, bad "
    "eyes, bad limbs, distortion"
)
_SQUARES = (64, 48, 32, 16)  # grid rows of the square images in the training data
_NEIGHBORS = 256  # neighbours stored per code; 1024 for each of 64,000 codes would take 131 MB
_EMBED = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


def read_simplear(target: Checkpoint, vq: Path, *, grid: int | None = None) -> BundleContents:
    """Read SimpleAR with the Cosmos tokenizer, whose folder has encoder and decoder as .jit or .safetensors files.

    `grid` is the number of grid rows of the default image size, a square of 64 rows. Other sizes have about as many
    codes, or are smaller squares.
    """
    config = target.read_model_config("Daniel0724/SimpleAR-0.5B-RL", "qwen2")
    path = target.find_tokenizer_path()
    generation = target.read_config_file("generation_config.json")
    config.check_value("use_sliding_window", False, None, remedy="other decoders are not supported")
    target.tied_weights = {_HEAD: _EMBED} if config.get("tie_word_embeddings") else {}
    target.read_weights()
    rows = min(target.get_shape(name)[0] for name in (_EMBED, _HEAD))
    rename_llama_weights(target, "model.", {"embed.weight": _EMBED, "head.weight": _HEAD})
    tokenizer = read_tokenizer(path, rows)
    text_tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    if missing := [name for name in (START, BEGIN) if tokenizer.token_to_id(name) is None]:
        raise make_file_error(path, problem=f"lacks {', '.join(missing)}", remedy="give the model's own tokenizer")
    vq_checkpoint = Checkpoint(vq, "vq", target.progress)
    image_tokenizer = load_cosmos_vq(vq_checkpoint)
    sizes = list_image_sizes(grid or _SQUARES[0], image_tokenizer.config.pixels_per_cell)
    longest = max(size.codes for size in sizes)
    decoder, embeddings = load_llama_decoder(
        target,
        make_decoder_config(target, config, rows - text_tokens, sizes[0].rows, max_image_tokens=longest),
        range(text_tokens, len(target.weights["head.weight"])),
    )
    model = build_image_model(
        decoder=decoder,
        code_embeddings=embeddings[text_tokens:],
        condition=make_token_condition(
            embeddings[:text_tokens], decoder.config.prefix, make_simplear_prompt_layout(tokenizer), path
        ),
        vq=image_tokenizer,
        sampling=Sampling(cfg_scale=6.0, repetition_penalty=generation.get_number("repetition_penalty", 1.0)),
        sizes=sizes,
    )
    return replace(model, num_neighbors=_NEIGHBORS)


FAMILY = ModelFamily(read_simplear, model_types=("qwen2",))


def make_simplear_prompt_layout(tokenizer: Tokenizer, negative_text: str = NEGATIVE) -> TokenLayout:
    start, end, uncond = (encode_text(tokenizer, text) for text in (START, BEGIN, START + negative_text + BEGIN))
    return TokenLayout(template=TEMPLATE, before=start, after=end, uncond=uncond, negative="{prompt}")


def list_image_sizes(grid_side: int, pixels_per_cell: int) -> list[Size]:
    """Return the image sizes: a square, other shapes with about the same area, and smaller squares."""
    pairs = [
        *list_grid_shapes((grid_side * pixels_per_cell) ** 2, pixels_per_cell),
        *((side, side) for side in _SQUARES if side < grid_side),
    ]
    return [make_size(*pair, pixels_per_cell) for pair in pairs]
