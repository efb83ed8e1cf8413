"""The record of a model family: how its checkpoints are read, and which files and options belong to them."""

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
    """A model family.

    Args:
        read_model: reader, which returns the contents of a bundle. Its first parameter is the `Checkpoint` of the
            target, and the others are options of `export` that the family takes.
        download_patterns: files of the target's repository, or patterns, to download instead of a model's weights; the
            first is a file.
        optional_files: files to download with the weights of the target, if they exist.
        model_types: values of `model_type` in config.json by which users who choose another family learn of it.
        accepts_config: function that tells whether a config.json with one of these values belongs to the family.
    """

    read_model: Callable[..., BundleContents]
    download_patterns: tuple[str, ...] = ()
    optional_files: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    accepts_config: Callable[[Config], bool] = lambda config: True

    @property
    def export_options(self) -> dict[str, bool]:
        """Options of `export` that the family takes, each with whether it is required."""
        parameters = signature(self.read_model).parameters.values()
        return {item.name: item.default is item.empty for item in parameters} | {"lora": False}
