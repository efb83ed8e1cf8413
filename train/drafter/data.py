"""Making the data: pictures that a bundle's target draws, as shards.

A drafter meets nothing but what its target draws under guidance, so that is the best thing to learn from. Drawing is
exact, with windows, whose drafts that did not stay are kept for heads to learn from. Hidden states are those that the
bundle's own engine gives, as in decoding.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...bundle.manifest import Manifest
from ...compare.prompts import Prompts
from ...engines.contracts import Progress
from ...errors import OutputError
from ...memory import compute_max_images
from ...pipeline import Pipeline
from ...runtime.decode import decode
from ...runtime.drafting import Commit, Drafter
from ...runtime.likelihood import sequence_states
from ...runtime.state import Prompt
from ...runtime_inputs import compute_prefixes, load_model
from .shards import Pictures, Shard, read_source, shard_path, write_shard

SHARD = 64  # pictures
FIRST_SEED = 700_000  # of drawn pictures; `bench` uses others
_METHOD = "sjd:window=7"  # that draws them
_NEAREST = 2  # drafts of a pass that are kept, behind the first that was refused
_TOGETHER = 4  # pictures whose hidden states are computed at once
Codes = NDArray[np.integer[Any]]


def estimate_bytes(manifest: Manifest, pictures: int) -> int:
    """Disk that shards take, from above: with prefixes as long as any."""
    positions = manifest.condition.prefix + manifest.codes_per_image
    numbers = 4 * (manifest.codes_per_image + 2 * manifest.condition.prefix)
    numbers += 8 * manifest.codes_per_image
    return pictures * (numbers + 2 * 2 * (positions + manifest.codes_per_image) * manifest.target.hidden_size)


def write_shards(
    pipeline: Pipeline, subjects: Prompts, images: int, output: Path, progress: Progress, shard: int = SHARD
) -> Iterator[int]:
    """Draw pictures and write them as shards, but for those that are there.

    Args:
        pipeline: the target's.
        subjects: what to draw, over and over, each time with other seeds.
        images: how many pictures at least, in whole shards.
        output: folder of the shards.
        progress: told what is being done, and how far it is.
        shard: pictures of a file.

    Yields:
        How many pictures are there, from the first on.

    Raises:
        OutputError: a shard that is there is of something else, or one cannot be written.
        CheckpointError: a shard that is there is damaged, or drafters of the bundle's family cannot be trained.
    """
    source = read_source(pipeline.bundle.manifest)
    paths = [shard_path(output, i) for i in range(-(-images // shard))]
    for index, path in enumerate(paths):
        request = subjects.request(index, shard, FIRST_SEED)
        labels = list(range(shard)) if subjects.kind == "embeddings" else list(request[subjects.kind])
        if os.path.lexists(path):
            old = Shard(path)
            if old.source != source or old.subjects != labels:
                problem = "of another bundle or other prompts"
                raise OutputError(problem, field=str(path), remedy="give another --output")
        else:
            codes, late = _draw(pipeline, request, progress)
            write_shard(path, source, _with_states(pipeline, request, labels, codes, late, progress))
        yield (index + 1) * shard


def hidden_states(pipeline: Pipeline, prompts: Sequence[Prompt], codes: Codes) -> list[NDArray[np.float32]]:
    """Compute the target's hidden states at prefix and codes but the last.

    Args:
        pipeline: the target's.
        prompts: prefix rows of each picture.
        codes: `[pictures, cells]`.

    Returns:
        Per picture the conditional and the unconditional row, each float32 `[prefix + cells - 1, width]`.
    """
    model = load_model(pipeline.bundle, pipeline.engines, [])
    rows = [row for prompt in prompts for row in (prompt.cond, prompt.uncond)]
    return sequence_states(model, rows, np.repeat(codes[:, :-1].astype(np.int64), 2, 0))


class _Late(Drafter):
    """Keeps, for each picture, what passes said after drafts that did not stay: the nearest two of every pass."""

    def __init__(self, pictures: int, cells: int, width: int) -> None:
        self.found = [0] * pictures
        self.cells = np.zeros((pictures, cells), np.int32)
        self.codes = np.zeros((pictures, cells), np.int32)
        self.states = np.zeros((pictures, 2, cells, width), np.float16)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Take in a pass."""
        for one in commits:
            if one.draft is None:
                continue
            picture, count = one.request.index, len(one.tokens)
            for node in range(count, min(count + _NEAREST, len(one.draft.tokens))):
                place, cell = self.found[picture], len(one.request.codes) + node - count
                if place < self.cells.shape[1] and cell < self.cells.shape[1]:
                    self.cells[picture, place], self.codes[picture, place] = cell, one.draft.tokens[node]
                    for side, row in enumerate(range(one.rows.start, one.rows.stop)):
                        self.states[picture, side, place] = _half(one.hidden[row, node])
                    self.found[picture] += 1


