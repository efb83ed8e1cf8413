"""Which checkpoints each model family is exported from, fetching and reading them: for `export` and `verify`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError

if TYPE_CHECKING:
    from ..export.writer import Model

# Which options a family takes besides the target; each has a reader `read_<family>` in `export.families.<family>`.
_TAKES = {
    "llamagen": ("vq", "drafter", "text_encoder", "model", "config", "grid", "heads"),
    "anole": ("vq", "drafter", "grid"),
    "janus": (),
}
FAMILIES = tuple(_TAKES)
# Fetched with weights, where not config.json alone.
_SIDE_FILES = {
    "text_encoder": ("config.json", "tokenizer.json"),
    "anole target": ("config.json", "tokenizer.json"),
    "janus target": ("config.json", "generation_config.json", "tokenizer.json"),
}


@dataclass(frozen=True)
class Checkpoints:
    """What a bundle is made from, as the user gave it; `verify` adds what the bundle's manifest tells."""

    target: Path
    vq: Path | None = None
    drafter: Path | None = None
    text_encoder: Path | None = None
    model: str | None = None
    config: Path | None = None
    grid: int | None = None
    heads: int | None = None

    def check(self, family: str) -> None:
        """Refuse what the family does not take, or needs and was not given. Raises: CheckpointError."""
        for option in ("vq", "drafter", "text_encoder", "model", "config", "grid"):
            if getattr(self, option) is not None and option not in _TAKES[family]:
                raise CheckpointError(f"--{option.replace('_', '-')}: family {family} does not take it; leave it out")
        if self.vq is None and "vq" in _TAKES[family]:
            raise CheckpointError(f"--vq: found nothing, expected the VQ tokenizer that belongs to the {family} target")

    def fetched(self, family: str) -> tuple[Checkpoints, dict[Path, str]]:
        """The same on this machine, and where each path that was fetched came from; errors as `hub.fetch` has them."""
        from ..export.checkpoints.hub import fetch

        paths: dict[str, Any] = {}
        origins: dict[Path, str] = {}
        for role in ("target", "vq", "drafter", "text_encoder"):
            if place := getattr(self, role):
                sides = _SIDE_FILES.get(role, _SIDE_FILES.get(f"{family} {role}", ("config.json",)))
                found = fetch(place, sides)
                paths[role] = found.path
                if found.origin:
                    origins[found.path] = found.origin
        return replace(self, **paths), origins


def read_family(family: str, given: Checkpoints) -> Model:
    """The model that a family's checkpoints, all on this machine, make. Raises: CheckpointError, RequestError."""
    read = getattr(import_module(f"...export.families.{family}", __name__), f"read_{family}")
    model: Model = read(given.target, **{option: getattr(given, option) for option in _TAKES[family]})
    return model
