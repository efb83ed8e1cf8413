"""Bundles of published sizes with random weights: what a benchmark needs to know a model's cost.

Checkpoints are written in the published files' layouts, piece by piece, and exported as a user would export them.
"""

from __future__ import annotations

import json
import re
import shutil
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from lantern_rt.export.families.anole import read_anole
from lantern_rt.export.families.emu3 import read_emu3
from lantern_rt.export.families.llamagen import read_llamagen
from lantern_rt.export.families.lumina import read_lumina
from lantern_rt.export.families.lumina2 import read_lumina2
from lantern_rt.export.families.simplear import BEGIN, START, read_simplear
from lantern_rt.export.graph.precision import read_precisions
from lantern_rt.export.models.llamagen_vq import LlamaGenVQ, VQConfig
from lantern_rt.export.models.movqgan import Emu3VQ, MoVQ
from lantern_rt.export.models.vq_checkpoints import CODEBOOK
from lantern_rt.export.writer import export_model

CLASSES = 1000
# How much a layer adds to what enters it, how well the drafter reads its token, and how far logits spread: random
# weights whose drafter is right about as often as a trained one, so that every path of the decode loop is walked.
LAYER_GAIN, DRAFTER_NOISE, LOGIT_SPREAD = 0.01, 0.3, 4.0
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_BLOCK = 1 << 22  # random numbers of a weight, which then repeat; what they cost does not
_FIRST_CODE, _BEGIN_OF_IMAGE, _RESERVED = 4, 8197, 4  # Chameleon's tokens; <reserved00000> would be the last
_RESERVED_NAMES = range(8706, 8865)  # end of turn, and those that end rows and tell sizes in Lumina-mGPT
_VQ_WIDTH = 256  # of the image tokenizers' narrowest part
_LEVELS = (1, 1, 2, 2, 4)  # widths of the image tokenizers' levels, in units of the first
_COSMOS_LEVELS, _COSMOS_LATENTS, _COSMOS_DIGITS, _COSMOS_BANDS = (2, 4, 4), 16, 6, 192
_EMU3_LEVELS, _EMU3_WIDTH, _FRAMES_LOG2 = (1, 2, 2, 4), 4, 2  # of Emu3's; its codes and latents; frames of a grid
_PAIRS = {"emu3": read_emu3, "simplear": read_simplear, "lumina2": read_lumina2}  # without a drafter
Sizes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Shape:
    """Sizes of a target and of the image tokenizer (`vq_width`: of its first level).

    vocab_size: of a joint vocabulary of text and codes; None: class-conditional LlamaGen, which has none.
    key_share: heads of queries that share one of keys.
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
    key_share: int = 1

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer."""
        return self.hidden_size * (2 * self.hidden_size + 2 * self.key_width + 3 * self.intermediate_size)

    @property
    def key_width(self) -> int:
        """Numbers of a position's keys."""
        return self.hidden_size // self.key_share


SHAPES = {
    "tiny": Shape(2, 4, 64, 128, 128, 4, torch.bfloat16, 32),
    "tiny-anole": Shape(2, 4, 64, 128, 128, 2, torch.bfloat16, 32, 9000, "anole"),
    "tiny-lumina": Shape(2, 4, 64, 128, 128, 4, torch.bfloat16, 32, 9000, "lumina"),
    "tiny-lumina2": Shape(2, 4, 64, 128, 128, 8, torch.bfloat16, 32, 9100, "lumina2"),
    "tiny-simplear": Shape(2, 4, 64, 128, 64000, 4, torch.bfloat16, 16, 64300, "simplear", 2),
    "tiny-emu3": Shape(2, 4, 64, 128, 128, 4, torch.bfloat16, 32, 700, "emu3", 2),
    "GPT-B": Shape(12, 12, 768, 2048, 16384, 16, torch.float32),
    "GPT-XL": Shape(36, 20, 1280, 3584, 16384, 16, torch.float32),
    "GPT-3B": Shape(24, 32, 3200, 8704, 16384, 24, torch.float32),
    "Anole-7B": Shape(32, 32, 4096, 11008, 8192, 32, torch.bfloat16, 128, 65536, "anole"),
    "Lumina-7B": Shape(32, 32, 4096, 11008, 8192, 32, torch.bfloat16, 128, 65536, "lumina"),
    # the layers of Lumina-7B: the configuration of Lumina-mGPT 2.0 was not at hand
    "Lumina2-7B": Shape(32, 32, 4096, 11008, 16384, 96, torch.bfloat16, 256, 171384, "lumina2"),
    "SimpleAR-0.5B": Shape(24, 14, 896, 4864, 64000, 64, torch.bfloat16, 128, 215672, "simplear", 7),
    "SimpleAR-1.5B": Shape(28, 12, 1536, 8960, 64000, 64, torch.bfloat16, 128, 215672, "simplear", 6),
    "Emu3-8B": Shape(32, 32, 4096, 14336, 32768, 90, torch.bfloat16, 256, 184622, "emu3", 4),
}


