"""Generation of training data: images that a bundle's target generates, written as shards.

In decoding, a drafter reads only tokens that the target samples with guidance, so it is trained on generated images.
If a bundle has several image sizes, each shard has images of one size. The images are generated with speculative Jacobi
decoding (`sjd`), which does not change the target's distribution. Its unaccepted draft tokens are stored for training
draft heads. The bundle's engine computes the hidden states, as in decoding.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...bundle.manifest import Manifest, Size
from ...compare.prompts import Prompts
from ...engines.contracts import Progress
from ...errors import OutputError
from ...pipeline import Pipeline
from ...prepared import load_model
from ...runtime.decode import decode
from ...runtime.drafting import CommittedTokens
from ...runtime.likelihood import compute_sequence_hidden_states
from ...runtime.state import Prompt
from .shards import Shard, TrainingImages, describe_shard_source, get_shard_path, write_shard

IMAGES_PER_SHARD = 64  # maximum number
_SHARD_BYTES = 2 << 30  # maximum size of a shard with several images, since a shard is built in memory
FIRST_SEED = 700_000  # `bench` uses other seeds
_METHOD = "sjd:window=7"
_MAX_UNACCEPTED = 2  # unaccepted drafts stored per forward pass: the first after the accepted tokens
_MAX_IMAGES = 4  # images per forward pass that computes hidden states
Codes = NDArray[np.integer[Any]]


def estimate_shard_bytes(manifest: Manifest, num_images: int, image_sizes: Sequence[Size]) -> int:
    """Return an upper bound of the bytes that shards need on disk, with prefixes of the maximum length."""
    num_cells = max(size.codes for size in image_sizes)
    prefix = manifest.condition.prefix
    # Per image: int32 tokens, prefix tokens, cells and codes; then float16 hidden states of two rows.
    numbers = 4 * (num_cells + 2 * prefix) + 8 * num_cells
    return num_images * (numbers + 2 * 2 * (prefix + 2 * num_cells) * manifest.target.hidden_size)


def choose_images_per_shard(manifest: Manifest, image_sizes: Sequence[Size]) -> int:
    """Choose a number of images per shard that limits the size of a shard, 1 .. `IMAGES_PER_SHARD`."""
    # Hidden states dominate: 2 bytes (float16) x 2 rows x 2 kinds (after image tokens, after unaccepted drafts).
    image_bytes = 2 * 2 * 2 * max(size.codes for size in image_sizes) * manifest.target.hidden_size
    return max(1, min(IMAGES_PER_SHARD, _SHARD_BYTES // image_bytes))


def generate_shards(
    pipeline: Pipeline,
    prompts: Prompts,
    min_images: int,
    output_folder: Path,
    progress: Progress,
    image_sizes: Sequence[Size] = (),
    images_per_shard: int | None = None,
) -> Iterator[int]:
    """Generate images and write them as shards; shards that exist are checked and skipped. Yield the number of images.

    Args:
        prompts: prompts, repeated with new seeds as often as necessary.
        min_images: minimum number of images, rounded up to whole shards.
        image_sizes: image sizes, used in turn for one shard each; empty: all sizes of the bundle.
        images_per_shard: None: the result of `choose_images_per_shard`.

    Raises:
        RequestError: the bundle generates without drafts.
        OutputError: an existing shard has another bundle, size or other prompts, or a shard cannot be written.
        CheckpointError: an existing shard is damaged.
    """
    manifest = pipeline.bundle.manifest
    image_sizes = image_sizes or manifest.all_sizes
    images_per_shard = images_per_shard or choose_images_per_shard(manifest, image_sizes)
    paths = [get_shard_path(output_folder, i) for i in range(-(-min_images // images_per_shard))]
    for index, path in enumerate(paths):
        size = image_sizes[index % len(image_sizes)]
        source = describe_shard_source(manifest, size)
        request = prompts.request(index, images_per_shard, FIRST_SEED)
        labels = [image.subject.name(i) for i, image in enumerate(pipeline.check(**request).images)]
        if os.path.lexists(path):
            shard = Shard(path)
            if shard.source != source or shard.prompts != labels:
                problem = "has images of another bundle or size, or other prompts"
                raise OutputError(problem, field=str(path), remedy="give another --output")
        else:
            request["size"] = size.name
            codes, drafts = _generate_codes(pipeline, request, progress)
            write_shard(path, source, _add_hidden_states(pipeline, request, labels, codes, drafts, progress))
        yield (index + 1) * images_per_shard


def compute_hidden_states(
    pipeline: Pipeline, prompts: Sequence[Prompt], codes: Codes, size: str | None = None
) -> list[NDArray[np.float32]]:
    """Compute the target's hidden states in the prefix, and the states from which tokens `[images, cells]` are sampled.

    Returns the conditional and the unconditional row of each image, float32 `[prefix + cells - 1, width]`. The token of
    a cell is sampled from state `prefix - 1 + cell`.
    """
    model = load_model(pipeline.bundle, pipeline.engines, [])
    manifest = pipeline.bundle.manifest
    layout = manifest.layout(manifest.size(size))
    rows = [row for prompt in prompts for row in (prompt.cond, prompt.uncond)]
    known = [image[:-1].astype(np.int64) for image in codes for _ in (0, 1)]
    # The state at the position before a token predicts the token.
    sampled = np.array([layout.find_token_position(cell) - 1 for cell in range(layout.num_codes)])
    states = compute_sequence_hidden_states(model, layout, rows, known)
    return [
        np.concatenate([row_states[: len(row.embeds) - 1], row_states[len(row.embeds) + sampled]])
        for row, row_states in zip(rows, states, strict=True)
    ]


class _UnacceptedDrafts:
    """Buffer for the first unaccepted draft tokens of each forward pass and the target's hidden states after them."""

    def __init__(self, num_images: int, cells: int, hidden_size: int) -> None:
        self.counts = [0] * num_images
        self.cells = np.zeros((num_images, cells), np.int32)
        self.codes = np.zeros((num_images, cells), np.int32)
        self.states = np.zeros((num_images, 2, cells, hidden_size), np.float16)

    def store_drafts(self, commits: Sequence[CommittedTokens]) -> None:
        for commit in commits:
            if commit.draft is None:
                continue
            image = commit.sequence.index
            accepted = len(commit.tokens)
            nodes = range(accepted, min(accepted + _MAX_UNACCEPTED, len(commit.draft.tokens)))
            states = _to_float16(commit.read_target_states(nodes)[:, accepted:])  # [rows, nodes, width]
            for i, node in enumerate(nodes):
                index = self.counts[image]
                cell = len(commit.sequence.codes) + i
                if index < self.cells.shape[1] and cell < self.cells.shape[1]:
                    self.cells[image, index] = cell
                    self.codes[image, index] = commit.draft.tokens[node]
                    self.states[image, : len(states), index] = states[:, i]
                    self.counts[image] += 1


