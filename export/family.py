"""Description of a model family: the reader of its checkpoints, its files and its export options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoints.files import Config
    from .model import BundleContents


@dataclass(frozen=True)
class ModelFamily:
    """Description of a model family.

    Args:
        read_model: reads the checkpoints and returns the contents of a bundle. Its first parameter is the `Checkpoint`
            of the target; the others are the options of `export` that the family accepts. It raises CheckpointError if
            a file is missing or damaged, or belongs to another model.
        download_patterns: names of files in the target's repository to download instead of a model's weights, such as
            `processor/*`. The first name must not have wildcards.
        optional_files: names of files to download with the weights of the target, if they exist.
        model_types: values of `model_type` in config.json that identify the family.
        accepts_config: tells whether a config.json with a `model_type` in `model_types` belongs to the family.
    """

    read_model: Callable[..., BundleContents]
    download_patterns: tuple[str, ...] = ()
    optional_files: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    accepts_config: Callable[[Config], bool] = lambda config: True

    @property
    def export_options(self) -> dict[str, bool]:
        """Whether an export option that the family accepts is required, by name of the option."""
        parameters = signature(self.read_model).parameters.values()
        return {item.name: item.default is item.empty for item in parameters} | {"lora": False}
