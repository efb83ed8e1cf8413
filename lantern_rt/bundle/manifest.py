"""The manifest `bundle.json`, as pydantic models that reject unknown fields; `docs/bundle-format.md` describes them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from ..methods import FrozenModel, Method, MethodConfig, Quality, Sampling, SpeculativeJacobi
from ..runtime.layout import ImageLayout
from ..runtime.raster import RasterLayout, RowEndLayout, TwoGridLayout
from .conditions import ConditionSpec
from .decoder import Architecture
from .numbers import MAX_PIXELS, Count, Pixels, Side, SmallCount, TokenId
from .order import GroupOrderSpec

FORMAT_VERSION = "4.0"
DECODERS = ("target", "prefix", "drafter")  # roles of the graphs of decoders
_BLOCK = 1 << 20  # Number of bytes hashed at a time.

Precision = Literal["fp32", "fp16", "bf16-safe", "bf16", "int8-weights", "int4-weights", "int8"]


def compute_sha256(path: Path, progress: Callable[[int], None] = lambda size: None) -> str:
    """Compute the sha256 of a file as hex digits; `progress` gets the number of bytes of each block."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_BLOCK):
            digest.update(piece)
            progress(len(piece))
    return digest.hexdigest()


class FileEntry(FrozenModel):
    """Manifest entry of a file; its `path` is relative to the bundle's folder, with forward slashes."""

    path: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    bytes: Annotated[int, Field(ge=0, le=2**50)]

    @classmethod
    def from_file(cls, path: Path, progress: Callable[[int], None] = lambda size: None) -> FileEntry:
        """Create the entry of a file that lies directly in the bundle's folder."""
        return cls(path=path.name, sha256=compute_sha256(path, progress), bytes=path.stat().st_size)


class DecoderSizes(FrozenModel):
    """Sizes of target and drafter, whose KV caches have the shape `[past, rows, num_kv_heads, head_dim]`."""

    role: ClassVar[Literal["target", "drafter"]]
    hidden_size: Count
    num_layers: SmallCount
    num_kv_heads: SmallCount
    head_dim: SmallCount
    vocab_size: Count
    architecture: Architecture


class DecoderSpec(DecoderSizes):
    """Sizes and precision of the image model (the target). Only devices compute in the `dtype` `bfloat16`."""

    role = "target"
    max_positions: Count
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    cache_layout: Literal["past-first"] = "past-first"
    precision: Precision = "fp32"


class DrafterSpec(DecoderSizes):
    """Manifest entry of an EAGLE drafter, whose input p (slot p) is token p + 1 and the target's hidden state p."""

    role = "drafter"
    position_shift: Annotated[int, Field(ge=-1, le=1024)] = -1
    masks_prefix: bool = True
    prefix_token: TokenId = 0
    code_offset: TokenId = 0
    precision: Precision = "fp32"
    head_codes: Count | None = None


class DraftHeadsSpec(FrozenModel):
    """Draft heads (`runtime/heads.py`), which propose tokens for windows and draft trees."""

    rank: SmallCount
    units: SmallCount


class Size(FrozenModel):
    """Image size that a bundle can generate; its name is width and height in pixels, such as `512x384`."""

    name: Annotated[str, Field(pattern=r"^[1-9]\d{0,3}x[1-9]\d{0,3}$")]
    rows: Side
    columns: Side
    tokens: tuple[TokenId, ...] = ()
    first_grid: tuple[Side, Side] | None = None
    first_position: Count | None = None
    source_tokens: tuple[TokenId, ...] = ()

    def with_source_image(self) -> Size:
        """Return this size for images that are generated from a source image. These images have no first grid."""
        first = (self.first_position or 0) + self.first_codes
        return self.model_copy(update={"tokens": self.source_tokens, "first_grid": None, "first_position": first})

    @property
    def first_codes(self) -> int:
        return 0 if self.first_grid is None else self.first_grid[0] * self.first_grid[1]

    @property
    def codes(self) -> int:
        return self.first_codes + self.rows * self.columns


