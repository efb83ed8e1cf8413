"""Options for building TensorRT engines, and the optimization profiles (ranges of shapes) of the engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ..bundle.manifest import DECODERS, Manifest
from ..errors import RequestError
from ..inputs import format_value
from ..methods import FrozenModel
from .kv_cache import COLUMN_STEP, round_up

RTX = "tensorrt-rtx"
BACKENDS = ("tensorrt", RTX)
Size = Annotated[int, Field(ge=0, le=1 << 24)]
Range = tuple[Size, Size, Size]  # smallest size, size that TensorRT optimizes for, largest size


class ShapeProfile(FrozenModel):
    """TensorRT optimization profile: ranges of the sizes of a forward pass."""

    # `ar` for autoregressive passes, `tree` for passes over a prefix or draft tree, `rows` for the VQ decoder.
    name: str
    rows: Range
    nodes: Range  # number of new nodes per row; 0 for the VQ decoder
    columns: Range  # number of cache columns that nodes attend to; 0 for the VQ decoder


@dataclass(frozen=True)
class BuildOptions:
    """Checked user options for building TensorRT engines."""

    backend: str  # `tensorrt` or `tensorrt-rtx`
    max_rows: int = 8  # maximum number of batch rows per pass, 1 .. 4096; an image with guidance has two rows.
    max_nodes: int = 64  # maximum number of new nodes per row and pass, 2 .. 4096, at least the size of a draft tree.
    # Compute capabilities of the GPUs to build for, such as `SM89`; for `tensorrt-rtx` only. Empty: the GPU of this
    # host.
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
    return max(profile.columns[2] for profile in shape_profiles)


def profiles(manifest: Manifest, role: str, options: BuildOptions) -> tuple[ShapeProfile, ...]:
    """Return the optimization profiles of a graph: two for a decoder, and one for the VQ decoder."""
    if role not in DECODERS:
        return (ShapeProfile(name="rows", rows=(1, 1, 1), nodes=(0, 0, 0), columns=(0, 0, 0)),)
    rows = (1, min(2, options.max_rows), options.max_rows)
    nodes = options.max_nodes
    # The cache holds the prefix and all tokens of an image, and then the nodes of the largest pass.
    largest = round_up(manifest.condition.prefix + manifest.max_image_tokens + nodes)
    if role == "drafter":
        largest += round_up(nodes)  # the drafter caches draft nodes until the target has verified them
    columns = (COLUMN_STEP, max(COLUMN_STEP, round_up(largest // 2)), largest)
    return (
        ShapeProfile(name="ar", rows=rows, nodes=(2, 2, 2), columns=columns),
        ShapeProfile(name="tree", rows=rows, nodes=(2, nodes, max(nodes, manifest.condition.prefix)), columns=columns),
    )
