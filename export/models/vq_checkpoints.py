"""Readers of VQ image tokenizers in the layouts of LlamaGen and taming-transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from ...engines.contracts import Progress
from ...inputs import format_error
from ..checkpoints.deferred import skip_weight_allocation
from ..checkpoints.files import Config, make_file_error, read_text, wrap_reader_errors
from ..checkpoints.folders import Checkpoint
from ..progress import ignore_progress
from .llamagen_vq import NORM_GROUPS, LlamaGenVQ, VQTokenizerConfig

CODEBOOK = "quantize.embedding.weight"
_YAML_LIMIT = 1 << 14  # maximum bytes of a configuration, which is parsed slowly; published files have about a thousand
_YAML_DEPTH = 32  # maximum number of nested levels, whose parsing takes memory and time
# Patterns of names in taming-transformers, and their replacements by LlamaGen's names.
_VQGAN_PATTERNS = (
    (r"\.(?:down|up)\.(\d+)\.block\.", r".conv_blocks.\1.res."),
    (r"\.(?:down|up)\.(\d+)\.", r".conv_blocks.\1."),
    *((rf"\.mid\.{theirs}\.", f".mid.{i}.") for i, theirs in enumerate(("block_1", "attn_1", "block_2"))),
)


@wrap_reader_errors
def read_llamagen_vq(path: Path, progress: Progress = ignore_progress, averaged: bool | None = None) -> LlamaGenVQ:
    """Read an image tokenizer with LlamaGen's names of weights."""
    checkpoint = Checkpoint(path, "vq", progress, averaged)
    checkpoint.read_weights(name_filter=lambda name: name != "quantize.codebook_used")  # statistics of training
    if CODEBOOK not in checkpoint.weights:
        expected = f"{CODEBOOK}, as in a LlamaGen VQ tokenizer (vq_ds16_c2i.pt or alike)"
        raise checkpoint.make_error(found=checkpoint.format_names(), expected=expected)
    return load_vq_tokenizer(checkpoint)


def load_vq_tokenizer(
    checkpoint: Checkpoint,
    make_vq: Callable[[VQTokenizerConfig], LlamaGenVQ] = LlamaGenVQ,
    num_groups: int = NORM_GROUPS,
    **settings: Any,
) -> LlamaGenVQ:
    """Load an image tokenizer with LlamaGen's names; `settings` of `VQTokenizerConfig` add to sizes in its weights."""
    num_codes, code_width = checkpoint.get_shape(CODEBOOK)
    latent_width = checkpoint.get_shape("encoder.conv_out.weight", 4)[0]
    encoder, decoder = (
        tuple(
            checkpoint.get_shape(f"{part}.conv_blocks.{i}.res.0.conv2.weight", 4)[0]
            for i in range(checkpoint.count_layers(f"{part}.conv_blocks."))
        )
        for part in ("encoder", "decoder")
    )
    stem = checkpoint.get_shape("encoder.conv_in.weight", 4)[0]
    blocks = checkpoint.count_layers("encoder.conv_blocks.0.res.")
    if not decoder or len(encoder) != len(decoder) or not blocks:
        counts = f"{len(encoder)} encoder and {len(decoder)} decoder levels of {blocks} blocks"
        raise checkpoint.make_error(found=counts, expected="a LlamaGen VQ tokenizer with equal numbers of levels")
    for width in (stem, *encoder, *decoder):
        if width % num_groups:
            expected = f"a multiple of {num_groups}, the groups of its norms"
            raise checkpoint.make_error(found=f"a level of width {width}", expected=expected)
    attention = f"encoder.conv_blocks.{len(encoder) - 1}.attn.0.norm.weight" in checkpoint.weights
    with skip_weight_allocation():
        sizes = (num_codes, code_width, latent_width, stem, encoder, decoder, blocks, attention)
        vq = make_vq(VQTokenizerConfig(*sizes, num_groups=num_groups, **settings))
    checkpoint.rename_weights({"codebook": CODEBOOK})
    numbers = ((name, weight) for name, weight in checkpoint.weights.items() if weight.is_floating_point())
    checkpoint.weights |= {name: weight.float() for name, weight in numbers}  # small enough to copy
    checkpoint.load_module_weights(vq)
    return vq