def _generate_codes(pipeline: Pipeline, request: dict[str, Any], progress: Progress) -> tuple[Codes, _UnacceptedDrafts]:
    prepared = pipeline.prepare(pipeline.check(**request, method=_METHOD))
    plan = prepared.plan
    num_images = len(prepared.images)
    num_codes = plan.layout.num_codes
    drafts = _UnacceptedDrafts(num_images, num_codes, pipeline.bundle.manifest.target.hidden_size)
    codes = np.zeros((num_images, num_codes), np.int32)
    filled = [0] * num_images
    # `cfg_tokens` would stop computing unconditional rows after some tokens, but the states of both rows are stored.
    plan = replace(plan, sampling=plan.sampling.model_copy(update={"cfg_tokens": None}))
    steps = decode(
        prepared.model(), plan, prepared.prompts(), prepared.seeds, prepared.max_images, on_commit=drafts.store_drafts
    )
    for step in steps:
        for part in step.parts:
            end = filled[part.sequence] + len(part.codes)
            codes[part.sequence, filled[part.sequence] : end] = part.codes
            filled[part.sequence] = end
        progress("generating image tokens", step.done, step.total)
    return codes, drafts


def _add_hidden_states(
    pipeline: Pipeline,
    request: dict[str, Any],
    prompt_labels: list[Any],
    codes: Codes,
    drafts: _UnacceptedDrafts,
    progress: Progress,
) -> TrainingImages:
    prepared = pipeline.prepare(pipeline.check(**request, method="ar"))
    max_images = min(prepared.max_images, _MAX_IMAGES)
    prompts = list(prepared.prompts())
    rows = [row for prompt in prompts for row in (prompt.cond, prompt.uncond)]
    layout = prepared.model().layout
    lengths = np.array([len(row.embeds) for row in rows], np.int32)
    prefix = int(lengths.max())
    tokens = _pad_and_stack([row.drafter_tokens(layout).astype(np.int32) for row in rows], prefix - 1)
    states: list[NDArray[np.float16]] = []
    for i in range(0, len(prompts), max_images):
        progress("computing hidden states", i, len(prompts))
        part = slice(i, i + max_images)
        images_states = compute_hidden_states(pipeline, prompts[part], codes[part], prepared.settings.size)
        states += [_to_float16(row) for row in images_states]
    padded = _pad_and_stack(states, prefix + codes.shape[1] - 1)
    pairs = (len(prompts), 2)
    return TrainingImages(
        prompt_labels,
        codes.astype(np.int32),
        lengths.reshape(pairs),
        tokens.reshape(*pairs, -1),
        padded.reshape(*pairs, *padded.shape[1:]),
        drafts.cells,
        drafts.codes,
        drafts.states,
    )


def _to_float16(states: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):  # values above the float16 maximum are reported below
        half = states.astype(np.float16)
    if not np.isfinite(half).all():
        maximum = f"{np.abs(states).max():.0f}"
        raise OutputError(field="hidden states", found=maximum, expected="values in the range of float16")
    return half


def _pad_and_stack(rows: Sequence[NDArray[Any]], length: int) -> NDArray[Any]:
    return np.stack([np.pad(row, ((0, length - len(row)), *[(0, 0)] * (row.ndim - 1))) for row in rows])
