"""Functions that read the checkpoints of each model family, and a function that reads only LlamaGen's transformer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lantern_rt.export.checkpoints.files import wrap_reader_errors
from lantern_rt.export.checkpoints.folders import Checkpoint
from lantern_rt.export.checkpoints.lora import LoraAdapter
from lantern_rt.export.families import common_llamagen
from lantern_rt.export.families.common_llamagen import LlamaGenTransformer
from lantern_rt.export.model import BundleContents
from lantern_rt.export.progress import ignore_progress
from lantern_rt.export.registry import read_family_checkpoints


def _read_checkpoints(
    family: str, target: Path, vq: Path | None = None, progress: Any = ignore_progress, **options: Any
) -> BundleContents:
    return read_family_checkpoints(family, {"target": target, "vq": vq, **options}, progress)


read_llamagen = partial(_read_checkpoints, "llamagen")
read_gear = partial(_read_checkpoints, "gear")
read_par = partial(_read_checkpoints, "par")
read_nar = partial(_read_checkpoints, "nar")
read_rar = partial(_read_checkpoints, "rar")
read_anole = partial(_read_checkpoints, "anole")
read_lumina = partial(_read_checkpoints, "lumina")
read_lumina2 = partial(_read_checkpoints, "lumina2")
read_glm_image = partial(_read_checkpoints, "glm_image")
read_janus = partial(_read_checkpoints, "janus")
read_emu3 = partial(_read_checkpoints, "emu3")
read_emu35 = partial(_read_checkpoints, "emu35")
read_simplear = partial(_read_checkpoints, "simplear")
read_prologue = partial(_read_checkpoints, "prologue")


@wrap_reader_errors
def read_llamagen_transformer(
    path: Path, lora: Sequence[LoraAdapter] = (), progress: Any = ignore_progress, **options: Any
) -> LlamaGenTransformer:
    checkpoint = Checkpoint(path, progress=progress, adapters=lora)
    return common_llamagen.read_llamagen_transformer(checkpoint, **options)
