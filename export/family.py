"""The record of a model family: how its checkpoints are read, and which files and options belong to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoints.files import Config
    from .model import Model


@dataclass(frozen=True)
class Family:
    """A model family.

    Args:
        read: reader, which returns the contents of a bundle. Its first parameter is the `Checkpoint` of the target, and
            the others are options of `export` that the family takes.
        files: files of the target's repository, or patterns, to download instead of a model's weights; the first is a
            file.
        side_files: files to download with the weights of the target, if they exist.
        model_types: values of `model_type` in config.json by which users who choose another family learn of it.
        fits: function that tells whether a config.json with such a value is the family's.
    """

    read: Callable[..., Model]
    files: tuple[str, ...] = ()
    side_files: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    fits: Callable[[Config], bool] = lambda config: True

    @property
    def options(self) -> dict[str, bool]:
        """Options of `export` that the family takes, each with whether it is required."""
        parameters = signature(self.read).parameters.values()
        return {item.name: item.default is item.empty for item in parameters} | {"lora": False}
