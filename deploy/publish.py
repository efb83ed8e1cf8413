"""Publish finished bundles of published models on the hub, and record them in `published.json`.

    python deploy/publish.py OWNER [NAME ...] [--precision int8] [--work FOLDER] [--dry-run]

For each model, the program exports a bundle, verifies it against the checkpoint, generates four images for the model
card and pushes everything to OWNER/NAME-PRECISION. It uses the token of `hf auth login` or HF_TOKEN. A bundle in the
table is not published again; to publish a new one, delete it from the table. If the program was interrupted, run it
again to continue. If a model fails, the others are still published, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lantern_rt import Pipeline, published
from lantern_rt.bundle.files import MANIFEST_FILE, Bundle, open_bundle
from lantern_rt.cli.console import format_bytes, print_stderr, print_text, show_progress
from lantern_rt.cli.push import create_repository, push_bundle
from lantern_rt.errors import LanternError, ParityError, RequestError
from lantern_rt.output.files import write_output
from lantern_rt.output.formats import PNG

PERMISSIVE = ("MIT", "Apache-2.0")  # licences under which all weights of a model may be published
PROMPTS = (
    "a red fox in deep snow",
    "a lighthouse on a cliff at sunset",
    "a bowl of lemons on a blue table",
    "an old steam train on a stone bridge",
)
CLASS_IDS = (207, 360, 387, 974)
SEEDS = (0, 1, 2, 3)


class PublicationJob(NamedTuple):
    """A bundle to publish."""

    name: str
    precision: str
    repository: str
    folder: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Publish the bundles named on the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("owner", help="user or organisation on the hub")
    parser.add_argument("names", nargs="*", metavar="NAME", help="published model; default: all that may be published")
    parser.add_argument("--precision", action="append", choices=["int8", "fp16"], help="default: int8")
    parser.add_argument("--work", type=Path, default=Path("publish"), help="folder of the exported bundles")
    parser.add_argument("--table", type=Path, default=published.TABLE, help="table of models to read and write")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done")
    options = parser.parse_intermixed_args(arguments)
    published.TABLE = options.table
    failed = 0
    for name in options.names or _list_permitted_models():
        for precision in options.precision or ["int8"]:
            repository = f"{options.owner}/{name}-{precision}"
            job = PublicationJob(name, precision, repository, options.work / f"{name}@{precision}")
            try:
                _check_licence(job)
                if options.dry_run:
                    print_text(_describe_job(job))
                else:
                    _publish_bundle(job)
            except LanternError as error:
                failed += 1
                print_stderr(f"{name} {precision}: {error}")
    return 2 if failed else 0


def _list_permitted_models() -> list[str]:
    return [name for name, model in published.load_published_models().items() if model.licence in PERMISSIVE]


def _check_licence(job: PublicationJob) -> None:
    model = published.find_published_model(job.name)
    if model.licence not in PERMISSIVE:
        expected = f"one that lets anyone publish the weights: {', '.join(PERMISSIVE)}"
        raise RequestError(field="licence", found=model.licence, expected=expected)


def _describe_job(job: PublicationJob) -> str:
    model = published.find_published_model(job.name)
    if job.precision in model.bundles:
        return f"{job.name} {job.precision}: published already"
    size = format_bytes(model.download_bytes)
    return (
        f"{job.name} {job.precision}: downloads {size}, exports to {job.folder}, "
        f"uploads at most {size} to {job.repository} (licence: {model.licence})"
    )


def _publish_bundle(job: PublicationJob) -> None:
    if job.precision in published.find_published_model(job.name).bundles:
        print_stderr(_describe_job(job))
        return
    create_repository(job.repository, private=False)  # first, so that a wrong token fails before the export
    if not (job.folder / MANIFEST_FILE).is_file():
        with show_progress() as progress:
            published.export_bundle(job.name, job.folder, job.precision, progress)
    bundle = open_bundle(job.folder)
    _verify_bundle(job, bundle)
    reference = push_bundle(bundle, job.repository, _generate_samples(bundle), _make_card_notes(job))
    size = sum(entry.bytes for entry in bundle.manifest.files.values()) + (job.folder / MANIFEST_FILE).stat().st_size
    _write_table_row(job, {"reference": reference, "digest": bundle.digest, "download_bytes": size})
    print_text(f"{job.name} {job.precision}: {reference}")


def _verify_bundle(job: PublicationJob, bundle: Bundle) -> None:
    from lantern_rt.export.registry import read_family_checkpoints
    from lantern_rt.export.verify import verify_bundle

    model = published.find_published_model(job.name)
    with show_progress() as progress:
        loaded = read_family_checkpoints(model.family, model.export_options, progress, model.cfg_scale)
        result = verify_bundle(bundle, loaded, model.files["target"], progress)
    if not result.passed:
        raise ParityError("differs from its checkpoint", field=str(bundle.folder), remedy="see `lantern-rt verify`")


def _generate_samples(bundle: Bundle) -> list[tuple[bytes, Mapping[Any, Any]]]:
    """Generate the model card's images: PNG files with their recipes, which include the SHA-256 of the codes."""
    if not PNG.supports(bundle.manifest):
        return []
    classes = bundle.manifest.condition.classes
    subject = {"prompts": [*PROMPTS]} if classes is None else {"class_ids": [i % classes for i in CLASS_IDS]}
    with Pipeline.from_bundle(bundle) as pipeline:
        result = pipeline(**subject, seed=SEEDS)
    samples: list[tuple[bytes, Mapping[Any, Any]]] = []
    for image, codes in zip(result.images, result.codes, strict=True):
        digest = hashlib.sha256(np.asarray(codes, "<i4").tobytes()).hexdigest()
        samples.append((PNG.encode_image(image), {**image.info, "codes": digest}))
    return samples


def _make_card_notes(job: PublicationJob) -> list[str]:
    model = published.find_published_model(job.name)
    memory = model.memory_bytes * (2 if job.precision == "fp16" else 1)
    return [
        f"Finished bundle of the published model `{job.name}`: `lantern-rt run {job.name}` downloads it.",
        f"Licence of the weights: {model.licence}. Memory for one image: {format_bytes(memory)} (estimated).",
        "`codes` is the SHA-256 of an image's tokens in raster order, as 32-bit integers, lower byte first.",
    ]


def _write_table_row(job: PublicationJob, row: dict[str, Any]) -> None:
    table = json.loads(published.TABLE.read_text("utf-8"))
    table[job.name].setdefault("bundles", {})[job.precision] = row
    write_output(published.TABLE, json.dumps(table, indent=1, ensure_ascii=False).encode(), force=True)
    published.load_published_models.cache_clear()


if __name__ == "__main__":
    sys.exit(main())