class SourceImageSpec(FrozenModel):
    """Layout of prompts with a source image, whose codes come before the token ids of the text."""

    before: Annotated[tuple[TokenId, ...], Field(max_length=16)]
    after: Annotated[tuple[TokenId, ...], Field(max_length=16)]
    pixels_per_cell: SmallCount

    def count_prompt_tokens(self, size: Size) -> int:
        """Return the number of token ids before the text."""
        return len(self.before) + size.rows * size.columns + len(self.after)


class DecodingDefaults(FrozenModel):
    """Default parameters of decoding methods that differ from the defaults in `methods.py`."""

    methods: tuple[Method, ...] = ()

    @model_validator(mode="after")
    def _check_unique_methods(self) -> DecodingDefaults:
        names = [config.method for config in self.methods]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"method {repeated} has defaults twice; expected each method once")
        return self


class PresetMeasurements(FrozenModel):
    """Measurements of a preset's method by `lantern-rt eval`.

    Attributes:
        tokens_per_pass: mean number of tokens of an image per forward pass of the target.
        excess_nll: negative log-likelihood minus entropy, in nats per token, as a difference to plain decoding.
        agreement: prompt agreement in percentage points, as a difference to plain decoding; None: not measured.
    """

    tokens_per_pass: Annotated[float, Field(gt=0, le=1e6)]
    excess_nll: float
    agreement: float | None = None
    images: Count
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]


class Preset(FrozenModel):
    """Decoding method that a quality (`strict`, `balanced` or `fast`) selects.

    Only `strict` may have another method for GPUs and other devices, where more nodes per forward pass cost little
    time.
    """

    method: Method
    devices: Method | None = None
    figures: PresetMeasurements | None = None


# The default preset. On three CPUs it is within 4 % of the best window (benchmarks/NOTES.md). The method for devices
# is not measured.
STRICT = Preset(method=SpeculativeJacobi(window=7), devices=SpeculativeJacobi(window=15))


def _add_strict_preset(presets: dict[Quality, Preset]) -> dict[Quality, Preset]:
    return {"strict": STRICT, **presets}


class CheckpointFileRecord(FrozenModel):
    """Record of a checkpoint file that was exported; its origin is a hub reference, None for a local file."""

    role: str
    name: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    origin: str | None = None


class Provenance(FrozenModel):
    """Origin of a bundle."""

    exporter: str
    sources: tuple[CheckpointFileRecord, ...] = ()
    licence: str
    weights: Literal["model", "ema"] | None = None
    calibration: str | None = None


