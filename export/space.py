"""Disk and memory that an export needs, checked before checkpoints are downloaded and before files are written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..bundle.hub import HUB
from ..bundle.manifest import Precision
from ..engines.host import EXPORT_BYTES, check_free_memory
from ..errors import CheckpointError
from ..output.files import check_disks
from .family import Family

# Bytes of a matrix's weight as stored, with the scales of blocks.
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
    """Sizes in bytes.

    Args:
        download: checkpoints that are not in the hub's cache.
        bundle: lower bound of the bundle, and of the memory to run it.
    """

    download: int
    bundle: int


def check_bundle(output: Path, size: int, download: int = 0, head: int = 0) -> None:
    """Check disk and memory for an export.

    Args:
        output: folder of the bundle.
        size: size of the bundle in bytes.
        download: number of bytes to download first.
        head: size of the target's output layer in float32, in which exports compare it.

    Raises:
        OutputError: a disk is too full.
        RequestError: too little memory is free.
    """
    needed = [(output, size)]
    remedy = "free some, choose another place, or a smaller precision"
    if download:
        from huggingface_hub import constants

        needed.append((Path(constants.HF_HUB_CACHE), download))
        remedy += "; HF_HOME is the place of downloads"
    check_disks(needed, remedy)
    check_free_memory(max(min(EXPORT_BYTES, size), head), "close other programs")


def estimate_sizes(family: Family, options: Mapping[str, Any], precision: Precision) -> ExportSizes:
    """Estimate sizes before a download, from the hub's list of files; 0 where the hub is silent.

    Args:
        family: family of the target.
        options: checkpoints by option of `export`, paths or references.
        precision: precision of the target.
    """
    from .checkpoints.hub import fetch, list_file_sizes

    download = target = 0
    for role in _CHECKPOINTS:
        source = str(options.get(role) or "")
        if source.startswith(HUB):
            patterns: tuple[Collection[str], ...] = (family.files, family.side_files) if role == "target" else ()
            size, missing = list_file_sizes(source, *patterns)
            download += missing
            target = size if role == "target" else target
    stored = 4
    if target:
        from .checkpoints.files import read_config

        with suppress(CheckpointError):  # there is none beside a file
            values = read_config(fetch(options["target"], ("config.json",)) / "config.json").values
            parts = [values, *(part for part in values.values() if isinstance(part, dict))]
            types = [part.get("dtype", part.get("torch_dtype")) for part in parts]
            stored = 2 if any(kind in _HALVES for kind in types) else 4
    return ExportSizes(download, int(target / stored * STORED_BYTES[precision]))
