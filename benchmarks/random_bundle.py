"""Make bundles with random weights of published model sizes, for benchmarks and tests.

Checkpoints are written tensor by tensor in the layout of the published files, and are exported like downloaded files.
"""

from __future__ import annotations

import json
import shutil
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from random_vq import write_cosmos_tokenizer, write_emu3_vq, write_ibq, write_llamagen_vq, write_movqgan, write_vqgan
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from lantern_rt.export.families.simplear import BEGIN, START
from lantern_rt.export.graph.precision import parse_precisions
from lantern_rt.export.registry import load_model_family, read_family_checkpoints
from lantern_rt.export.writer import export_model

CLASSES = 1000
# Scales of a layer's outputs, of noise in the drafter's token embedding, and of logits. With these scales, the draft
# tokens of random weights are accepted about as often as a trained drafter's tokens, so that every path of the decode
# loop runs.
LAYER_GAIN = 0.01
DRAFTER_NOISE = 0.3
LOGIT_SPREAD = 4.0
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_BLOCK = 1 << 22  # number of random values of a weight, after which the values repeat
_FIRST_CODE = 4  # Chameleon's token id of code 0
_BEGIN_OF_IMAGE = 8197  # Chameleon's token id before an image
_RESERVED = 4  # token id of <reserved00000>
_GLM_SPARE = 128  # number of token ids after GLM-Image's codes for which the output layer has rows
_RESERVED_NAMES = range(8706, 8865)  # numbers of reserved tokens for end of turn, row ends, and sizes in Lumina-mGPT
_WITH_DRAFTER = ("llamagen", "anole", "lumina")
Sizes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a target and of an image tokenizer.

    Attributes:
        num_layers: number of layers of the target.
        num_heads: number of query heads.
        hidden_size: width of hidden states.
        intermediate_size: width of the MLP.
        codes: codebook size.
        grid: rows of the square grid.
        dtype: type of the checkpoint's weights.
        vq_width: channels of the first level of the image tokenizer.
        vocab_size: size of the joint vocabulary of text and codes; None for class-conditional LlamaGen, PAR and NAR.
        family: model family of lantern-rt.
        queries_per_key: query heads per key head.
        cells_per_pass: cells that PAR samples in one forward pass; 0 for other families.
        head_size: width of a head; 0 stands for `hidden_size / num_heads`.
    """

    num_layers: int
    num_heads: int
    hidden_size: int
    intermediate_size: int
    codes: int
    grid: int
    dtype: torch.dtype
    vq_width: int = 128
    vocab_size: int | None = None
    family: str = "llamagen"
    queries_per_key: int = 1
    cells_per_pass: int = 0
    head_size: int = 0

    @property
    def num_layer_parameters(self) -> int:
        """Number of weights of a layer."""
        return self.hidden_size * (2 * self.query_width + 2 * self.key_width + 3 * self.intermediate_size)

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_size or self.hidden_size

    @property
    def key_width(self) -> int:
        """Width of all key heads together."""
        return self.query_width // self.queries_per_key


SHAPES = {
    "tiny": ModelShape(2, 4, 64, 128, 128, 4, torch.bfloat16, 32),
    "tiny-par": ModelShape(2, 4, 64, 128, 128, 4, torch.bfloat16, 32, family="par", cells_per_pass=4),
    "tiny-nar": ModelShape(3, 4, 64, 128, 128, 4, torch.bfloat16, 32, family="nar"),
    "tiny-anole": ModelShape(2, 4, 64, 128, 128, 2, torch.bfloat16, 32, 9000, "anole"),
    "tiny-lumina": ModelShape(2, 4, 64, 128, 128, 4, torch.bfloat16, 32, 9000, "lumina"),
    "tiny-lumina2": ModelShape(2, 4, 64, 128, 128, 8, torch.bfloat16, 32, 9100, "lumina2"),
    "tiny-glm-image": ModelShape(2, 4, 64, 128, 128, 2, torch.bfloat16, 0, 600, "glm_image", 2),
    "tiny-simplear": ModelShape(2, 4, 64, 128, 64000, 4, torch.bfloat16, 16, 64300, "simplear", 2),
    "tiny-emu3": ModelShape(2, 4, 64, 128, 128, 4, torch.bfloat16, 32, 700, "emu3", 2),
    "tiny-emu35": ModelShape(2, 4, 64, 128, 128, 4, torch.bfloat16, 32, 700, "emu35", 2, head_size=32),
    "GPT-B": ModelShape(12, 12, 768, 2048, 16384, 16, torch.float32),
    "GPT-XL": ModelShape(36, 20, 1280, 3584, 16384, 16, torch.float32),
    "GPT-3B": ModelShape(24, 32, 3200, 8704, 16384, 24, torch.float32),
    # the sizes of GPT-B with a grid of 24 x 24, for which PAR is published
    "PAR-4x-B": ModelShape(12, 12, 768, 2048, 16384, 24, torch.float32, family="par", cells_per_pass=4),
    "PAR-16x-B": ModelShape(12, 12, 768, 2048, 16384, 24, torch.float32, family="par", cells_per_pass=16),
    # the sizes of GPT-B with a 13th layer, as NAR is published for 512 pixels
    "NAR-B": ModelShape(13, 12, 768, 2048, 16384, 32, torch.float32, family="nar"),
    "Anole-7B": ModelShape(32, 32, 4096, 11008, 8192, 32, torch.bfloat16, 128, 65536, "anole"),
    "Lumina-7B": ModelShape(32, 32, 4096, 11008, 8192, 32, torch.bfloat16, 128, 65536, "lumina"),
    # the layers of Lumina-7B, as the configuration of Lumina-mGPT 2.0 was not available
    "Lumina2-7B": ModelShape(32, 32, 4096, 11008, 16384, 96, torch.bfloat16, 256, 171384, "lumina2"),
    "GLM-Image-9B": ModelShape(40, 32, 4096, 13696, 16384, 32, torch.bfloat16, 0, 168064, "glm_image", 16),
    "SimpleAR-0.5B": ModelShape(24, 14, 896, 4864, 64000, 64, torch.bfloat16, 128, 215672, "simplear", 7),
    "SimpleAR-1.5B": ModelShape(28, 12, 1536, 8960, 64000, 64, torch.bfloat16, 128, 215672, "simplear", 6),
    "Emu3-8B": ModelShape(32, 32, 4096, 14336, 32768, 90, torch.bfloat16, 256, 184622, "emu3", 4),
    "Emu3.5-34B": ModelShape(64, 64, 5120, 25600, 131072, 64, torch.bfloat16, 256, 282926, "emu35", 8, head_size=128),
}


def random_bundle(
    shape: ModelShape, output: Path, compute: str = "float32", precision: str | None = None, vq_precision: str = "fp32"
) -> Path:
    """Write a bundle with random weights. Families in `_WITH_DRAFTER` get a drafter.

    Args:
        shape: sizes of the model.
        output: folder of the bundle. Its parent folder contains the checkpoints during the export.
        compute: type in which target and drafter compute, `float32`, `float16` or `bfloat16`.
        precision: precision of target and drafter; None stores weights in the type `compute`.
        vq_precision: precision of the image decoder.
    """
    checkpoints = output.with_name(f"{output.name}-checkpoints")
    write_checkpoints(shape, checkpoints, drafter=shape.family in _WITH_DRAFTER)
    export_checkpoints(shape, checkpoints, output, precision, compute, vq_precision)
    shutil.rmtree(checkpoints)
    return output


def export_checkpoints(
    shape: ModelShape,
    folder: Path,
    output: Path,
    precision: str | None = None,
    compute: str = "float32",
    vq_precision: str = "fp32",
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Path:
    """Export the checkpoints of `write_checkpoints` and return the folder of the bundle.

    Args:
        shape: sizes of the model.
        folder: folder of the checkpoints.
        output: folder of the bundle.
        precision: precision of target and drafter; None stores weights in the type `compute`.
        compute: type in which target and drafter compute, `float32`, `float16` or `bfloat16`.
        vq_precision: precision of the image decoder.
        progress: progress callback with a message and the numbers of completed and of all units.
    """
    options = {
        "target": folder / "target",
        "vq": next(folder.glob("vq*"), None),
        "drafter": next(folder.glob("drafter"), None),
        "grid": shape.grid if "grid" in load_model_family(shape.family).export_options else None,
    }
    model = read_family_checkpoints(shape.family, options)
    precisions = parse_precisions(precision, compute=compute, vq=vq_precision)
    return export_model(model, output, precisions=precisions, progress=progress)


def write_checkpoints(shape: ModelShape, folder: Path, drafter: bool) -> None:
    """Write all checkpoints of a model: target, image tokenizer and, on request, a drafter."""
    folder.mkdir(parents=True)
    config: dict[str, Any] = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads // shape.queries_per_key,
        "rms_norm_eps": 1e-5,
        "vocab_size": shape.vocab_size or shape.codes,
    }
    if shape.family == "glm_image":
        _write_glm_image_checkpoint(shape, folder / "target", config | {"num_hidden_layers": shape.num_layers})
        return
    if shape.vocab_size is None:
        write_llamagen_vq(shape, folder)
    elif shape.family in ("emu3", "emu35"):
        config |= {"model_type": "Emu3", "max_position_embeddings": 9216}
        config |= {"head_dim": shape.query_width // shape.num_heads}
        (write_ibq if shape.head_size else write_emu3_vq)(shape, folder / "vq")
    elif shape.family == "simplear":
        config |= {"model_type": "qwen2", "max_position_embeddings": 32768, "tie_word_embeddings": True}
        config |= {"rope_theta": 1e6, "rms_norm_eps": 1e-6}
        write_cosmos_tokenizer(shape, folder / "vq")
    else:
        config |= {"model_type": "chameleon", "max_position_embeddings": 4096}
        config |= {"mask_image_logits": True} if shape.family != "anole" else {}
        if shape.family == "lumina2":
            write_movqgan(shape, folder / "vq")
        else:
            write_vqgan(shape, folder / "vqgan")
    target = folder / "target"
    if shape.family == "nar":
        _write_checkpoint_folder(target, _yield_nar_weights(shape), shape.dtype, {"n_head": shape.num_heads})
        return
    _write_checkpoint_folder(
        target, _yield_target_weights(shape), shape.dtype, config | {"num_hidden_layers": shape.num_layers}
    )
    if shape.family in ("emu3", "emu35"):
        _write_emu3_tokenizer(shape, target)
    elif shape.family == "simplear":
        (target / "generation_config.json").write_text("{}")
        _write_word_tokenizer(shape, target)
    elif shape.vocab_size is not None:
        _write_chameleon_tokenizer(shape, target)
    if drafter:
        _write_checkpoint_folder(
            folder / "drafter", _yield_drafter_weights(shape), shape.dtype, config | {"num_hidden_layers": 1}
        )


def _yield_target_weights(shape: ModelShape) -> Sizes:
    """Yield names and shapes of a target's weights."""
    width = shape.hidden_size
    head = shape.query_width // shape.num_heads
    # The norms of queries and keys have separate weights per head in Anole, and shared weights in Lumina-mGPT.
    rows = {"anole": (shape.num_heads,), "lumina": (1,), "lumina2": (1,)}.get(shape.family, ())
    yield "model.embed_tokens.weight", (shape.vocab_size or shape.codes, width)
    if shape.vocab_size is None:
        yield "model.cls_embedding.embedding_table.weight", (CLASSES + 1, width)
    if shape.cells_per_pass:
        yield "spe_tok_embeddings.special_embeddings.weight", (shape.cells_per_pass - 1, width)
    for i in range(shape.num_layers):
        yield from _yield_layer_weights(shape, f"model.layers.{i}.")
        yield f"model.layers.{i}.input_layernorm.weight", (width,)
        for name in ("q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias") if rows else ():
            yield f"model.layers.{i}.self_attn.{name}", (*rows, head)
        for part in "qk" if shape.family == "emu35" else "":
            yield f"model.layers.{i}.self_attn.{part}_norm.weight", (head,)
        for part in "qkv" if shape.family == "simplear" else "":
            yield f"model.layers.{i}.self_attn.{part}_proj.bias", (width if part == "q" else shape.key_width,)
    yield "model.norm.weight", (width,)
    if shape.family != "simplear":
        yield "lm_head.weight", (shape.vocab_size or shape.codes, width)


