"""Export of the default bundle: the trained models of a work folder, rounded, as ONNX graphs."""

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
from lantern_rt.bundle.manifest import DecodingDefaults
from lantern_rt.engines.contracts import TensorSpec
from lantern_rt.export.checkpoints.deferred import compute_deferred_tensor
from lantern_rt.export.graph.graphs import Graph, make_target_graph, name_test_cases
from lantern_rt.export.graph.precision import parse_precisions
from lantern_rt.export.model import BundleContents
from lantern_rt.export.models.decoder import Attention, Decoder
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

NEIGHBOURS = 128  # neighbours stored per code, for the relaxed acceptance of LANTERN
PROMPTS_SEED = 930_000
TEMPERATURE = 0.7  # as many right answers as top-p 0.8, without a sort; at 1 twice as many are wrong
# A chain, not a tree: with guidance a chain of 9 nodes gave 3.18 tokens per forward pass, trees of 9 nodes gave 3.12.
TREE = "chain-7"
DECODING = DecodingDefaults(
    methods=(
        Eagle(tree="chain-5"),
        Lantern(tree=TREE, neighbors=30, delta=0.002),
        LanternPlusPlus(tree=TREE, neighbors=10, lambda_=1.5),
    ),
)


class CaptionEncoder(nn.Module):
    """Graph from `token_ids [rows, 24]` to prefix embeddings with and without caption, each `[rows, 24, width]`."""

    def __init__(self, target: ScenesTarget) -> None:
        super().__init__()
        self.words = target.words
        self.slots = target.slots
        self.uncond_embedding = target.uncond_embedding

    def forward(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        conditional = self.words(token_ids) + self.slots
        # The sum with zeros expands the embedding to one copy per row: [rows, 24, width].
        return conditional, torch.zeros_like(conditional) + self.uncond_embedding


class PictureDecoder(nn.Module):
    """Graph from `codes [images, 256]` to images `[images, 3, size, size]` in about [-1, 1]."""

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
    """Graph from images `[images, 3, size, size]` to `codes [images, 256]` and unit vectors `[images, 8, 16, 16]`."""

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
    """Write a bundle from the checkpoints of a work folder.

    Args:
        work_folder: folder of checkpoints.
        output: bundle folder to write; its name becomes the bundle's name.
        force: whether to replace an existing bundle.
        progress: callback, called with the name of the stage, the number of finished steps and the number of all steps.
        compute: dtype in which target and drafter compute, float32 or float16.
        precision: stored precision of the weights of target and drafter; None: float16, which loses nothing.
        with_drafter: whether to include the drafter. A bundle without drafter generates the drafter's training images.
        vq_precision: precision of the image decoder: fp32, fp16 or int8.

    Returns:
        The path of the bundle folder.
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
    else:  # `decoder` is a copy of `target`'s weights; weights that were restored from integers are float16 already.
        _round_to_float16(decoder)
    drafting = _read_drafter(work_folder / "drafter", decoder, not integers) if with_drafter else None
    generator = np.random.default_rng(0)
    words = {"token_ids": generator.integers(len(WORDS), size=(3, SLOTS))}
    prefix = target.prefix(torch.from_numpy(encode_caption("a red cube on sand"))[None])[0].detach()
    codes = {"codes": generator.integers(vq.config.codes, size=(2, GRID * GRID))}
    pictures = {"images": to_tensor(render_images(2, seed=1, size=size)).numpy()}
    picture = TensorSpec("images", ("float32",), ("images", 3, size, size))
    rows = ("rows", SLOTS, config.hidden_size)
    graphs = [
        make_target_graph(decoder, code_embeddings, prefix),
        *([] if drafting is None else [make_drafter_graph(drafting.drafter)]),
        Graph(
            "condition",
            CaptionEncoder(target),
            (TensorSpec("token_ids", ("int64",), ("rows", SLOTS)),),
            (TensorSpec("prefix_embeds", ("float32",), rows), TensorSpec("uncond_embeds", ("float32",), rows)),
            name_test_cases(words),
        ),
        Graph(
            "vq_decoder",
            PictureDecoder(vq),
            (TensorSpec("codes", ("int64",), ("images", GRID * GRID)),),
            (picture,),
            name_test_cases(codes),
        ),
        Graph(
            "vq_encoder",
            PictureEncoder(vq),
            (picture,),
            (
                TensorSpec("codes", ("int64",), ("images", GRID * GRID)),
                TensorSpec("pre_quant", ("float32",), ("images", CODE_DIM, GRID, GRID)),
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
            "target": config.make_target_spec(),
            "drafter": None if drafting is None else drafting.drafter.config.make_drafter_spec(),
            "condition": ConditionSpec(kind="words", prefix=SLOTS),
            "sampling": Sampling(
                cfg_scale=load_checkpoint(work_folder / "target.pt").get("cfg_scale", GUIDANCE), temperature=TEMPERATURE
            ),
            "decoding": DECODING,
        },
        extra_files=extra_files,
        sources=[(role, work_folder / f"{role}.pt") for role in ("vq", "target")]
        + (drafting.drafter.checkpoint.sources if drafting else []),
        licence="Apache-2.0",
    )
    precisions = replace(parse_precisions(precision, compute=compute, vq=vq_precision), lossless=True)
    return export_model(model, output, precisions=precisions, force=force, progress=progress)


def _read_drafter(folder: Path, decoder: Decoder, round_weights: bool) -> LoadedDrafter:
    """Read the drafter in a folder and round its weights like the target's."""
    loaded = read_drafter(folder, decoder)
    weights = {name: compute_deferred_tensor(weight) for name, weight in loaded.drafter.state_dict().items()}
    loaded.drafter.load_state_dict(weights, assign=True)
    if round_weights:
        _round_to_float16(loaded.drafter)
    return loaded


def _round_to_float16(*modules: nn.Module) -> None:
    """Round matrices and convolution kernels to float16 values, so that they can be stored in float16 without loss.

    The ONNX graph stores query weights multiplied by the attention scale 1/8. The product is rounded here, because the
    smallest float16 values, divided by 8, would not be float16 values any more.
    """
    for module in modules:
        for weight in module.parameters():
            if weight.ndim >= 2:
                weight.data = weight.data.half().float()
        for attention in module.modules():
            if isinstance(attention, Attention):
                queries = attention.qkv.weight.data[: attention.config.num_heads * attention.config.head_dim]
                queries.copy_((queries / 8).half().float() * 8)


def _make_prompts_file() -> bytes:
    """Return 64 captions for comparing methods, one per line. No other step uses their scenes."""
    rng = np.random.default_rng(PROMPTS_SEED)
    return "".join(f"{write_caption(sample_scene(rng), rng)}\n" for _ in range(64)).encode()


def _make_tokenizer_json() -> bytes:
    """Return the vocabulary as `tokenizer.json`, in the form that `lantern_rt.text.words` reads."""
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