def random_bundle(
    shape: Shape, output: Path, compute: str = "float32", precision: str | None = None, vq_precision: str = "fp32"
) -> Path:
    """Write the bundle of a target and a drafter; `output.parent` holds the checkpoints meanwhile."""
    checkpoints = output.with_name(f"{output.name}-checkpoints")
    write_checkpoints(shape, checkpoints, drafter=shape.family not in _PAIRS)
    export_checkpoints(shape, checkpoints, output, precision, compute, vq_precision)
    shutil.rmtree(checkpoints)
    return output


def export_checkpoints(
    shape: Shape,
    folder: Path,
    output: Path,
    precision: str | None = None,
    compute: str = "float32",
    vq_precision: str = "fp32",
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Path:
    """Export what `write_checkpoints` wrote to `folder`."""
    drafter = folder / "drafter" if (folder / "drafter").exists() else None
    if shape.family in _PAIRS:
        model = _PAIRS[shape.family](folder / "target", folder / "vq", grid=shape.grid)
    else:
        read = {"llamagen": read_llamagen, "anole": read_anole, "lumina": read_lumina}[shape.family]
        vq = folder / ("vq.pt" if shape.family == "llamagen" else "vqgan")
        model = read(folder / "target", vq, drafter=drafter, grid=shape.grid)
    precisions = read_precisions(precision, compute=compute, vq=vq_precision)
    return export_model(model, output, precisions=precisions, progress=progress)


def write_checkpoints(shape: Shape, folder: Path, drafter: bool) -> None:
    """Write all that an export reads: folders in LANTERN's layout or a family's own, and an image tokenizer."""
    folder.mkdir(parents=True)
    config: dict[str, Any] = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads // shape.key_share,
        "rms_norm_eps": 1e-5,
        "vocab_size": shape.vocab_size or shape.codes,
    }
    if shape.family == "llamagen":
        _write_vq(shape, folder)
    elif shape.family == "emu3":
        config |= {"model_type": "Emu3", "max_position_embeddings": 9216}
        _write_video_vq(shape, folder / "vq")
    elif shape.family == "simplear":
        config |= {"model_type": "qwen2", "max_position_embeddings": 32768, "tie_word_embeddings": True}
        config |= {"rope_theta": 1e6, "rms_norm_eps": 1e-6}
        _write_cosmos(shape, folder / "vq")
    else:
        config |= {"model_type": "chameleon", "max_position_embeddings": 4096}
        config |= {"mask_image_logits": True} if shape.family != "anole" else {}
        if shape.family == "lumina2":
            _write_movqgan(shape, folder / "vq")
        else:
            _write_vqgan(shape, folder / "vqgan")
    target = folder / "target"
    _write_folder(target, _target(shape), shape.dtype, config | {"num_hidden_layers": shape.num_layers})
    if shape.family == "emu3":
        _write_ranks(shape, target)
    elif shape.family == "simplear":
        (target / "generation_config.json").write_text("{}")
        _write_words(shape, target)
    elif shape.family != "llamagen":
        _name_tokens(shape, target)
    if drafter:
        _write_folder(folder / "drafter", _drafter(shape), shape.dtype, config | {"num_hidden_layers": 1})


