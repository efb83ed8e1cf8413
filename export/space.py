"""Sizes of an export, before checkpoints are downloaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from ..bundle.hub import HUB
from ..bundle.manifest import Precision
from ..errors import CheckpointError
from .family import ModelFamily

# Bytes per stored weight of a matrix, by precision; the scales of blocks are included.
STORED_BYTES: dict[Precision, float] = {
    "fp32": 4,
    "fp16": 2,
    "bf16": 2,
    "bf16-safe": 2,
    "int8": 1,
    "int8-weights": 1.0625,
    "int4-weights": 0.625,
}
_CHECKPOINTS = ("target", "vq", "drafter", "text_encoder")
_HALVES = ("bfloat16", "float16")


class ExportSizes(NamedTuple):
    """Sizes of an export in bytes."""

    download_bytes: int  # size of the checkpoint files that are not in the hub cache
    bundle_bytes: int  # lower bound of the bundle's size, and of the memory that running the bundle takes


def estimate_export_sizes(family: ModelFamily, options: Mapping[str, Any], precision: Precision) -> ExportSizes:
    """Estimate the sizes of an export from the hub's list of files; a size that the hub does not report counts as 0."""
    from .checkpoints.hub import fetch_checkpoint, measure_download_size

    download_bytes = target = 0
    for role in _CHECKPOINTS:
        source = str(options.get(role) or "")
        if source.startswith(HUB):
            patterns: tuple[Collection[str], ...] = (
                (family.download_patterns, family.optional_files) if role == "target" else ()
            )
            size, missing = measure_download_size(source, *patterns)
            download_bytes += missing
            target = size if role == "target" else target
    stored = 4
    if target:
        from .checkpoints.files import read_config

        with suppress(CheckpointError):  # there is none beside a file
            values = read_config(fetch_checkpoint(options["target"], ("config.json",)) / "config.json").values
            parts = [values, *(part for part in values.values() if isinstance(part, dict))]
            types = [part.get("dtype", part.get("torch_dtype")) for part in parts]
            stored = 2 if any(kind in _HALVES for kind in types) else 4
    return ExportSizes(download_bytes, int(target / stored * STORED_BYTES[precision]))