def _yield_nar_weights(shape: ModelShape) -> Sizes:
    """Yield names and shapes of NAR's weights in the layout of the official program."""
    width = shape.hidden_size
    inner = shape.intermediate_size
    yield "tok_embeddings.weight", (shape.codes, width)
    yield "cls_embedding.embedding_table.weight", (CLASSES + 1, width)
    for i in range(shape.num_layers):
        yield f"layers.{i}.attention.wqkv.weight", (3 * width, width)
        yield f"layers.{i}.attention.wo.weight", (width, width)
        yield f"layers.{i}.feed_forward.w1.weight", (inner, width)
        yield f"layers.{i}.feed_forward.w3.weight", (inner, width)
        yield f"layers.{i}.feed_forward.w2.weight", (width, inner)
        yield f"layers.{i}.attention_norm.weight", (width,)
        yield f"layers.{i}.ffn_norm.weight", (width,)
    for name in ("", "medusa_"):  # output layers for the cell to the right and for the cell below
        yield f"{name}norm.weight", (width,)
        yield f"{name}output.weight", (shape.codes, width)


def _write_glm_image_checkpoint(shape: ModelShape, folder: Path, text_config: dict[str, Any]) -> None:
    """Write the target and a small tokenizer in the folder layout of diffusers."""
    folder.mkdir()
    pairs = shape.hidden_size // shape.num_heads // 4
    time = pairs // 4
    row = pairs * 3 // 8
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [time, row, pairs - time - row]}
    text_config |= {"rope_parameters": rope, "max_position_embeddings": 131072}
    config = {"model_type": "glm_image", "image_start_token_id": shape.codes, "text_config": text_config}
    target = folder / "vision_language_encoder"
    _write_checkpoint_folder(target, _yield_glm_image_weights(shape), shape.dtype, config)
    (target / "generation_config.json").write_text(json.dumps({"temperature": 0.9, "top_p": 0.75, "top_k": 16512}))
    names = [f"<|dit_token_{i}|>" for i in range(shape.codes + _GLM_SPARE)]
    names += ["<unk>", "<sop>", "<eop>", "a", "red", "cube", *map(str, range(65))]
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<sop>", "<eop>"])
    tokenizer.pre_tokenizer = Whitespace()
    (folder / "processor").mkdir()
    tokenizer.save(str(folder / "processor/tokenizer.json"))


