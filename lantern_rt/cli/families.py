"""Which checkpoints each model family is exported from, fetching and reading them: for `export` and `verify`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import CheckpointError
from .console import progress

if TYPE_CHECKING:
    from ..engines.contracts import Progress
    from ..export.writer import Model

# Which options a family takes besides the target; each has a reader `read_<family>` in `export.families.<family>`.
_TAKES = {
    "llamagen": ("vq", "drafter", "text_encoder", "model", "config", "grid", "heads"),
    "anole": ("vq", "drafter", "grid"),
    "lumina": ("vq", "drafter", "grid"),
    "janus": (),
    "emu3": ("vq", "grid"),
}
FAMILIES = tuple(_TAKES)
_MAY_HOLD_VQ = ("emu3",)  # in the target's folder; their readers miss it
# Fetched with weights, where not config.json alone.
_SIDE_FILES = {
    ("llamagen", "text_encoder"): ("config.json", "tokenizer.json"),
    ("anole", "target"): ("config.json", "tokenizer.json"),
    ("lumina", "target"): ("config.json", "tokenizer.json"),
    ("janus", "target"): ("config.json", "generation_config.json", "tokenizer.json"),
    ("emu3", "target"): ("config.json", "tokenizer.json", "emu3.tiktoken", "emu3_vision_tokens.txt"),
}


@dataclass(frozen=True)
class Checkpoints:
    """What a bundle is made from, as the user gave it; `verify` adds what the bundle's manifest tells."""

    target: Annotated[
        Path, typer.Option(help="Checkpoint of the target: a file or folder, or hf:owner/name[/file][@revision].")
    ]
    vq: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoint of the VQ model: a file, or hf:owner/name/file[@revision]; for anole and lumina also a "
            "folder with vqgan.ckpt and vqgan.yaml, for emu3 the folder of Emu3-VisionTokenizer."
        ),
    ] = None
    drafter: Annotated[
        Path | None, typer.Option(help="Folder of an EAGLE drafter in LANTERN's layout, or hf:owner/name[@revision].")
    ] = None
    text_encoder: Annotated[
        Path | None,
        typer.Option(
            help="Folder of flan-t5-xl, or hf:google/flan-t5-xl: the bundle then takes prompts instead of embeddings."
        ),
    ] = None
    model: Annotated[str | None, typer.Option(help="Size by name, such as GPT-XL, where the weights do not tell.")] = (
        None
    )
    config: Annotated[Path | None, typer.Option(help="JSON file with sizes that the weights do not tell.")] = None
    grid: Annotated[int | None, typer.Option(help="Codes per side of an image, where the weights do not tell.")] = None
    heads: int | None = None

    def check(self, family: str) -> None:
        """Refuse what the family does not take, or needs and was not given. Raises: CheckpointError."""
        for option, value in vars(self).items():
            if value is not None and option not in ("target", "heads", *_TAKES[family]):
                raise CheckpointError(f"--{option.replace('_', '-')}: family {family} does not take it; leave it out")
        if self.vq is None and "vq" in _TAKES[family] and family not in _MAY_HOLD_VQ:
            raise CheckpointError(f"--vq: found nothing, expected the VQ tokenizer that belongs to the {family} target")

    def fetched(self, family: str) -> tuple[Checkpoints, dict[Path, str]]:
        """The same on this machine, and where each path that was fetched came from; errors as `hub.fetch` has them.

        On a terminal the hub's library shows bars of its own.
        """
        from ..export.checkpoints.hub import fetch

        paths: dict[str, Any] = {}
        origins: dict[Path, str] = {}
        with progress(unit="bytes") as show:
            for role in ("target", "vq", "drafter", "text_encoder"):
                if place := getattr(self, role):
                    found = fetch(place, _SIDE_FILES.get((family, role), ("config.json",)), show)
                    paths[role] = found.path
                    origins |= {found.path: found.origin} if found.origin else {}
        return replace(self, **paths), origins


def read_family(family: str, given: Checkpoints, show: Progress) -> Model:
    """The model that a family's checkpoints, all on this machine, make.

    show: told of every checkpoint how much of it is read. Raises: CheckpointError, RequestError.
    """
    show("reading checkpoints", 0, 0)
    from ..export.progress import telling

    read = getattr(import_module(f"...export.families.{family}", __name__), f"read_{family}")
    with telling(show):
        model: Model = read(given.target, **{option: getattr(given, option) for option in _TAKES[family]})
    return model