def _draw(pipeline: Pipeline, request: dict[str, Any], progress: Progress) -> tuple[Codes, _Late]:
    checked = pipeline.check(**request, method=_METHOD)
    settings, images = checked.settings, checked.images
    model = load_model(pipeline.bundle, pipeline.engines, [settings.method])
    late = _Late(len(images), model.codes, pipeline.bundle.manifest.target.hidden_size)
    codes = np.zeros((len(images), model.codes), np.int32)
    filled = [0] * len(images)
    max_images = compute_max_images(pipeline.bundle.manifest, settings, pipeline.engines.max_rows)
    prompts, seeds = compute_prefixes(pipeline.bundle, pipeline.engines, images), [image.seed for image in images]
    steps = decode(model, prompts, seeds, settings.sampling, settings.method, max_images=max_images, listener=late)
    for step in steps:
        for part in step.parts:
            end = filled[part.request] + len(part.codes)
            codes[part.request, filled[part.request] : end] = part.codes
            filled[part.request] = end
        progress("drawing codes", step.done, step.total)
    return codes, late


def _with_states(
    pipeline: Pipeline, request: dict[str, Any], labels: list[Any], codes: Codes, late: _Late, progress: Progress
) -> Pictures:
    images = pipeline.check(**request, method="ar").images
    prompts = list(compute_prefixes(pipeline.bundle, pipeline.engines, images))
    rows = [row for prompt in prompts for row in (prompt.cond, prompt.uncond)]
    layout = load_model(pipeline.bundle, pipeline.engines, []).layout
    lengths = np.array([len(row.embeds) for row in rows], np.int32)
    prefix = int(lengths.max())
    tokens = _stack([row.drafter_tokens(layout).astype(np.int32) for row in rows], prefix - 1)
    states: list[NDArray[np.float16]] = []
    for i in range(0, len(prompts), _TOGETHER):
        progress("computing hidden states", i, len(prompts))
        part = hidden_states(pipeline, prompts[i : i + _TOGETHER], codes[i : i + _TOGETHER])
        states += [_half(row) for row in part]
    padded = _stack(states, prefix + codes.shape[1] - 1)
    pairs = (len(prompts), 2)
    return Pictures(
        labels,
        codes.astype(np.int32),
        lengths.reshape(pairs),
        tokens.reshape(*pairs, -1),
        padded.reshape(*pairs, *padded.shape[1:]),
        late.cells,
        late.codes,
        late.states,
    )


def _half(states: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        half = states.astype(np.float16)
    if not np.isfinite(half).all():
        raise OutputError(field="hidden states", found=f"{np.abs(states).max():.0f}", expected="what float16 holds")
    return half


def _stack(rows: Sequence[NDArray[Any]], length: int) -> NDArray[Any]:
    return np.stack([np.pad(row, ((0, length - len(row)), *[(0, 0)] * (row.ndim - 1))) for row in rows])
