"""List of the model families, and the reader of their checkpoints for `export` and `verify`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from os.path import isfile
from typing import TYPE_CHECKING, Any

from ..bundle.hub import HUB, parse_hub_reference
from ..engines.contracts import Progress
from ..errors import CheckpointError
from .family import ModelFamily
from .progress import ignore_progress

if TYPE_CHECKING:
    from pathlib import Path

    from .model import BundleContents

# Names of the modules in `export.families`, each with a `ModelFamily` named `FAMILY`. The first is the default family.
FAMILIES = (
    "llamagen",
    "gear",
    "par",
    "nar",
    "rar",
    "anole",
    "lumina",
    "lumina2",
    "glm_image",
    "janus",
    "emu3",
    "emu35",
    "simplear",
    "prologue",
)
CHECKPOINTS = ("target", "vq", "drafter", "text_encoder", "config")  # the options that are paths


def load_model_family(family_name: str) -> ModelFamily:
    """Return the description of a family by name; this imports PyTorch. Raises: CheckpointError."""
    if family_name not in FAMILIES:
        raise CheckpointError(field="family", found=repr(family_name), expected=" or ".join(FAMILIES))
    family: ModelFamily = import_module(f".families.{family_name}", __package__).FAMILY
    return family


def detect_model_family(target: Path | str) -> str | None:
    """Return the name of the family that a target belongs to, by `model_type` in its config.json.

    The result is None if the target, a path or hub reference, is a file, or if not exactly one family has the type.

    Raises:
        CheckpointError: the target does not exist, the hub rejects it, or it is part of a checkpoint.
    """
    from .checkpoints.hub import fetch_checkpoint
    from .checkpoints.lora import CONFIG

    if isinstance(target, str) and target.startswith(HUB) and parse_hub_reference(target, CheckpointError)[1]:
        return None
    folder = fetch_checkpoint(target, ("config.json",))
    if (folder / CONFIG).is_file():
        problem = "a LoRA adapter, not a model"
        raise CheckpointError(problem, field=str(target), remedy="give it as --lora, and its base model as the target")
    if folder.is_file() and _find_matching_families(folder.parent):
        raise CheckpointError("one file of a checkpoint", field=str(target), remedy=f"give its folder, {folder.parent}")
    readers = _find_matching_families(folder)
    return readers[0] if len(readers) == 1 else None


def check_family_options(family_name: str, options: Mapping[str, Any]) -> ModelFamily:
    """Check the export options of a family (None: not given), and return its description.

    Raises CheckpointError, or RequestError if `grid` is out of range.
    """
    family = load_model_family(family_name)
    from .families.common import check_grid_rows

    check_grid_rows(options.get("grid"))
    for option, value in options.items():
        if value is not None and option not in family.export_options:
            raise CheckpointError(f"family {family_name} does not take it", field=option, remedy="leave it out")
    for option, required in family.export_options.items():
        if required and options.get(option) is None:
            raise CheckpointError(
                field=option, found="nothing", expected=f"a checkpoint, which family {family_name} needs"
            )
    return family


def read_family_checkpoints(
    family_name: str, options: Mapping[str, Any], progress: Progress = ignore_progress, cfg_scale: float | None = None
) -> BundleContents:
    """Read the checkpoints of a family.

    Args:
        options: values of options by name; None: not given. Checkpoints are paths or hub references, whose files are
            downloaded; `lora` is a list of paths or references of adapters, each optionally with `:scale`.
        cfg_scale: default guidance scale of the bundle; None: the default of the family.

    Raises:
        CheckpointError: the checkpoints do not fit together, or cannot be read.
        RequestError: an option is out of range, or a hub reference is malformed.
        EngineError: a library that the family needs is not installed.
    """
    family = check_family_options(family_name, options)
    from .checkpoints import lora
    from .checkpoints.files import wrap_reader_errors
    from .checkpoints.folders import Checkpoint
    from .checkpoints.hub import fetch_checkpoint
    from .torch_settings import default_torch_settings

    arguments = {option: value for option, value in options.items() if value is not None}
    target = fetch_checkpoint(arguments.pop("target"), family.download_patterns, family.optional_files)
    arguments |= {role: fetch_checkpoint(arguments[role]) for role in CHECKPOINTS if role in arguments}
    places = [lora.split_folder_and_scale(text) for text in arguments.pop("lora", ())]
    files = (lora.CONFIG, lora.WEIGHTS)

    def read_target(path: Path) -> BundleContents:
        _check_target_family(family_name, path)
        progress("reading checkpoints", 0, 0)
        return family.read_model(Checkpoint(path, progress=progress, adapters=adapters), **arguments)

    with default_torch_settings():
        adapters = [lora.read_adapter(fetch_checkpoint(place, files), scale) for place, scale in places]
        model = wrap_reader_errors(read_target)(target)
    manifest_fields = {**model.manifest_fields, "family": family_name}
    if cfg_scale is not None:
        manifest_fields["sampling"] = manifest_fields["sampling"].model_copy(update={"cfg_scale": cfg_scale})
    return replace(model, manifest_fields=manifest_fields)


def _find_matching_families(target_folder: Path) -> list[str]:
    """Return the families that accept a target's config.json; none if the target is a file."""
    from .checkpoints.files import read_config

    path = target_folder / "config.json"
    if not isfile(path):
        return []
    config = read_config(path)
    kind = config.get("model_type")
    families = {name: load_model_family(name) for name in FAMILIES}
    return [name for name, family in families.items() if kind in family.model_types and family.accepts_config(config)]


def _check_target_family(family_name: str, target_folder: Path) -> None:
    """Raise CheckpointError if the config.json of a target belongs to other families, which the message names."""
    from .checkpoints.files import read_config

    readers = _find_matching_families(target_folder)
    if readers and family_name not in readers:
        expected = f"a model of family {family_name}"
        remedy = f"give `--family {' or '.join(readers)}`, or another target"
        raise read_config(target_folder / "config.json").make_error("model_type", expected=expected, remedy=remedy)
