"""The default bundle: trained modules of a work folder, folded and rounded to float16, as ONNX graphs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lantern_rt.bundle.conditions import ConditionSpec
from lantern_rt.bundle.manifest import DecoderSpec, DecodingDefaults, DrafterSpec
from lantern_rt.export.checkpoints.deferred import compute_tensor
from lantern_rt.export.graph.graphs import Graph, make_target_graph, name_test_cases
from lantern_rt.export.graph.onnx_ops import TensorSpec
from lantern_rt.export.graph.precision import parse_precisions
from lantern_rt.export.model import BundleContents
from lantern_rt.export.models.decoder import Attention, Decoder, get_decoder_spec_fields
from lantern_rt.export.models.eagle import LoadedDrafter, make_drafter_graph, read_drafter
from lantern_rt.export.writer import export_model
from lantern_rt.methods import Eagle, Lantern, LanternPlusPlus, Sampling

from .checkpoints import load_checkpoint
from .data import render_images
from .model import GUIDANCE, ScenesTarget
from .rounding import round_target
from .target import load_target
from .text import SLOTS, WORD_IDS, WORDS, encode_caption
from .vocabulary import sample_scene, write_caption
from .vq import CODE_DIM, GRID, ScenesVQ, load_vq, to_tensor

NEIGHBOURS = 128
PROMPTS_SEED = 930_000
# With heads a chain of 9 nodes had 3.18 tokens per forward pass, trees of as many 3.12, of the guided model.
TREE = "chain-7"
DECODING = DecodingDefaults(
    methods=(
        Eagle(tree="chain-5"),
        Lantern(tree=TREE, neighbors=30, delta=0.002),
        LanternPlusPlus(tree=TREE, neighbors=10, lambda_=1.5),
    ),
)


class CaptionEncoder(nn.Module):
    """`token_ids [rows, 24]` -> prefix rows with and without the caption, `[rows, 24, width]` each."""

    def __init__(self, target: ScenesTarget) -> None:
        super().__init__()
        self.words = target.words
        self.slots = target.slots
        self.uncond_embedding = target.uncond_embedding

    def forward(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        conditional = self.words(token_ids) + self.slots
        return conditional, torch.zeros_like(conditional) + self.uncond_embedding


class PictureDecoder(nn.Module):
    """`codes [images, 256]` -> images `[images, 3, size, size]`."""

    codebook: Tensor

    def __init__(self, vq: ScenesVQ) -> None:
        super().__init__()
        self.decoder = vq.decoder
        self.register_buffer("codebook", vq.codebook)

    def forward(self, codes: Tensor) -> Tensor:
        vectors = self.codebook[codes].transpose(1, 2).reshape(-1, self.codebook.shape[1], GRID, GRID)
        pictures: Tensor = self.decoder(vectors)
        return pictures


class PictureEncoder(nn.Module):
    """Images `[images, 3, size, size]` -> `codes [images, 256]` and unit vectors `[images, 8, 16, 16]`."""

    def __init__(self, vq: ScenesVQ) -> None:
        super().__init__()
        self.vq = vq

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        vectors = self.vq.encoder(images)
        return self.vq.find_nearest_codes(vectors).flatten(1), vectors


def write_scenes_bundle(
    work_folder: Path,
    output: Path,
    force: bool,
    progress: Callable[[str, int, int], None],
    compute: str = "float32",
    precision: str | None = None,
    with_drafter: bool = True,
    vq_precision: str = "fp32",
) -> Path:
    """Write the bundle of a work folder's checkpoints; its name is that of its folder.

    Args:
        work_folder: folder of checkpoints.
        output: folder to write.
        force: replace an existing bundle.
        progress: called with each stage, the finished steps and their number.
        compute: type of the computations of target and drafter, float32 or float16.
        precision: type that their weights are rounded to; by default float16, which loses nothing.
        drafter: include the drafter; without it, the bundle draws images to train one.
        vq_precision: precision of the image decoder: fp32, fp16 or int8.
    """
    vq = load_vq(work_folder)
    target = load_target(work_folder)
    config = target.config
    size = vq.config.image_size
    decoder, code_embeddings = target.fold_code_tables()
    _round_to_float16(vq, target)
    code_embeddings = code_embeddings.half().float()
    integers = precision == "int8"
    if integers:
        decoder = round_target(decoder, target, code_embeddings, vq)
    else:  # rounded to float16; weights restored from integers keep their values
        _round_to_float16(decoder)
    drafting = _read_drafter(work_folder / "drafter", decoder, not integers) if with_drafter else None
    generator = np.random.default_rng(0)
    words = {"token_ids": generator.integers(len(WORDS), size=(3, SLOTS))}
    prefix = target.prefix(torch.from_numpy(encode_caption("a red cube on sand"))[None])[0].detach()
    codes = {"codes": generator.integers(vq.config.codes, size=(2, GRID * GRID))}
    pictures = {"images": to_tensor(render_images(2, seed=1, size=size)).numpy()}
    picture = TensorSpec("images", ("images", 3, size, size))
    rows = ("rows", SLOTS, config.hidden_size)
    graphs = [
        make_target_graph(decoder, code_embeddings, prefix),
        *([] if drafting is None else [make_drafter_graph(drafting.drafter)]),
        Graph(
            "condition",
            CaptionEncoder(target),
            (TensorSpec("token_ids", ("rows", SLOTS), "int64"),),
            (TensorSpec("prefix_embeds", rows), TensorSpec("uncond_embeds", rows)),
            name_test_cases(words),
        ),
        Graph(
            "vq_decoder",
            PictureDecoder(vq),
            (TensorSpec("codes", ("images", GRID * GRID), "int64"),),
            (picture,),
            name_test_cases(codes),
        ),
        Graph(
            "vq_encoder",
            PictureEncoder(vq),
            (picture,),
            (
                TensorSpec("codes", ("images", GRID * GRID), "int64"),
                TensorSpec("pre_quant", ("images", CODE_DIM, GRID, GRID)),
            ),
            name_test_cases(pictures),
        ),
    ]
    extra_files = {
        "tokenizer": ("tokenizer.json", _make_tokenizer_json()),
        "prompts": ("prompts.txt", _make_prompts_file()),
    }
    model = BundleContents(
        graphs=graphs,
        code_embeddings=code_embeddings,
        codebook=vq.codebook.numpy(),
        num_neighbors=NEIGHBOURS,
        manifest_fields={
            "family": "scenes",
            "grid_rows": GRID,
            "grid_columns": GRID,
            "codebook_size": vq.config.codes,
            "image_height": size,
            "image_width": size,
            "target": DecoderSpec(**get_decoder_spec_fields(config), max_positions=config.num_rope_positions),
            "drafter": None if drafting is None else DrafterSpec(**get_decoder_spec_fields(drafting.drafter.config)),
            "condition": ConditionSpec(kind="words", prefix=SLOTS),
            "sampling": Sampling(cfg_scale=load_checkpoint(work_folder / "target.pt").get("cfg_scale", GUIDANCE)),
            "decoding": DECODING,
        },
        extra_files=extra_files,
        sources=[(role, work_folder / f"{role}.pt") for role in ("vq", "target")]
        + (drafting.sources if drafting else []),
        licence="Apache-2.0",
    )
    precisions = replace(parse_precisions(precision, compute=compute, vq=vq_precision), lossless=True)
    return export_model(model, output, precisions=precisions, force=force, progress=progress)


def _read_drafter(folder: Path, decoder: Decoder, round_weights: bool) -> LoadedDrafter:
    """Read the drafter in a folder and round its weights like the target's."""
    loaded = read_drafter(folder, decoder)
    weights = {name: compute_tensor(weight) for name, weight in loaded.drafter.state_dict().items()}
    loaded.drafter.load_state_dict(weights, assign=True)
    if round_weights:
        _round_to_float16(loaded.drafter)
    return loaded


def _round_to_float16(*modules: nn.Module) -> None:
    """Round matrices and kernels to float16, so that they can be stored in it without loss.

    Queries are rounded as graphs have them, times the attention scale, 1/8: the smallest would no longer fit with it.
    """
    for module in modules:
        for weight in module.parameters():
            if weight.ndim >= 2:
                weight.data = weight.data.half().float()
        for attention in module.modules():
            if isinstance(attention, Attention):
                queries = attention.qkv.weight.data[: attention.num_heads * attention.head_dim]
                queries.copy_((queries / 8).half().float() * 8)


def _make_prompts_file() -> bytes:
    """Return captions for comparisons, one a line, of scenes that nothing else uses."""
    rng = np.random.default_rng(PROMPTS_SEED)
    return "".join(f"{write_caption(sample_scene(rng), rng)}\n" for _ in range(64)).encode()


def _make_tokenizer_json() -> bytes:
    """Return the vocabulary in the layout that `lantern_rt.text.words` describes."""
    pattern = {"type": "Split", "pattern": {"Regex": "[a-z]+"}, "behavior": "Removed", "invert": True}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": pattern,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "unk_token": "<unk>", "vocab": WORD_IDS},
    }
    return json.dumps(content, indent=1).encode()