@wrap_reader_errors
def read_vqgan(path: Path, progress: Progress = ignore_progress) -> tuple[LlamaGenVQ, int | None]:
    """Read an image tokenizer in the layout of taming-transformers: vqgan.ckpt and vqgan.yaml, or a .ckpt file.

    Return it with the grid rows of its training images, None without vqgan.yaml.
    """
    file = path / "vqgan.ckpt" if path.is_dir() else path
    if not file.is_file():
        raise make_file_error(
            path, found="no .ckpt", expected="a folder with vqgan.ckpt and vqgan.yaml, or a .ckpt file"
        )
    checkpoint = Checkpoint(file, "vq", progress)
    vq = load_vqgan(checkpoint)
    settings = file.with_suffix(".yaml")
    if not settings.is_file():
        return vq, None
    checkpoint.sources.append(("vq_config", settings))
    return vq, _read_training_grid_size(settings, vq.config)


def load_vqgan(checkpoint: Checkpoint, **settings: Any) -> LlamaGenVQ:
    """Read and load an image tokenizer in the layout of taming-transformers; `settings` as in `load_vq_tokenizer`."""
    checkpoint.read_weights(name_filter=lambda name: not name.startswith("loss."))  # networks of the training loss
    if CODEBOOK not in checkpoint.weights or not checkpoint.count_layers("encoder.down."):
        expected = f"{CODEBOOK} and encoder.down.0, as in a VQGAN in taming-transformers' layout"
        raise checkpoint.make_error(found=checkpoint.format_names(), expected=expected)
    rename_vqgan_weights(checkpoint)
    return load_vq_tokenizer(checkpoint, normalize_for_decoder=False, normalize_for_encoder=False, **settings)


def rename_vqgan_weights(
    checkpoint: Checkpoint, coarsest_first: bool = False, patterns: Sequence[tuple[str, str]] = ()
) -> None:
    """Rename weights from the names of taming-transformers to LlamaGen's names.

    Args:
        coarsest_first: whether level 0 of the decoder is the coarsest, which runs first. In taming-transformers, level
            0 is the finest, which runs last.
        patterns: regular expressions and replacements that first convert other names to taming-transformers' names.
    """
    last = max(map(checkpoint.count_layers, ("decoder.up.", "decoder.up_block.up."))) - 1
    file_names: dict[str, str] = {}  # names in the file by new name
    for name in checkpoint.weights:
        new = name
        for pattern, replacement in (*patterns, *_VQGAN_PATTERNS):
            new = re.sub(pattern, replacement, new)
        if new.startswith("decoder.conv_blocks.") and not coarsest_first:
            new = re.sub(r"conv_blocks\.(\d{1,4})\b", lambda match: f"conv_blocks.{last - int(match[1])}", new)
        file_names[new] = name
    checkpoint.rename_weights(file_names)


def _read_training_grid_size(yaml_path: Path, vq_config: VQTokenizerConfig) -> int:
    text = read_text(yaml_path, _YAML_LIMIT)
    depth = 0
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("YAML aliases, which may repeat each other without end")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _YAML_DEPTH:
                raise ValueError(f"lists or mappings nested more than {_YAML_DEPTH} levels deep")
        content = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise make_file_error(yaml_path, found=format_error(error), expected="YAML") from error
    parameters = Config(yaml_path, content).get_section("model", "params")
    parameters.check_sizes_match_weights(n_embed=vq_config.num_codes, embed_dim=vq_config.code_width)
    sizes = parameters.get_section("ddconfig")
    sizes.check_sizes_match_weights(
        z_channels=vq_config.latent_width, ch=vq_config.encoder_stem_width, num_res_blocks=vq_config.num_blocks
    )
    pixels = sizes.get_integer("resolution")
    if pixels is None or pixels % vq_config.pixels_per_cell:
        raise sizes.make_error("resolution", expected=f"a multiple of {vq_config.pixels_per_cell} pixels")
    return pixels // vq_config.pixels_per_cell