def _target(shape: Shape) -> Sizes:
    """Names and shapes of a target's weights."""
    width, head = shape.hidden_size, shape.hidden_size // shape.num_heads
    # Anole's norms of queries and keys have a row for every head, those of Lumina-mGPT one for all.
    rows = {"anole": (shape.num_heads,), "lumina": (1,), "lumina2": (1,)}.get(shape.family, ())
    yield "model.embed_tokens.weight", (shape.vocab_size or shape.codes, width)
    if shape.vocab_size is None:
        yield "model.cls_embedding.embedding_table.weight", (CLASSES + 1, width)
    for i in range(shape.num_layers):
        yield from _layer(shape, f"model.layers.{i}.")
        yield f"model.layers.{i}.input_layernorm.weight", (width,)
        for name in ("q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias") if rows else ():
            yield f"model.layers.{i}.self_attn.{name}", (*rows, head)
        for part in "qkv" if shape.family == "simplear" else "":
            yield f"model.layers.{i}.self_attn.{part}_proj.bias", (width if part == "q" else shape.key_width,)
    yield "model.norm.weight", (width,)
    if shape.family != "simplear":
        yield "lm_head.weight", (shape.vocab_size or shape.codes, width)


def _drafter(shape: Shape) -> Sizes:
    """LANTERN's drafter of one layer."""
    yield "embed_tokens.weight", (shape.vocab_size or shape.codes, shape.hidden_size)
    yield "fc.weight", (shape.hidden_size, 2 * shape.hidden_size)
    yield "fc.bias", (shape.hidden_size,)
    yield from _layer(shape, "layers.0.")


def _layer(shape: Shape, prefix: str) -> Sizes:
    for part in "qkvo":
        width = shape.key_width if part in "kv" else shape.hidden_size
        yield f"{prefix}self_attn.{part}_proj.weight", (width, shape.hidden_size)
    for part in ("gate", "up"):
        yield f"{prefix}mlp.{part}_proj.weight", (shape.intermediate_size, shape.hidden_size)
    yield f"{prefix}mlp.down_proj.weight", (shape.hidden_size, shape.intermediate_size)
    yield f"{prefix}post_attention_layernorm.weight", (shape.hidden_size,)


