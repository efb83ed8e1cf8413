"""Options of builds of TensorRT engines, and the profiles (ranges of shapes) that they are built for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ..bundle.manifest import Manifest
from ..errors import RequestError
from ..inputs import format_value
from ..methods import FrozenModel
from .kv_cache import COLUMN_STEP, round_up

RTX = "tensorrt-rtx"
BACKENDS = ("tensorrt", RTX)
Size = Annotated[int, Field(ge=0, le=1 << 24)]
Range = tuple[Size, Size, Size]  # smallest, optimal, largest


class ShapeProfile(FrozenModel):
    """A TensorRT optimization profile: ranges of the input shapes of one kind of forward pass.

    Attributes:
        name: `ar`, `tree`, or `rows` for the image decoder.
        rows: batch rows.
        nodes: nodes of a row.
        columns: columns of a cache that nodes attend to.
    """

    name: str
    rows: Range
    nodes: Range
    columns: Range


@dataclass(frozen=True)
class BuildOptions:
    """User options for building TensorRT engines.

    Args:
        backend: `tensorrt` or `tensorrt-rtx`.
        max_rows: maximum number of batch rows per pass, 1 .. 4096; an image has two with guidance.
        max_nodes: maximum number of new nodes of a row per pass, 2 .. 4096, no fewer than the tree has.
        compute_capabilities: GPUs such as `SM89`, for `tensorrt-rtx` only; empty: the GPU of this host.

    Raises:
        RequestError: unknown backend, number out of range, or GPUs given for `tensorrt`.
    """

    backend: str
    max_rows: int = 8
    max_nodes: int = 64
    compute_capabilities: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise RequestError(
                field="backend", found=format_value(self.backend), expected=f"one of {', '.join(BACKENDS)}"
            )
        for name, value, low in (("max_rows", self.max_rows, 1), ("max_nodes", self.max_nodes, 2)):
            if not low <= value <= 4096:
                raise RequestError(field=name, found=format_value(value), expected=f"{low} .. 4096")
        if self.compute_capabilities and self.backend != RTX:
            raise RequestError(field="compute_capability", found=f"backend {self.backend}", expected=RTX)


def count_profile_columns(shape_profiles: Sequence[ShapeProfile]) -> int:
    """Return the number of cache columns that passes of these profiles need."""
    return max(profile.columns[2] for profile in shape_profiles)


def profiles(manifest: Manifest, role: str, options: BuildOptions) -> tuple[ShapeProfile, ...]:
    """Return the profiles of a graph: two for a decoder; one for the image decoder, which has rows only.

    Args:
        role: `target`, `drafter` or `vq_decoder`.
    """
    if role not in ("target", "drafter"):
        return (ShapeProfile(name="rows", rows=(1, 1, 1), nodes=(0, 0, 0), columns=(0, 0, 0)),)
    rows = (1, min(2, options.max_rows), options.max_rows)
    nodes = options.max_nodes
    largest = round_up(manifest.condition.prefix + manifest.max_image_tokens + nodes)  # an image, then the largest pass
    if role == "drafter":
        largest += round_up(nodes)  # cached until the draft has been verified
    columns = (COLUMN_STEP, max(COLUMN_STEP, round_up(largest // 2)), largest)
    return (
        ShapeProfile(name="ar", rows=rows, nodes=(2, 2, 2), columns=columns),
        ShapeProfile(name="tree", rows=rows, nodes=(2, nodes, max(nodes, manifest.condition.prefix)), columns=columns),
    )
