"""SimpleAR: a Qwen2 decoder that writes the codes of NVIDIA's Cosmos tokenizer behind the tokens of its text.

A prompt is text to image, a caption, start of image; the unconditional row is the same with a negative text. Code c is
the token behind the last one of the tokenizer, plus c. The published program masks nothing: it would take a text token
for code 0. Here codes alone are drawn. A picture's size is not in the prompt; the model learned squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from ...bundle.manifest import Size, TokenLayout
from ...engines.contracts import Progress
from ...methods import Sampling
from ..checkpoints.deferred import without_weights
from ..checkpoints.files import file_error, raises_checkpoint_error, read_tokenizer
from ..checkpoints.folders import Checkpoint
from ..checkpoints.lora import Adapter
from ..graph.conditions import token_condition
from ..model import Model
from ..models.cosmos_vq import load_cosmos_vq
from ..models.decoder import Decoder
from ..models.llama import decoder_config, rename_llama
from ..progress import silent
from .common import check_grid, image_model
from .emu3 import grid_sizes

# Tokens, texts and guidance of the published generate.py; its top-k keeps as many tokens as there are codes.
START, BEGIN = "<|t2i|>", "<|soi|>"
TEMPLATE = "A highly realistic image of {prompt}"
NEGATIVE = (
    "An image of aerial view, overexposed, low quality, deformation, a poor composition, bad hands, bad teeth, bad "
    "eyes, bad limbs, distortion"
)
_SQUARES = (64, 48, 32, 16)  # rows of codes of those that it learned
_NEIGHBORS = 256  # of each code: 1024 of 64,000 would be 131 MB
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@raises_checkpoint_error
def read_simplear(
    target: Path, vq: Path, *, grid: int | None = None, lora: Sequence[Adapter] = (), progress: Progress = silent
) -> Model:
    """The model in a folder of transformers with the tokenizer in another.

    Args:
        target: config.json, tokenizer.json and weights, as training saves them.
        vq: encoder and decoder of the Cosmos tokenizer, as .jit or .safetensors.
        grid: rows of codes of the square that is the default, 64 by default; other sizes have about as many codes, or
            are smaller squares.
        lora: merged into the target.

    Raises: CheckpointError, RequestError.
    """
    check_grid(grid)
    checkpoint = Checkpoint(target, progress=progress, adapters=lora)
    config = checkpoint.model_config("Daniel0724/SimpleAR-0.5B-RL", "qwen2")
    path, generation = checkpoint.tokenizer(), checkpoint.config("generation_config.json")
    config.expect("use_sliding_window", False, None, remedy="other decoders are not supported")
    checkpoint.tied = {_HEAD: _EMBED} if config.get("tie_word_embeddings") else {}
    checkpoint.read()
    rows = min(checkpoint.shape(name)[0] for name in (_EMBED, _HEAD))
    rename_llama(checkpoint, "model.", {"embed.weight": _EMBED, "head.weight": _HEAD})
    tokenizer = read_tokenizer(path, rows)
    first = tokenizer.get_vocab_size(with_added_tokens=True)
    if missing := [name for name in (START, BEGIN) if tokenizer.token_to_id(name) is None]:
        raise file_error(path, problem=f"lacks {', '.join(missing)}", remedy="give the model's own tokenizer")
    images = Checkpoint(vq, "vq", progress)
    image = load_cosmos_vq(images)
    sizes = image_sizes(grid or _SQUARES[0], image.config.pixels_per_cell)
    most = max(size.codes for size in sizes)
    with without_weights():
        decoder = Decoder(decoder_config(checkpoint, config, rows - first, sizes[0].rows, max_image_tokens=most))
    embeddings = checkpoint.weights.pop("embed.weight")
    checkpoint.weights["head.weight"] = checkpoint.weights["head.weight"][first:]
    checkpoint.load_strict(decoder)
    model = image_model(
        family="simplear",
        decoder=decoder,
        code_embeddings=embeddings[first:],
        condition=token_condition(embeddings[:first], decoder.config.prefix, prompt_layout(tokenizer), path),
        vq=image,
        sampling=Sampling(cfg_scale=6.0, repetition_penalty=generation.number("repetition_penalty", 1.0)),
        sources=[*checkpoint.sources, *images.sources],
        sizes=sizes,
    )
    return replace(model, neighbors=_NEIGHBORS)


def prompt_layout(tokenizer: Tokenizer, negative: str = NEGATIVE) -> TokenLayout:
    """How a caption becomes both rows."""
    start, end, uncond = (
        tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in (START, BEGIN, START + negative + BEGIN)
    )
    return TokenLayout(template=TEMPLATE, before=start, after=end, uncond=uncond, negative="{prompt}")


def image_sizes(grid: int, scale: int) -> list[Size]:
    """A square of `grid` rows of codes of `scale` pixels, other shapes of about its area, and smaller squares."""
    pairs = [*grid_sizes((grid * scale) ** 2, scale), *((side, side) for side in _SQUARES if side < grid)]
    return [Size(name=f"{columns * scale}x{rows * scale}", rows=rows, columns=columns) for rows, columns in pairs]
