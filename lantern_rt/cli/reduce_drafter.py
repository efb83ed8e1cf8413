"""The `reduce-drafter` command: which codes a model draws, and a bundle whose drafter scores those only.

Does not know option parsing, nor the drafter's graph (`export.draft_head`).
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..bundle.files import MANIFEST_FILE, Bundle, open_bundle
from ..bundle.manifest import FORMAT_VERSION, DrafterSpec, FileEntry
from ..engines.ort.engine import OrtEngine
from ..errors import EngineError, ParityError, RequestError
from ..output.folders import check_new_folder, folder_or_nothing
from ..pipeline import Pipeline
from ..runtime.engine import Ints, Pass
from .tune import calibration_of

_BATCH = 8
_REPLACED = ("drafter", "drafter.data", "rates")  # rates are those of the drafter as it was


@dataclass(frozen=True)
class Reduce:
    """What the user asked `reduce-drafter` for."""

    bundle: str
    output: Path
    codes: int
    images: int
    prompts: Path | None
    threads: int | None
    json: bool
    force: bool


def reduce_command(asked: Reduce) -> None:
    """Draw images, count their codes, and write the bundle with the smaller drafter."""
    try:
        from ..export.graph.draft_head import reduce_head
    except ImportError as error:
        raise EngineError(
            f"reduce-drafter needs {error.name}, found none installed; run `pip install 'lantern-rt[cpu,export]'`"
        ) from error
    bundle = open_bundle(asked.bundle)
    manifest = bundle.manifest
    if manifest.drafter is None:
        raise RequestError(f"bundle {manifest.name} has no drafter; reduce-drafter needs a bundle with one")
    if not 16 <= asked.codes < manifest.codebook_size:
        raise RequestError(f"codes: found {asked.codes}, expected a whole number 16 .. {manifest.codebook_size - 1}")
    if not 2 <= asked.images <= 10_000:
        raise RequestError(f"images: found {asked.images}, expected a whole number 2 .. 10000")
    check_new_folder(asked.output, asked.force, MANIFEST_FILE, "bundle")
    drawn = draw_codes(bundle, asked)
    half = len(drawn) // 2
    kept = most_frequent(np.concatenate(drawn[:half]), asked.codes, manifest.codebook_size)
    share = float(np.isin(np.concatenate(drawn[half:]), kept).mean())  # of codes that had no say
    kept = most_frequent(np.concatenate(drawn), asked.codes, manifest.codebook_size)
    with folder_or_nothing(asked.output, asked.force, MANIFEST_FILE, "bundle") as folder:
        files = {role: entry for role, entry in manifest.files.items() if role not in _REPLACED}
        for entry in files.values():
            shutil.copyfile(bundle.folder / entry.path, folder / entry.path)
        graph = folder / "drafter.onnx"
        reduce_head(bundle.path("drafter"), graph, kept, manifest.codebook_size)
        _compare(bundle.path("drafter"), graph, manifest.drafter, kept)
        for role, path in (("drafter", graph), ("drafter.data", folder / "drafter.onnx.data")):
            if path.exists():
                files[role] = FileEntry.of(path)
        fields = {
            "format_version": FORMAT_VERSION,
            "drafter": manifest.drafter.model_copy(update={"head_codes": asked.codes}),
            "files": files,
        }
        text = manifest.model_copy(update=fields).model_dump_json(indent=2)
        (folder / MANIFEST_FILE).write_text(text + "\n", "utf-8")
    report = {"bundle": str(asked.output), "codes": asked.codes, "images": asked.images, "share": round(share, 4)}
    if asked.json:
        print(json.dumps(report))
        return
    print(
        f"the drafter scores {asked.codes} of {manifest.codebook_size} codes: those drawn most often in {half} images "
        f"were {share:.1%} of the codes in {len(drawn) - half} others",
        file=sys.stderr,
    )
    print(asked.output)


def draw_codes(bundle: Bundle, asked: Reduce) -> list[Ints]:
    """Codes of images drawn exactly, `[codes]` each."""
    calibration = calibration_of(bundle, asked.prompts, _BATCH)
    pipeline = Pipeline.from_bundle(bundle, asked.threads)
    drawn: list[Ints] = []
    while len(drawn) < asked.images:
        drawn += pipeline(**calibration.batch(len(drawn) // _BATCH), method="sjd").codes
        print(f"drawn {min(len(drawn), asked.images)} of {asked.images} images", file=sys.stderr)
    return drawn[: asked.images]


def most_frequent(drawn: Ints, count: int, codebook: int) -> NDArray[np.int64]:
    """The `count` codes that occur most often, ascending; of equally frequent ones those with smaller numbers."""
    times = np.bincount(drawn, minlength=codebook)
    return np.sort(np.argsort(-times, kind="stable")[:count])


def _compare(old: Path, new: Path, spec: DrafterSpec, kept: NDArray[np.int64]) -> None:
    """ParityError unless the new drafter gives the old one's logits for the codes it scores, and none higher."""
    rng, slots = np.random.default_rng(0), 3
    engines = [OrtEngine(path, spec) for path in (old, new)]
    cache = engines[0].new_cache(1, slots)
    past_length = engines[0].next_past_length(cache, slots)
    batch = Pass(
        positions=np.arange(slots)[None],
        attention_mask=np.concatenate([np.zeros((slots, past_length), bool), np.tri(slots, dtype=bool)], 1)[None],
        tokens=spec.code_offset + rng.integers(spec.vocab_size, size=(1, slots)),
        hidden=rng.standard_normal((1, slots, spec.hidden_size), np.float32),
    )
    whole, reduced = (np.asarray(engine.run(batch, cache).logits) for engine in engines)
    difference = float(np.abs(whole[..., kept] - reduced[..., kept]).max())
    others = np.delete(reduced, kept, axis=-1)
    if difference > 1e-4 * max(1.0, float(np.abs(whole).max())) or others.max() > reduced[..., kept].min():
        raise ParityError(f"{old}: the reduced drafter's logits differ by up to {difference:.3g}; please report this")
