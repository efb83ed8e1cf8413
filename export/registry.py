"""Which checkpoints and options each family is exported from, and reading them: for `export` and `verify`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..engines.contracts import Progress
from ..errors import CheckpointError
from .progress import silent

if TYPE_CHECKING:
    from .model import Model

# Each has a reader `read_<family>` in `export.families.<family>` with parameters of these names.
FAMILIES = {
    "llamagen": ("target", "vq", "drafter", "text_encoder", "config", "grid", "weights", "lora"),
    "anole": ("target", "vq", "drafter", "grid", "lora"),
    "lumina": ("target", "vq", "drafter", "grid", "lora"),
    "janus": ("target", "lora"),
    "emu3": ("target", "vq", "grid", "lora"),
    "simplear": ("target", "vq", "grid", "lora"),
}
CHECKPOINTS = ("target", "vq", "drafter", "text_encoder", "config")  # the options that are paths
_OPTIONAL_VQ = ("emu3",)  # whose target may hold it


def check_family(family: str, options: Mapping[str, Any]) -> None:
    """Refuse a family that is unknown, and options that it does not take or lacks. Raises: CheckpointError."""
    if family not in FAMILIES:
        raise CheckpointError(field="family", found=repr(family), expected=" or ".join(FAMILIES))
    for name, value in options.items():
        if value is not None and name not in FAMILIES[family]:
            raise CheckpointError(f"family {family} does not take it", field=name, remedy="leave it out")
    if "vq" in FAMILIES[family] and family not in _OPTIONAL_VQ and options.get("vq") is None:
        expected = f"the VQ tokenizer that belongs to the {family} target"
        raise CheckpointError(field="vq", found="nothing", expected=expected)


def read_family(family: str, options: Mapping[str, Any], progress: Progress = silent) -> Model:
    """The model that a family's checkpoints make.

    Args:
        family: one of `FAMILIES`.
        options: by names of `FAMILIES`: paths, or references to the hub, whose files are fetched; `lora` some of them,
            each with `:scale` or not; None where not given.
        progress: how much of every checkpoint is read.

    Raises:
        CheckpointError, RequestError: the checkpoints do not fit, or cannot be read.
        EngineError: a library that they need is not installed.
    """
    check_family(family, options)
    from .checkpoints import lora
    from .checkpoints.hub import fetch

    arguments = {name: value for name, value in options.items() if value is not None}
    for role in CHECKPOINTS:
        if role in arguments:
            arguments[role] = fetch(arguments[role])
    if "lora" in arguments:
        adapters = [lora.split_scale(text) for text in arguments["lora"]]
        files = (lora.CONFIG, lora.WEIGHTS)
        arguments["lora"] = [lora.read_adapter(fetch(place, files), scale) for place, scale in adapters]
    progress("reading checkpoints", 0, 0)
    read = getattr(import_module(f".families.{family}", __package__), f"read_{family}")
    model: Model = read(**arguments, progress=progress)
    return model
