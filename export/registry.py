"""The families of models, and reading their checkpoints, for `export` and `verify`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from os.path import isfile
from typing import TYPE_CHECKING, Any

from ..bundle.hub import HUB, parse_reference
from ..engines.contracts import Progress
from ..errors import CheckpointError
from .family import Family
from .progress import ignore_progress

if TYPE_CHECKING:
    from pathlib import Path

    from .model import Model

# Modules of `export.families`, each with a record `FAMILY`. The first is the default of `export`.
FAMILIES = ("llamagen", "par", "nar", "anole", "lumina", "lumina2", "glm_image", "janus", "emu3", "emu35", "simplear")
CHECKPOINTS = ("target", "vq", "drafter", "text_encoder", "config")  # the options that are paths


def find_family(name: str) -> Family:
    """Return the record of a family, which imports PyTorch. Raises: CheckpointError: the name is unknown."""
    if name not in FAMILIES:
        raise CheckpointError(field="family", found=repr(name), expected=" or ".join(FAMILIES))
    family: Family = import_module(f".families.{name}", __package__).FAMILY
    return family


def detect_family(target: Path | str) -> str:
    """Return the family of a target by `model_type` in its config.json.

    It is the default family if no family or several have the type, and for a file.

    Args:
        target: path, or hub reference, of which config.json is downloaded.
    """
    from .checkpoints.hub import fetch

    file = isinstance(target, str) and target.startswith(HUB) and parse_reference(target, CheckpointError)[1]
    try:
        readers = [] if file else _find_readers(fetch(target, ("config.json",)))
    except CheckpointError:  # raised again when the target is read
        readers = []
    return readers[0] if len(readers) == 1 else FAMILIES[0]


def check_family(name: str, options: Mapping[str, Any]) -> Family:
    """Return the record of a family after checking the options for its reader.

    Raises:
        CheckpointError: the family is unknown, does not take an option, or lacks a required option.
        RequestError: `grid` is out of range.
    """
    family = find_family(name)
    from .families.common import check_grid

    check_grid(options.get("grid"))
    for option, value in options.items():
        if value is not None and option not in family.options:
            raise CheckpointError(f"family {name} does not take it", field=option, remedy="leave it out")
    for option, required in family.options.items():
        if required and options.get(option) is None:
            raise CheckpointError(field=option, found="nothing", expected=f"a checkpoint, which family {name} needs")
    return family


def read_family(
    name: str, options: Mapping[str, Any], progress: Progress = ignore_progress, cfg_scale: float | None = None
) -> Model:
    """Read the checkpoints of a family.

    Args:
        name: name of a family in `FAMILIES`.
        options: values of options by name. Checkpoints are paths or hub references, whose files are downloaded; `lora`
            is a list of these, each with or without `:scale`. None means not given.
        progress: progress callback, called for each checkpoint.
        cfg_scale: default guidance scale of the bundle; None: the family's.

    Raises:
        CheckpointError: the checkpoints do not fit, or cannot be read.
        RequestError: an option is out of range, or a hub reference is malformed.
        EngineError: a library that they need is not installed.
    """
    family = check_family(name, options)
    from .checkpoints import lora
    from .checkpoints.files import raises_checkpoint_error
    from .checkpoints.folders import Checkpoint
    from .checkpoints.hub import fetch

    arguments = {option: value for option, value in options.items() if value is not None}
    target = fetch(arguments.pop("target"), family.files, family.side_files)
    arguments |= {role: fetch(arguments[role]) for role in CHECKPOINTS if role in arguments}
    places = [lora.split_scale(text) for text in arguments.pop("lora", ())]
    files = (lora.CONFIG, lora.WEIGHTS)
    adapters = [lora.read_adapter(fetch(place, files), scale) for place, scale in places]

    def read(path: Path) -> Model:
        _check_model_type(name, path)
        progress("reading checkpoints", 0, 0)
        return family.read(Checkpoint(path, progress=progress, adapters=adapters), **arguments)

    model = raises_checkpoint_error(read)(target)
    fields = {**model.fields, "family": name}
    if cfg_scale is not None:
        fields["sampling"] = fields["sampling"].model_copy(update={"cfg_scale": cfg_scale})
    return replace(model, fields=fields)


def _find_readers(target: Path) -> list[str]:
    """Return the families with the `model_type` of a target; empty for a file."""
    from .checkpoints.files import read_config

    path = target / "config.json"
    if not isfile(path):
        return []
    config = read_config(path)
    kind = config.get("model_type")
    families = {name: find_family(name) for name in FAMILIES}
    return [name for name, family in families.items() if kind in family.model_types and family.fits(config)]


def _check_model_type(name: str, target: Path) -> None:
    """Check that a target is not of other families, which are then named. Raises: CheckpointError."""
    from .checkpoints.files import read_config

    readers = _find_readers(target)
    if readers and name not in readers:
        expected = f"a model of family {name}"
        remedy = f"give `--family {' or '.join(readers)}`, or another target"
        raise read_config(target / "config.json").error("model_type", expected=expected, remedy=remedy)