class Manifest(FrozenModel):
    """Contents of `bundle.json`."""

    format_version: str
    name: str
    family: str
    grid_rows: Side
    grid_columns: Side
    codebook_size: Count
    image_height: Pixels
    image_width: Pixels
    sizes: Annotated[tuple[Size, ...], Field(max_length=1024)] = ()
    row_end: TokenId | None = None
    order: GroupOrderSpec | None = None
    source: SourceImageSpec | None = None
    neighbors: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    target: DecoderSpec
    drafter: DrafterSpec | None = None
    heads: DraftHeadsSpec | None = None
    condition: ConditionSpec
    vq_precision: Literal["fp32", "fp16", "int8"] = "fp32"
    sampling: Sampling
    decoding: DecodingDefaults
    presets: Annotated[dict[Quality, Preset], AfterValidator(_add_strict_preset)] = Field(
        default={}, validate_default=True
    )
    files: dict[str, FileEntry]
    provenance: Provenance

    @property
    def decoders(self) -> dict[str, DecoderSpec | DrafterSpec]:
        """Sizes of the decoders by role. `prefix`, which few bundles have, runs passes over prefixes for the target."""
        specs = self.target, self.target if "prefix" in self.files else None, self.drafter
        return {role: spec for role, spec in zip(DECODERS, specs, strict=True) if spec is not None}

    def list_graphs_of_decoder(self, role: str) -> list[str]:
        """Return the roles of the graphs that run a decoder's passes: its own and, for the target, perhaps `prefix`."""
        return [name for name, spec in self.decoders.items() if spec.role == role]

    @property
    def drafters(self) -> list[str]:
        """Names of the drafters that can make draft trees, `heads` and `eagle`, the default first."""
        return [name for name, spec in (("heads", self.heads), ("eagle", self.drafter)) if spec is not None]

    @model_validator(mode="after")
    def _check_consistency(self) -> Manifest:
        needed = {"target", "condition", "code_embeddings"}
        words = self.condition.kind in ("words", "text", "tokens")
        optional = {"drafter": self.drafter, "heads": self.heads, "neighbors": self.neighbors, "tokenizer": words}
        if missing := sorted((needed | {role for role, used in optional.items() if used}) - self.files.keys()):
            raise ValueError(f"`files` lacks {', '.join(missing)}")
        heads = 2 if self.order is not None and self.order.two_heads else 1
        if (vocab_size := self.target.vocab_size) != heads * self.codebook_size:
            times = "twice " if heads == 2 else ""
            raise ValueError(f"target vocab_size {vocab_size} is not {times}codebook_size {self.codebook_size}")
        if self.drafter and self.drafter.hidden_size != (expected := self.target.hidden_size):
            raise ValueError(f"drafter hidden_size {self.drafter.hidden_size} is not the target's, {expected}")
        start = self.condition.find_first_position(None) or self.condition.prefix
        if (tokens := start + self.max_image_tokens - 1) > (limit := self.target.max_positions):
            raise ValueError(f"prefix and image need {tokens:,} positions, but target max_positions is {limit:,}")
        for quality, preset in self.presets.items():
            if preset.devices is not None and quality != "strict":
                raise ValueError(
                    f"preset {quality} has a method for devices, which would generate different images there"
                )
            for method in (preset.method, preset.devices or preset.method):
                self._check_preset(quality, method)
        first_row = self.codebook_size
        if self.row_end is not None and not first_row <= self.row_end < first_row + 1_000_000:
            limits = f"at least codebook_size, {first_row}, and below {first_row + 1_000_000}"
            raise ValueError(f"row_end must be {limits}, found {self.row_end}")
        self._check_group_order()
        self._check_sizes()
        self._check_first_grids()
        return self

    def _check_group_order(self) -> None:
        if self.order is None:
            return
        self.order.check_covers_all_cells(self.codes_per_image, self.grid_columns)
        parts = {"drafter": self.drafter, "heads": self.heads, "row_end": self.row_end, "sizes": self.sizes or None}
        if unfit := [name for name, part in parts.items() if part is not None]:
            raise ValueError(f"`{unfit[0]}` is not allowed in a bundle with `order`")
        positions = self.condition.prefix + self.codes_per_image + 1  # learned vectors have the last position
        if self.order.vectors and positions > self.target.max_positions:
            limit = f"target max_positions is {self.target.max_positions:,}"
            raise ValueError(f"prefix, image and learned vectors need {positions:,} positions, but {limit}")

    def _check_preset(self, quality: Quality, method: Method) -> None:
        if problem := explain_unsupported_method(self, method):
            raise ValueError(f"preset {quality}, {method}: the bundle {problem}")
        if quality == "strict" and not method.exact:
            raise ValueError(f"preset strict, {method}, is not exact")

    def _check_sizes(self) -> None:
        names = [size.name for size in self.sizes]
        layout = self.condition.layout
        if len({*names}) != len(names) or len({(size.rows, size.columns) for size in self.sizes}) != len(names):
            raise ValueError("`sizes` has a name or a grid twice; expected each once")
        if self.sizes and not any(self._is_default_size(size) for size in self.sizes):
            raise ValueError(f"`sizes` lacks the default grid, {self.grid_rows} x {self.grid_columns}")
        if large := next((size.name for size in self.sizes if max(self.size_in_pixels(size)) > MAX_PIXELS), None):
            raise ValueError(f"size {large} is wider or higher than {MAX_PIXELS} pixels")
        if layout is not None and layout.uncond == () and not all(size.tokens for size in self.all_sizes):
            raise ValueError("`uncond` and the `tokens` of a size are empty; the unconditional prompt needs a token")

    def _check_first_grids(self) -> None:
        sizes = [size for size in self.sizes if (size.first_grid, size.first_position) != (None, None)]
        parts = {"drafter": self.drafter, "row_end": self.row_end}
        unfit = next((name for name, part in parts.items() if part is not None), None)
        if sizes and unfit is not None:
            problem = f"has a first_grid or first_position, which `{unfit}` does not support"
            raise ValueError(f"size {sizes[0].name} {problem}")
        prefix = self.condition.prefix
        for size in sizes:
            start = prefix if size.first_position is None else size.first_position
            if not prefix <= start <= self.target.max_positions - size.codes:
                expected = f"{prefix} .. {self.target.max_positions - size.codes}"
                raise ValueError(f"size {size.name}: first_position {start} is not in {expected}")

        if self.source is None:
            return
        if "vq_encoder" not in self.files or self.condition.layout is None:
            raise ValueError("`source` needs a `vq_encoder` and prompts of kind `tokens`")
        if self.target.architecture.rotary != "grids" or len(sizes) != len(self.sizes) or not sizes:
            raise ValueError("`source` needs `rotary` `grids`, and `first_position` in all `sizes`")

    def _is_default_size(self, size: Size) -> bool:
        return (size.rows, size.columns) == (self.grid_rows, self.grid_columns)

    def size(self, name: str | None = None) -> Size:
        """Return the image size with a name; None: the default size. Raise KeyError if the bundle lacks the size."""
        default = Size(name=f"{self.image_width}x{self.image_height}", rows=self.grid_rows, columns=self.grid_columns)
        by_name = {size.name: size for size in self.sizes or (default,)}
        return next(filter(self._is_default_size, by_name.values())) if name is None else by_name[name]

    @property
    def all_sizes(self) -> tuple[Size, ...]:
        return self.sizes or (self.size(),)

    @property
    def decoded_cells(self) -> int | None:
        """Number of codes that the image decoder reads; None: it reads grids of any size."""
        return self.grid_rows * self.grid_columns if len(self.sizes) < 2 else None

    def size_in_pixels(self, size: Size) -> tuple[int, int]:
        """Return width and height in pixels of an image of the given size."""
        return self.image_width * size.columns // self.grid_columns, self.image_height * size.rows // self.grid_rows

    def layout(self, size: Size | None = None) -> ImageLayout:
        """Return the layout of image tokens for an image size; None: the default size."""
        grid = size or self.size()
        if self.order is not None:
            return self.order.layout(self.codebook_size, grid.columns)
        if self.row_end is not None:
            return RowEndLayout(grid.codes, grid.columns, row_end=self.row_end)
        if grid.first_grid is not None:
            return TwoGridLayout(grid.codes, grid.columns, first_grid=grid.first_grid)
        return RasterLayout(grid.codes, grid.columns)

    @property
    def max_image_tokens(self) -> int:
        """Number of tokens of the longest image, over all sizes; end-of-row tokens are included."""
        return max(self.layout(size).num_tokens for size in self.all_sizes)

    @property
    def num_embeddings(self) -> int:
        """Number of rows of `code_embeddings`: codes, then further tokens up to `row_end`, or learned vectors."""
        vectors = 0 if self.order is None else self.order.vectors
        return max(self.codebook_size + vectors, (self.row_end or 0) + 1)

    @property
    def codes_per_image(self) -> int:
        return self.size().codes

    @property
    def makes_images(self) -> bool:
        """Whether the bundle has an image decoder. If not, the results are codes for another program."""
        return "vq_decoder" in self.files

    @property
    def can_edit_images(self) -> bool:
        """Whether the bundle has an image encoder for edits."""
        return "vq_encoder" in self.files and self.source is None


def explain_unsupported_method(manifest: Manifest, method: MethodConfig) -> str | None:
    """Return the reason why a bundle cannot run a decoding method, which completes `bundle NAME ...`; None: it can."""
    requirements = method.requirements
    if requirements.order != (manifest.order is not None):
        if requirements.order:
            return "generates one token after another"
        return "generates groups of cells, in an order of its own"
    if requirements.drafters and not {*requirements.drafters} & {*manifest.drafters}:
        return f"has no drafter of the kind {' or '.join(requirements.drafters)}"
    if requirements.neighbors > manifest.neighbors:
        return f"has {manifest.neighbors} neighbors per code, but the method's bound reads {requirements.neighbors}"
    return None