def _name_tokens(shape: Shape, folder: Path) -> None:
    """Chameleon's names of image tokens, in which a code's digits are letters (A is 0), and a small tokenizer."""
    start = "<|im_end|>" if shape.family == "lumina2" else "<s>"
    named = {start: 0, "<racm3:break>": _BEGIN_OF_IMAGE}
    named |= {f"<reserved{number:05d}>": _RESERVED + number for number in _RESERVED_NAMES}
    letters = str.maketrans("0123456789", "ABCDEFGHIJ")
    codes = {f"IMGIMG{str(code).translate(letters)}Z": _FIRST_CODE + code for code in range(shape.codes)}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocabulary_map": named | codes}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": start}))  # which starts prompts of lumina2
    behind = max(named.values()) + 1
    words = {word: behind + i for i, word in enumerate(("<unk>", "a", "red", "cube", "on", "sand"))}
    tokenizer = Tokenizer(WordLevel(named | words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def _write_ranks(shape: Shape, folder: Path) -> None:
    """Emu3's tokenizer as published, with bytes alone for a text's tokens, and its names of visual tokens."""
    lines = (f"{b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (folder / "emu3.tiktoken").write_text("".join(lines))
    names = ["<|image token|>", "<|image start|>", "<|image end|>"]
    names += (f"<|visual token {code:06d}|>" for code in range(shape.codes))
    (folder / "emu3_vision_tokens.txt").write_text("\n".join(names))


def _write_vq(shape: Shape, folder: Path) -> None:
    """LlamaGen's image tokenizer."""
    state = _tokenizer(shape, 8, attention=True)
    state[CODEBOOK] = torch.randn_like(state.pop("codebook"))
    state["decoder.conv_out.weight"] /= 8  # about a picture's contrast; int8 is judged in levels
    torch.save({"model": state}, folder / "vq.pt")


def _write_vqgan(shape: Shape, folder: Path) -> None:
    """Chameleon's, in taming-transformers' layout."""
    top = len(_LEVELS) - 1
    state = _taming(_tokenizer(shape, _VQ_WIDTH, attention=False), top)
    folder.mkdir()
    torch.save({"state_dict": state}, folder / "vqgan.ckpt")
    sizes = {"z_channels": _VQ_WIDTH, "ch": shape.vq_width, "num_res_blocks": 2, "resolution": shape.grid * 2**top}
    parameters = {"embed_dim": _VQ_WIDTH, "n_embed": shape.codes, "ddconfig": sizes}
    (folder / "vqgan.yaml").write_text(yaml.safe_dump({"model": {"params": parameters}}))


def _movqgan_config(shape: Shape) -> VQConfig:
    torch.manual_seed(0)
    widths = tuple(shape.vq_width * level for level in _EMU3_LEVELS)
    return VQConfig(shape.codes, _EMU3_WIDTH, _EMU3_WIDTH, shape.vq_width, widths, widths[::-1], 2)


def _write_movqgan(shape: Shape, folder: Path) -> None:
    """That of Lumina-mGPT 2.0."""
    state = _taming(dict(MoVQ(_movqgan_config(shape)).state_dict()), len(_EMU3_LEVELS) - 1)
    folder.mkdir()
    file = folder / "movqgan_270M.ckpt"
    torch.save({name.replace("decoder.post", "post"): weight for name, weight in state.items()}, file)


def _write_video_vq(shape: Shape, folder: Path) -> None:
    """Emu3's. Where only the last slice of a kernel in time acts, it alone is written."""
    video = Emu3VQ(_FRAMES_LOG2, _movqgan_config(shape))
    state = _taming(dict(video.state_dict()), len(_EMU3_LEVELS) - 1)
    for i in range(_FRAMES_LOG2):
        state[f"encoder.time_conv.{i}.weight"] = torch.randn(_EMU3_WIDTH, _EMU3_WIDTH, 4, 3, 3) / 8
        state[f"encoder.time_conv.{i}.bias"] = torch.zeros(_EMU3_WIDTH)
    folder.mkdir()
    save_file(state, folder / "model.safetensors")


def _write_words(shape: Shape, folder: Path) -> None:
    """A tokenizer with a word for each id before those of codes."""
    count = (shape.vocab_size or 0) - shape.codes
    names = ["<unk>", "a", "red", "cube", "on", "sand", START, BEGIN]
    names += (f"word{i}" for i in range(count - len(names)))
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.add_special_tokens([START, BEGIN])
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def _write_cosmos(shape: Shape, folder: Path) -> None:
    """The Cosmos tokenizer: its names, with taps in time."""
    generator = torch.Generator().manual_seed(0)
    folder.mkdir()
    for half in ("encoder", "decoder"):
        state = {}
        for name, size in _cosmos(half, shape.vq_width):
            fans = torch.Size(size[1:]).numel()
            normed = ".norm" in name
            state[f"{name}.weight"] = torch.ones(size) if normed else torch.randn(size, generator=generator) / fans**0.5
            state[f"{name}.bias"] = torch.zeros(size[0])
        save_file(state, folder / f"{half}.safetensors")


def _cosmos(half: str, width: int) -> Sizes:
    """Names and shapes of the weights of one half."""

    def pair(name: str, inputs: int, outputs: int) -> Sizes:
        yield f"{name}.0.conv3d", (outputs, inputs, 1, 3, 3)
        yield f"{name}.1.conv3d", (outputs, outputs, 3, 1, 1)

    def block(name: str, inputs: int, outputs: int) -> Sizes:
        for i, before in ((1, inputs), (2, outputs)):
            yield f"{name}.norm{i}.norm", (before,)
            yield from pair(f"{name}.conv{i}", before, outputs)
        if inputs != outputs:
            yield f"{name}.nin_shortcut.conv3d", (outputs, inputs, 1, 1, 1)

    down, widths = half == "encoder", [width * level for level in _COSMOS_LEVELS]
    inner, outer = widths[-1], _COSMOS_BANDS
    quantiser = (_COSMOS_DIGITS, _COSMOS_LATENTS) if down else (_COSMOS_LATENTS, _COSMOS_DIGITS)
    yield f"{'' if down else 'post_'}quant_conv.conv3d", (*quantiser, 1, 1, 1)
    yield from pair(f"{half}.conv_in", outer if down else _COSMOS_LATENTS, width if down else inner)
    yield from pair(f"{half}.conv_out", inner if down else widths[0], _COSMOS_LATENTS if down else outer)
    yield f"{half}.norm_out.norm", (inner if down else widths[0],)
    for part in ("block_1", "block_2"):
        yield from block(f"{half}.mid.{part}", inner, inner)
    for i in range(2):
        yield f"{half}.mid.attn_1.{i}.norm.norm", (inner,)
        for part in ("q", "k", "v", "proj_out"):
            yield f"{half}.mid.attn_1.{i}.{part}.conv3d", (inner, inner, 1, 1, 1)
    before = width if down else inner
    for i in range(3) if down else reversed(range(3)):
        at = f"{half}.{'down' if down else 'up'}.{i}"
        for j in range(2 if down else 3):
            yield from block(f"{at}.block.{j}", before, widths[i])
            before = widths[i]
        if i != (2 if down else 0):
            kernels = (((1, 3, 3), (3, 1, 1)) if down else ((3, 1, 1), (1, 3, 3))) + ((1, 1, 1),)
            for j, kernel in enumerate(kernels, start=1):
                yield f"{at}.{'downsample' if down else 'upsample'}.conv{j}.conv3d", (before, before, *kernel)


def _taming(ours: dict[str, torch.Tensor], top: int) -> dict[str, torch.Tensor]:
    """Weights by the names of taming-transformers; top: the last level."""
    state = {}
    for name, weight in ours.items():
        for i, part in enumerate(("block_1", "attn_1", "block_2")):
            name = name.replace(f".mid.{i}.", f".mid.{part}.")
        name = re.sub(r"encoder\.conv_blocks\.(\d+)", r"encoder.down.\1", name)
        name = re.sub(r"decoder\.conv_blocks\.(\d+)", lambda found: f"decoder.up.{top - int(found[1])}", name)
        state[name.replace(".res.", ".block.")] = weight
    state[CODEBOOK] = torch.randn_like(state.pop("codebook"))
    return state


def _tokenizer(shape: Shape, code_width: int, attention: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    widths = tuple(shape.vq_width * level for level in _LEVELS)
    config = VQConfig(shape.codes, code_width, _VQ_WIDTH, shape.vq_width, widths, widths[::-1], 2, attention=attention)
    return dict(LlamaGenVQ(config).state_dict())


def _write_folder(folder: Path, sizes: Sizes, dtype: torch.dtype, config: dict[str, Any]) -> None:
    """A configuration and a safetensors file, tensor by tensor."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, object] = {}
    at, listed = 0, list(sizes)
    for name, size in listed:
        end = at + torch.Size(size).numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": size, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for seed, (name, size) in enumerate(listed, start=1):
            block = _weight(name, size, seed).to(dtype).flatten().view(torch.uint8).numpy().data
            left = torch.Size(size).numel() * dtype.itemsize
            while left:
                left -= file.write(block[:left])


def _weight(name: str, size: tuple[int, ...], seed: int) -> torch.Tensor:
    """A weight, or the numbers that repeat in it. Tables of target and drafter are the same."""
    if "norm" in name or len(size) == 1:
        return torch.full(size, 0.0 if name.endswith(".bias") else 1.0)
    generator = torch.Generator().manual_seed(0 if "embed" in name else seed)
    width = size[1]
    if name == "fc.weight":  # hands the token's embedding on
        return torch.eye(*size).add_(torch.randn(size, generator=generator), alpha=DRAFTER_NOISE / width**0.5)
    numbers = torch.randn(min(_BLOCK, size[0] * width), generator=generator)
    adds = name.endswith((".o_proj.weight", ".down_proj.weight"))
    spread = LOGIT_SPREAD if name == "lm_head.weight" else LAYER_GAIN if adds else 0.5
    return numbers if "embed" in name else numbers * (spread / width**0.5)
