"""The families of models with their checkpoints and options, and reading them, for `export` and `verify`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..engines.contracts import Progress
from ..errors import CheckpointError
from .progress import silent

if TYPE_CHECKING:
    from .model import Model

# Options by family. `export.families.<family>` has a function `read_<family>` with parameters of these names.
FAMILIES = {
    "llamagen": ("target", "vq", "drafter", "text_encoder", "config", "grid", "weights", "lora"),
    "par": ("target", "vq", "config", "grid", "weights", "lora"),
    "nar": ("target", "vq", "text_encoder", "config", "grid", "weights", "lora"),
    "anole": ("target", "vq", "drafter", "grid", "lora"),
    "lumina": ("target", "vq", "drafter", "grid", "lora"),
    "lumina2": ("target", "vq", "grid", "lora"),
    "glm_image": ("target", "grid", "lora"),
    "janus": ("target", "lora"),
    "emu3": ("target", "vq", "grid", "lora"),
    "simplear": ("target", "vq", "grid", "lora"),
}
CHECKPOINTS = ("target", "vq", "drafter", "text_encoder", "config")  # the options that are paths
# Files of targets that are repositories with folders.
_PARTS = {"glm_image": ("processor/tokenizer.json", "vision_language_encoder/*")}
_OPTIONAL_VQ = ("emu3",)  # its target may contain the VQ tokenizer


def check_family(family: str, options: Mapping[str, Any]) -> None:
    """Check the name of a family and its options.

    Raises:
        CheckpointError: the family is unknown, does not take an option, or lacks a required option.
    """
    if family not in FAMILIES:
        raise CheckpointError(field="family", found=repr(family), expected=" or ".join(FAMILIES))
    for name, value in options.items():
        if value is not None and name not in FAMILIES[family]:
            raise CheckpointError(f"family {family} does not take it", field=name, remedy="leave it out")
    if "vq" in FAMILIES[family] and family not in _OPTIONAL_VQ and options.get("vq") is None:
        expected = f"the VQ tokenizer that belongs to the {family} target"
        raise CheckpointError(field="vq", found="nothing", expected=expected)


def read_family(
    family: str, options: Mapping[str, Any], progress: Progress = silent, cfg_scale: float | None = None
) -> Model:
    """Read the checkpoints of a family.

    Args:
        family: name of a family in `FAMILIES`.
        options: values of options by name. Checkpoints are paths or hub references, whose files are downloaded; `lora`
            is a list of these, each with or without `:scale`. None means not given.
        progress: progress callback, called for each checkpoint.
        cfg_scale: default guidance scale of the bundle; None: the family's.

    Raises:
        CheckpointError: the checkpoints do not fit, or cannot be read.
        RequestError: a hub reference is malformed.
        EngineError: a library that they need is not installed.
    """
    check_family(family, options)
    from .checkpoints import lora
    from .checkpoints.hub import fetch

    arguments = {name: value for name, value in options.items() if value is not None}
    for role in CHECKPOINTS:
        if role in arguments:
            arguments[role] = fetch(arguments[role], _PARTS.get(family, ()) if role == "target" else ())
    if "lora" in arguments:
        adapters = [lora.split_scale(text) for text in arguments["lora"]]
        files = (lora.CONFIG, lora.WEIGHTS)
        arguments["lora"] = [lora.read_adapter(fetch(place, files), scale) for place, scale in adapters]
    progress("reading checkpoints", 0, 0)
    read = getattr(import_module(f".families.{family}", __package__), f"read_{family}")
    model: Model = read(**arguments, progress=progress)
    if cfg_scale is None:
        return model
    sampling = model.fields["sampling"].model_copy(update={"cfg_scale": cfg_scale})
    return replace(model, fields={**model.fields, "sampling": sampling})