def _yield_glm_image_weights(shape: ModelShape) -> Sizes:
    """Yield names and shapes of the weights of GLM-Image's autoregressive model, without the image encoder."""
    width = shape.hidden_size
    yield "model.vqmodel.quantize.embedding.weight", (shape.codes, 64)
    yield "model.language_model.embed_tokens.weight", (shape.vocab_size or 0, width)
    for i in range(shape.num_layers):
        at = f"model.language_model.layers.{i}."
        for part in "qkv":
            rows = width if part == "q" else shape.key_width
            yield f"{at}self_attn.{part}_proj.weight", (rows, width)
            yield f"{at}self_attn.{part}_proj.bias", (rows,)
        yield f"{at}self_attn.o_proj.weight", (width, width)
        yield f"{at}mlp.gate_up_proj.weight", (2 * shape.intermediate_size, width)
        yield f"{at}mlp.down_proj.weight", (width, shape.intermediate_size)
        for norm in ("input", "post_self_attn", "post_attention", "post_mlp"):
            yield f"{at}{norm}_layernorm.weight", (width,)
    yield "model.language_model.norm.weight", (width,)
    yield "lm_head.weight", (shape.codes + _GLM_SPARE, width)


def _yield_drafter_weights(shape: ModelShape) -> Sizes:
    """Yield names and shapes of the weights of LANTERN's drafter, which has one layer."""
    yield "embed_tokens.weight", (shape.vocab_size or shape.codes, shape.hidden_size)
    yield "fc.weight", (shape.hidden_size, 2 * shape.hidden_size)
    yield "fc.bias", (shape.hidden_size,)
    yield from _yield_layer_weights(shape, "layers.0.")


