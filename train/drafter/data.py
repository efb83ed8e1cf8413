"""Making the data: pictures that a bundle's target draws, or that exist already, as shards.

A drafter meets nothing but what its target draws under guidance, so that is the best thing to learn from. Drawing goes
through the pipeline with `auto`, which finds the fastest exact method. Hidden states are those that the bundle's own
engine gives, as in decoding.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ...bundle.manifest import Manifest
from ...checks import short
from ...compare.turns import Subjects
from ...engines.contracts import Progress
from ...errors import OutputError, RequestError
from ...output.files import existing_parent
from ...pipeline import Pipeline
from ...planning.acceptance_statistics import weights_of
from ...runtime.likelihood import sequence_states
from ...runtime.state import Prompt
from ...user_files import open_plain_file, read_plain_file, reading
from .shards import Pictures, Shard, Source, shard_path, write_shard

SHARD = 64  # pictures
FIRST_SEED = 700_000  # of drawn pictures; `tune` and `bench` use others
_TOGETHER = 4  # pictures whose hidden states are computed at once
_FORMATS = (".png", ".jpg", ".jpeg", ".webp")
_CAPTION_LIMIT = 1 << 16  # bytes
Codes = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Job:
    """One shard to write: the request for its subjects, and what gives the codes `[pictures, cells]` of it."""

    kind: str
    request: dict[str, Any]
    codes: Callable[[Progress], Codes]

    @property
    def subjects(self) -> list[Any]:
        """Prompts, class ids, or numbers of embeddings."""
        given = self.request[self.kind]
        return list(range(len(given[0]))) if self.kind == "embeddings" else list(given)


def drawing_jobs(pipeline: Pipeline, subjects: Subjects, count: int, shard: int = SHARD) -> list[Job]:
    """At least `count` pictures in whole shards: the subjects over and over, each time with other seeds."""

    def draw(index: int, request: dict[str, Any]) -> Callable[[Progress], Codes]:
        def codes(progress: Progress) -> Codes:
            for step in pipeline.stream(**request, method="auto"):
                progress("drawing codes", index * step.total + step.done, len(requests) * step.total)
            return np.stack(step.codes)

        return codes

    requests = [subjects.request(i, shard, FIRST_SEED) for i in range(-(-count // shard))]
    return [Job(subjects.kind, request, draw(i, request)) for i, request in enumerate(requests)]


def encoding_jobs(pipeline: Pipeline, folder: Path, shard: int = SHARD) -> list[Job]:
    """The pictures of a folder with their captions, or class ids, in text files of the same names.

    Raises: RequestError: there are none, or the bundle has no encoder or takes other things.
    """
    manifest = pipeline.bundle.manifest
    if "vq_encoder" not in manifest.files:
        raise RequestError(f"pictures: bundle {manifest.name} has no vq_encoder; give --prompts and have them drawn")
    if manifest.condition.kind == "embeddings":
        raise RequestError(
            f"pictures: bundle {manifest.name} takes text embeddings; export it with --text-encoder to give captions"
        )
    kind = "class_ids" if manifest.condition.kind == "class" else "prompts"
    files = sorted(file for file in folder.glob("*") if file.suffix.lower() in _FORMATS)
    if not files:
        raise RequestError(f"pictures {folder}: found none, expected {', '.join(_FORMATS)} files, each with a .txt")
    captions = [_caption(file, kind) for file in files]

    def encode(chosen: Sequence[Path]) -> Callable[[Progress], Codes]:
        def codes(progress: Progress) -> Codes:
            found = []
            for done, file in enumerate(chosen):
                progress("encoding pictures", done, len(chosen))
                found.append(pipeline.engines.vq_encoder(_pixels(file, manifest)[None])[0])
            return np.stack(found)

        return codes

    starts = range(0, len(files), shard)
    return [Job(kind, {kind: captions[i : i + shard]}, encode(files[i : i + shard])) for i in starts]


def estimated_bytes(manifest: Manifest, pictures: int, states: bool) -> int:
    """Disk that shards take, from above: hidden states of prefixes as long as any."""
    condition = manifest.condition
    size = 4 * (manifest.codes_per_image + 2 * condition.prefix)
    if condition.caption_dim is not None:
        size += condition.prefix * (4 * condition.caption_dim + 1)
    if states:
        size += 2 * 2 * (condition.prefix + manifest.codes_per_image) * manifest.target.hidden_size
    return pictures * size


def write_shards(
    pipeline: Pipeline, jobs: Sequence[Job], output: Path, states: bool, progress: Progress
) -> Iterator[int]:
    """Write the shards that `output` lacks; yields how many of them are there, from the first on.

    states: hidden states, too. progress: told what is being done, and how far it is. Raises: OutputError: a shard that
    is there is of something else, or the disk is too small; CheckpointError: it is damaged.
    """
    manifest = pipeline.bundle.manifest
    source = Source(
        weights_of(manifest)["target"],
        jobs[0].kind,
        manifest.grid_rows,
        manifest.grid_columns,
        manifest.codebook_size,
        manifest.target.hidden_size,
        states,
    )
    pictures = sum(len(job.subjects) for i, job in enumerate(jobs) if not shard_path(output, i).exists())
    needed, free = estimated_bytes(manifest, pictures, states), shutil.disk_usage(existing_parent(output)).free
    if needed > free:
        raise OutputError(
            f"{output}: {pictures:,} pictures take up to {needed / 1e9:.2f} GB, but the disk has {free / 1e9:.2f} GB "
            f"free; choose another place, fewer pictures{', or no hidden states' if states else ''}"
        )
    for i, job in enumerate(jobs):
        path = shard_path(output, i)
        if path.exists():
            _check_same(Shard(path), source, job)
        else:
            write_shard(path, source, _pictures(pipeline, job, job.codes(progress), states, progress))
        yield i + 1


def prompts_of(pipeline: Pipeline, kind: str, subjects: Any) -> list[Prompt]:
    """Prefix rows of subjects, as decoding has them."""
    request = pipeline.check(**{kind: subjects}, method="ar")
    return list(pipeline.prefixes(pipeline.engines, request.images))


def states_of(pipeline: Pipeline, prompts: Sequence[Prompt], codes: Codes) -> list[NDArray[np.float32]]:
    """The target's hidden states at prefix and `codes [pictures, cells]` but the last: per picture both rows in turn.

    Each `[prefix + cells - 1, width]`, float32.
    """
    model = pipeline.model(pipeline.engines, [])
    rows = [row for prompt in prompts for row in (prompt.cond, prompt.uncond)]
    return sequence_states(model, rows, np.repeat(codes[:, :-1].astype(np.int64), 2, 0))


def _pictures(pipeline: Pipeline, job: Job, codes: Codes, states: bool, progress: Progress) -> Pictures:
    """What a shard holds of drawn or encoded pictures."""
    given = job.request[job.kind]
    prompts = prompts_of(pipeline, job.kind, given)
    rows = [row for prompt in prompts for row in (prompt.cond, prompt.uncond)]
    layout = pipeline.model(pipeline.engines, []).layout
    lengths = np.array([len(row.embeds) for row in rows], np.int32)
    tokens = _stacked([row.drafter_tokens(layout).astype(np.int32) for row in rows], int(lengths.max()) - 1)
    parts: list[NDArray[np.float16]] = []
    for i in range(0, len(prompts) if states else 0, _TOGETHER):
        progress("computing hidden states", i, len(prompts))
        found = states_of(pipeline, prompts[i : i + _TOGETHER], codes[i : i + _TOGETHER])
        parts += [_half(one) for one in found]
    longest = int(lengths.max()) + codes.shape[1] - 1
    pairs = (len(prompts), 2)
    embeddings = job.kind == "embeddings"
    return Pictures(
        job.subjects,
        codes.astype(np.int32),
        lengths.reshape(pairs),
        tokens.reshape(*pairs, -1),
        _stacked(parts, longest).reshape(*pairs, longest, -1) if states else None,
        np.asarray(given[0], np.float32) if embeddings else None,
        np.asarray(given[1], np.bool_) if embeddings else None,
    )


def _half(states: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        half = states.astype(np.float16)
    if not np.isfinite(half).all():
        raise OutputError(
            f"hidden states: found {np.abs(states).max():.0f}, expected what float16 holds; leave --states out"
        )
    return half


def _stacked(rows: Sequence[NDArray[Any]], length: int) -> NDArray[Any]:
    """Rows padded on the right to one length."""
    return np.stack([np.pad(row, ((0, length - len(row)), *[(0, 0)] * (row.ndim - 1))) for row in rows])


def _check_same(shard: Shard, source: Source, job: Job) -> None:
    if shard.source != source or shard.subjects != job.subjects:
        raise OutputError(
            f"{shard.path}: is of another bundle, other prompts or other options; give another --output, or those "
            "that it was begun with"
        )


def _caption(picture: Path, kind: str) -> str | int:
    path = picture.with_suffix(".txt")
    with reading(path, "a caption", RequestError, f"write one for {picture.name}"):
        text = " ".join(read_plain_file(path, _CAPTION_LIMIT).decode().split())
    if kind == "prompts":
        return text
    if not text.isdecimal():
        raise RequestError(f"{path}: found {short(text)}, expected a class id: that is what the bundle takes")
    return int(text)


def _pixels(path: Path, manifest: Manifest) -> NDArray[np.float32]:
    """A picture float32 `[3, height, width]` in -1 .. 1: its middle, in the bundle's size."""
    size = manifest.image_width, manifest.image_height
    with reading(path, "a picture", RequestError, "save it again as PNG"), open_plain_file(path) as file:
        picture = Image.open(file).convert("RGB")
        scale = max(size[0] / picture.width, size[1] / picture.height)
        part = size[0] / scale, size[1] / scale
        left, top = (picture.width - part[0]) / 2, (picture.height - part[1]) / 2
        box = (left, top, left + part[0], top + part[1])
        fitted = picture.resize(size, Image.Resampling.LANCZOS, box)
    return np.asarray(fitted, np.float32).transpose(2, 0, 1) / np.float32(127.5) - 1
