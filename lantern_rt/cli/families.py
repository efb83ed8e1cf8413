"""Which checkpoints each model family is exported from, fetching them, and its exporter: for `export` and `verify`.

Does not know graphs or bundles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

# Which options a family takes besides those that all do.
_TAKES = {
    "llamagen": ("vq", "drafter", "text_encoder", "model", "config", "grid"),
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
    """What a bundle is made from, as the user gave it."""

    target: Path
    vq: Path | None = None
    drafter: Path | None = None
    text_encoder: Path | None = None
    model: str | None = None
    config: Path | None = None
    grid: int | None = None

    def check(self, family: str) -> None:
        """Refuse what the family does not take, or needs and was not given."""
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


def export_family(family: str, given: Checkpoints, output: Path, common: Mapping[str, Any]) -> None:
    """Hand over to a family's exporter; `common`: what all of them take."""
    if family == "janus":
        from ..export.families.janus import export_janus

        export_janus(given.target, output, **common)
        return
    assert given.vq is not None
    if family == "anole":
        from ..export.families.anole import export_anole

        export_anole(given.target, given.vq, output, drafter=given.drafter, grid=given.grid, **common)
    else:
        from ..export.families.llamagen import export_llamagen

        export_llamagen(
            given.target,
            given.vq,
            output,
            drafter=given.drafter,
            text_encoder=given.text_encoder,
            model=given.model,
            config=given.config,
            grid=given.grid,
            **common,
        )