def _yield_layer_weights(shape: ModelShape, prefix: str) -> Sizes:
    for part in "qkv":
        width = shape.key_width if part in "kv" else shape.query_width
        yield f"{prefix}self_attn.{part}_proj.weight", (width, shape.hidden_size)
    yield f"{prefix}self_attn.o_proj.weight", (shape.hidden_size, shape.query_width)
    for part in ("gate", "up"):
        yield f"{prefix}mlp.{part}_proj.weight", (shape.intermediate_size, shape.hidden_size)
    yield f"{prefix}mlp.down_proj.weight", (shape.hidden_size, shape.intermediate_size)
    yield f"{prefix}post_attention_layernorm.weight", (shape.hidden_size,)


def _write_chameleon_tokenizer(shape: ModelShape, folder: Path) -> None:
    """Write a small tokenizer and Chameleon's names of image tokens, which spell the digits of a code as letters."""
    start = "<|im_end|>" if shape.family == "lumina2" else "<s>"
    named = {start: 0, "<racm3:break>": _BEGIN_OF_IMAGE}
    named |= {f"<reserved{number:05d}>": _RESERVED + number for number in _RESERVED_NAMES}
    letters = str.maketrans("0123456789", "ABCDEFGHIJ")
    codes = {f"IMGIMG{str(code).translate(letters)}Z": _FIRST_CODE + code for code in range(shape.codes)}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocabulary_map": named | codes}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": start}))  # begins prompts of lumina2
    first_word = max(named.values()) + 1
    words = {word: first_word + i for i, word in enumerate(("<unk>", "a", "red", "cube", "on", "sand"))}
    tokenizer = Tokenizer(WordLevel(named | words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def _write_emu3_tokenizer(shape: ModelShape, folder: Path) -> None:
    """Write a tokenizer in Emu3's format, whose text tokens are single bytes, and the names of visual tokens."""
    lines = (f"{b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (folder / "emu3.tiktoken").write_text("".join(lines))
    names = ["<|image token|>", "<|image start|>", "<|image end|>"]
    names += (f"<|visual token {code:06d}|>" for code in range(shape.codes))
    (folder / "emu3_vision_tokens.txt").write_text("\n".join(names))


def _write_word_tokenizer(shape: ModelShape, folder: Path) -> None:
    """Write a tokenizer with one word for each token id before the ids of codes."""
    count = (shape.vocab_size or 0) - shape.codes
    names = ["<unk>", "a", "red", "cube", "on", "sand", START, BEGIN]
    names += (f"word{i}" for i in range(count - len(names)))
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.add_special_tokens([START, BEGIN])
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def _write_checkpoint_folder(folder: Path, weight_shapes: Sizes, dtype: torch.dtype, config: dict[str, Any]) -> None:
    """Write config.json, and a safetensors file with random weights, tensor by tensor to save memory."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, object] = {}
    offset = 0
    weight_sizes = list(weight_shapes)
    for name, size in weight_sizes:
        end = offset + torch.Size(size).numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": size, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for seed, (name, size) in enumerate(weight_sizes, start=1):
            block = _make_random_weight(name, size, seed).to(dtype).flatten().view(torch.uint8).numpy().data
            remaining_bytes = torch.Size(size).numel() * dtype.itemsize
            while remaining_bytes:
                remaining_bytes -= file.write(block[:remaining_bytes])


def _make_random_weight(name: str, size: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a weight, or the values that repeat in a large weight.

    Embedding tables are the same for target and drafter, as their seed is always 0.
    """
    if "norm" in name or len(size) == 1:
        return torch.full(size, 0.0 if name.endswith(".bias") else 1.0)
    generator = torch.Generator().manual_seed(0 if "embed" in name else seed)
    width = size[1]
    if name == "fc.weight":  # passes the token embedding on, with noise
        return torch.eye(*size).add_(torch.randn(size, generator=generator), alpha=DRAFTER_NOISE / width**0.5)
    numbers = torch.randn(min(_BLOCK, size[0] * width), generator=generator)
    is_residual = name.endswith((".o_proj.weight", ".down_proj.weight", ".wo.weight", ".w2.weight"))
    spread = LOGIT_SPREAD if name.endswith(("lm_head.weight", "output.weight")) else LAYER_GAIN if is_residual else 0.5
    return numbers if "embed" in name else numbers * (spread / width**0.5)
