"""How a build is asked for, and the shapes it is made for: plain decoding; prefixes and trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from pydantic import Field

from ..bundle.manifest import Manifest, Part
from ..errors import RequestError
from .kv_cache import SPAN_STEP, round_up
from .ort.providers import DEFAULT_PROVIDER

Size = Annotated[int, Field(ge=0, le=1 << 24)]
Range = tuple[Size, Size, Size]  # smallest, the one to tune for, largest


class Profile(Part):
    """Ranges of one kind of pass. columns: of a cache, from the first to the last one that a node sees."""

    name: str
    rows: Range
    nodes: Range
    columns: Range


@dataclass(frozen=True)
class BuildOptions:
    """What a user may say about a build; None is the backend's own default.

    max_rows: sequences per pass; guidance makes two of every image. max_nodes: new nodes per pass, at least the
    tree's. max_past: columns before a pass, by default the prefix and all codes. compute_capabilities: such as `SM89`.
    """

    backend: str
    provider: str = DEFAULT_PROVIDER
    max_rows: int = 8
    max_nodes: int = 64
    max_past: int | None = None
    compute_capabilities: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("max-rows", self.max_rows, 1, 4096),
            ("max-nodes", self.max_nodes, 2, 4096),
            ("max-past", self.max_past, 1, 1 << 20),
        ):
            if value is not None and not low <= value <= high:
                raise RequestError(f"{name}: found {value}, expected {low} .. {high}")

    def given(self) -> dict[str, tuple[Any, ...]]:
        """Values that differ from their defaults, by the command line's flags (`--max-rows`)."""
        found = {}
        for field in fields(self)[1:]:
            if (value := getattr(self, field.name)) != field.default:
                flag = field.name.replace("_", "-").replace("capabilities", "capability")
                found[f"--{flag}"] = value if isinstance(value, tuple) else (value,)
        return found


def capacity(manifest: Manifest, role: str, options: BuildOptions) -> int:
    """Columns of a cache: a whole image, or as many as asked for, and the largest pass; a multiple of `SPAN_STEP`.

    Raises: RequestError if fewer are asked for than an image needs.
    """
    needed = manifest.condition.prefix + manifest.picture_tokens
    if options.max_past is not None and options.max_past < needed:
        why = f"prefix {manifest.condition.prefix} and {manifest.picture_tokens} codes of one image"
        raise RequestError(f"max-past: found {options.max_past}, expected at least {needed}: {why}")
    drafted = round_up(options.max_nodes) if role == "drafter" else 0  # cached until the draft has been verified
    return round_up((options.max_past or needed) + options.max_nodes) + drafted


def capacity_of(built: Sequence[Profile]) -> int:
    """Columns of a cache for passes of these profiles."""
    return max(profile.columns[2] for profile in built)


def profiles(manifest: Manifest, role: str, options: BuildOptions) -> tuple[Profile, ...]:
    """The profiles of a graph: two for a decoder; one for the image decoder, which has rows only."""
    if role not in ("target", "drafter"):
        return (Profile(name="rows", rows=(1, 1, 1), nodes=(0, 0, 0), columns=(0, 0, 0)),)
    rows, largest = (1, min(2, options.max_rows), options.max_rows), capacity(manifest, role, options)
    columns, nodes = (SPAN_STEP, max(SPAN_STEP, round_up(largest // 2)), largest), options.max_nodes
    return (
        Profile(name="ar", rows=rows, nodes=(2, 2, 2), columns=columns),
        Profile(name="tree", rows=rows, nodes=(2, nodes, max(nodes, manifest.condition.prefix)), columns=columns),
    )
