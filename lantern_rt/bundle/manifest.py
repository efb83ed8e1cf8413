"""`bundle.json`: what a bundle says about itself.

Pydantic models only: names, sizes, defaults and file hashes. Unknown fields are refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from ..methods import Drafted, FrozenModel, Method, Quality, Relaxed, Sampling, Sjd

FORMAT_VERSION = "3.3"
_PIECE = 1 << 20  # bytes of a file that are hashed at a time

# No model comes near these bounds; what claims more is damaged, and would ask for more memory or time than there is.
Count = Annotated[int, Field(ge=1, le=1_000_000)]
SmallCount = Annotated[int, Field(ge=1, le=1024)]
Side = Annotated[int, Field(ge=1, le=256)]  # codes
MAX_PIXELS = 8192  # along a side
Pixels = Annotated[int, Field(ge=1, le=MAX_PIXELS)]
TokenId = Annotated[int, Field(ge=0, le=2**31)]
Precision = Literal["fp32", "fp16", "bf16-safe", "bf16", "int8-weights", "int4-weights", "int8"]


def file_sha256(path: Path, progress: Callable[[int], None] = lambda size: None) -> str:
    """Hex digest of a file, read in pieces; `progress` is told of the bytes of each."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            progress(len(piece))
    return digest.hexdigest()


class FileEntry(FrozenModel):
    """One file of the bundle; `path` is relative to it, with forward slashes."""

    path: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    bytes: Annotated[int, Field(ge=0, le=2**50)]

    @classmethod
    def of(cls, path: Path, progress: Callable[[int], None] = lambda size: None) -> FileEntry:
        """The entry of a file at the top of its bundle; reads all of it, as `file_sha256` does."""
        return cls(path=path.name, sha256=file_sha256(path, progress), bytes=path.stat().st_size)


class _Sizes(FrozenModel):
    """What target and drafter have in common. Cache tensors are `[past, rows, num_kv_heads, head_dim]`."""

    hidden_size: Count
    num_layers: SmallCount
    num_kv_heads: SmallCount
    head_dim: SmallCount
    vocab_size: Count


class DecoderSpec(_Sizes):
    """`precision` is that of the stored weights, `dtype` that of the cache and of what both decoders compute in.

    Graphs of `bfloat16` are of float32, for CPUs; on devices that have it, decoders compute in it.
    """

    max_positions: Count
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    cache_layout: Literal["past-first"] = "past-first"
    precision: Precision = "fp32"


class DrafterSpec(_Sizes):
    """An EAGLE drafter. Slot p reads token p + 1 and hidden state p.

    `position_shift` is added to the target position of a slot's *token* to give the slot's position
    (-1: the slot that holds a token at position p sits at p - 1). `masks_prefix`: whether padded prefix
    slots are hidden from the drafter (LANTERN's LlamaGen drafter sees them). Prefix slots read `prefix_token`,
    or the ids of the prompt where the condition is of kind `tokens`. `code_offset`: the token id of code 0,
    where the drafter embeds a vocabulary of text and codes. `head_codes`: how many codes the drafter scores, where
    it is not all; the logits of the others are too low to be drafted.
    """

    position_shift: Annotated[int, Field(ge=-1, le=1024)] = -1
    masks_prefix: bool = True
    prefix_token: TokenId = 0
    code_offset: TokenId = 0
    precision: Precision = "fp32"
    head_codes: Count | None = None


class HeadsSpec(FrozenModel):
    """What windows draft with, and trees that ask for it: see `runtime/heads.py`.

    rank: of corrections. units: of guesses.
    """

    rank: SmallCount
    units: SmallCount


class TokenLayout(FrozenModel):
    """How a prompt becomes the token ids of its two rows, for kind `tokens`.

    The prompt replaces `{prompt}` in `template`, the size's name `{size}`; the text is tokenised without the
    tokenizer's own special tokens. Conditional row: `before`, the text's ids, `after`. Unconditional row: `uncond`,
    whatever the prompt; or the conditional row with each of the text's ids replaced by `uncond_fill`. Both rows end
    with the tokens of the picture's `Size`, if it has any. A negative prompt's conditional row takes the unconditional
    one's place; `negative` is its template, where that is another.
    """

    template: Annotated[str, Field(pattern=r"\{prompt\}")] = "{prompt}"
    before: tuple[TokenId, ...] = ()
    after: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    uncond: tuple[TokenId, ...] | None = None
    uncond_fill: TokenId | None = None
    negative: Annotated[str, Field(pattern=r"\{prompt\}")] | None = None

    @model_validator(mode="after")
    def _one_uncond(self) -> TokenLayout:
        if (self.uncond is None) == (self.uncond_fill is None):
            raise ValueError("`uncond` and `uncond_fill` are two ways to lay out one row; set one")
        return self


class ConditionSpec(FrozenModel):
    """What an image is conditioned on, and how that becomes prefix rows.

    `class`: input `class_ids [rows]` int64. `words`: a caption of known words, input `token_ids
    [rows, prefix]` int64, padded on the right with id 0. `embeddings`: text embeddings given by the
    caller, inputs `caption_embeds [rows, prefix, caption_dim]` (left-padded, padding zeroed) and
    `caption_mask [rows, prefix]` int64. `text`: any text, inputs `token_ids` and `token_mask [rows, tokens]`
    int64, tokens up to prefix, left-padded; `cleaning` says how prompts are cleaned before. Outputs,
    always: `prefix_embeds` and `uncond_embeds`, both `[rows, prefix, width]` float32.

    `tokens`: free text as token ids of a joint vocabulary, laid out by `layout`; inputs `token_ids [rows, tokens]`
    and `uncond_ids [rows, uncond_tokens]` int64, of any lengths up to `prefix`. The outputs have these lengths.
    """

    kind: Literal["class", "words", "embeddings", "text", "tokens"]
    prefix: Count
    classes: Count | None = None
    caption_dim: Count | None = None
    cleaning: Literal["llamagen"] | None = None
    layout: TokenLayout | None = None

    @model_validator(mode="after")
    def _sizes_fit_kind(self) -> ConditionSpec:
        for field, kind in (("classes", "class"), ("caption_dim", "embeddings"), ("layout", "tokens")):
            if (getattr(self, field) is not None) != (self.kind == kind):
                raise ValueError(f"`{field}` goes with kind `{kind}` and with no other")
        if self.cleaning is not None and self.kind != "text":
            raise ValueError("`cleaning` goes with kind `text` and with no other")
        return self


class Size(FrozenModel):
    """A size of pictures. name: width x height in pixels, as users and templates say it. rows, columns: of its codes.

    tokens: what announces it, at the end of both rows of a prompt.
    """

    name: Annotated[str, Field(pattern=r"^[1-9]\d{0,3}x[1-9]\d{0,3}$")]
    rows: Side
    columns: Side
    tokens: tuple[TokenId, ...] = ()

    @property
    def codes(self) -> int:
        """Codes of a picture."""
        return self.rows * self.columns


class DecodingDefaults(FrozenModel):
    """Each method's own defaults, where they are not those of `methods.py`."""

    methods: tuple[Method, ...] = ()

    @model_validator(mode="after")
    def _one_each(self) -> DecodingDefaults:
        names = [one.method for one in self.methods]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"method {twice} has defaults twice; expected each method once")
        return self


class PresetFigures(FrozenModel):
    """What `lantern-rt eval` measured of a preset's method.

    tokens_per_pass: tokens of an image per forward pass of the target. excess_nll: nats per token above plain
    decoding's, the entropy subtracted from both. agreement: percentage points of prompt agreement above plain
    decoding's; None where no judge was given. images: how many were drawn. date: when, ISO 8601.
    """

    tokens_per_pass: Annotated[float, Field(gt=0, le=1e6)]
    excess_nll: float
    agreement: float | None = None
    images: Count
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]


class Preset(FrozenModel):
    """A quality of this bundle: the method that draws it, and the figures that justify it.

    devices: of `strict`, the method on GPUs and other devices, where more nodes of a pass are nearly free; None: the
    same. figures: None of a method that was not measured.
    """

    method: Method
    devices: Method | None = None
    figures: PresetFigures | None = None


# Of bundles that name none. On CPUs within 4 % of the best window on three processors (docs/measurements.md); the one
# for devices is not measured.
STRICT = Preset(method=Sjd(window=7), devices=Sjd(window=15))


def _with_strict(presets: dict[Quality, Preset]) -> dict[Quality, Preset]:
    return {"strict": STRICT, **presets}


class Source(FrozenModel):
    """A checkpoint file this bundle was made from; `origin`: the repository and revision it was fetched from."""

    role: str
    name: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    origin: str | None = None


class Provenance(FrozenModel):
    """Who made the bundle, from what, under which licence; `weights`: those taken of files with both, if chosen.

    calibration: of an image decoder in int8, what its ranges were found on.
    """

    exporter: str
    sources: tuple[Source, ...] = ()
    licence: str
    weights: Literal["model", "ema"] | None = None
    calibration: str | None = None


class Manifest(FrozenModel):
    """The whole of `bundle.json`.

    `files` maps roles to files: `target`, `vq_decoder`, `condition`, `code_embeddings` always; `drafter`,
    `heads` and `neighbors` when there are any; `tokenizer` for kinds `words`, `text` and `tokens`;
    optional is `prompts` (to compare with); further roles are external data of a graph (`target.data`, ...).

    `sizes`: those that a request may choose from, the one of `grid_rows` and `grid_columns` among them, which is the
    default; none where all pictures have that. `row_end`: the token that follows every row of codes but the last, and
    is no choice: a row of `code_embeddings` behind those of codes. `presets`: the methods of the qualities: `strict`,
    exact, by default `STRICT`; `balanced` and `fast` as far as `lantern-rt eval --write-presets` measured them.
    `vq_precision`: what the image decoder multiplies.
    """

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
    neighbors: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    target: DecoderSpec
    drafter: DrafterSpec | None = None
    heads: HeadsSpec | None = None
    condition: ConditionSpec
    vq_precision: Literal["fp32", "fp16", "int8"] = "fp32"
    sampling: Sampling
    decoding: DecodingDefaults
    presets: Annotated[dict[Quality, Preset], AfterValidator(_with_strict)] = Field(default={}, validate_default=True)
    files: dict[str, FileEntry]
    provenance: Provenance

    @property
    def drafters(self) -> list[str]:
        """Names of what can draft trees, `heads` and `eagle`, the default first."""
        return [name for name, spec in (("heads", self.heads), ("eagle", self.drafter)) if spec is not None]

    @model_validator(mode="after")
    def _parts_fit(self) -> Manifest:
        needed = {"target", "vq_decoder", "condition", "code_embeddings"}
        words = self.condition.kind in ("words", "text", "tokens")
        optional = {"drafter": self.drafter, "heads": self.heads, "neighbors": self.neighbors, "tokenizer": words}
        if missing := sorted((needed | {role for role, used in optional.items() if used}) - self.files.keys()):
            raise ValueError(f"`files` lacks {', '.join(missing)}")
        if (vocab_size := self.target.vocab_size) != self.codebook_size:
            raise ValueError(f"target vocab_size {vocab_size} is not codebook_size {self.codebook_size}")
        if self.drafter and (own := self.drafter.hidden_size) != (expected := self.target.hidden_size):
            raise ValueError(f"drafter hidden_size {own} is not the target's, {expected}")
        if (tokens := self.condition.prefix + self.max_image_tokens - 1) > (most := self.target.max_positions):
            raise ValueError(f"prefix and image take {tokens:,} positions, but target max_positions is {most:,}")
        for quality, preset in self.presets.items():
            if preset.devices is not None and quality != "strict":
                raise ValueError(f"preset {quality} has a method for devices, which would draw other images there")
            for method in (preset.method, preset.devices or preset.method):
                self._check_preset(quality, method)
        if self.row_end is not None and not 0 <= self.row_end - self.codebook_size < 1_000_000:
            raise ValueError(f"row_end {self.row_end} is a code, expected a row behind the {vocab_size} of them")
        self._check_sizes()
        return self

    def _check_preset(self, quality: Quality, method: Method) -> None:
        """Raises: ValueError: the bundle cannot decode by this method of a preset."""
        drafter = method.drafter if isinstance(method, Drafted) else None
        if (method.needs_drafter and not self.drafters) or drafter not in (None, *self.drafters):
            raise ValueError(f"preset {quality}, {method}, needs a drafter that the bundle lacks")
        if isinstance(method, Relaxed) and (method.neighbors or 0) > self.neighbors:
            raise ValueError(f"preset {quality}, {method}, needs more than the bundle's {self.neighbors} neighbors")
        if quality == "strict" and not method.exact:
            raise ValueError(f"preset strict, {method}, is not exact")

    def _check_sizes(self) -> None:
        """Raises: ValueError: sizes that contradict each other, or prompts that end without a token."""
        names, layout = [size.name for size in self.sizes], self.condition.layout
        if len({*names}) != len(names) or len({(size.rows, size.columns) for size in self.sizes}) != len(names):
            raise ValueError("`sizes` has a name or a grid twice; expected each once")
        if self.sizes and not any(self._is_default(size) for size in self.sizes):
            raise ValueError(f"`sizes` lacks the default grid, {self.grid_rows} x {self.grid_columns}")
        if large := next((size.name for size in self.sizes if max(self.pixels(size)) > MAX_PIXELS), None):
            raise ValueError(f"size {large} has more than {MAX_PIXELS} pixels along a side")
        if layout is not None and layout.uncond == () and not all(size.tokens for size in self.sizes or (self.size(),)):
            raise ValueError("`uncond` is empty, and so are the tokens of a size; the unconditional row needs one")

    def _is_default(self, size: Size) -> bool:
        return (size.rows, size.columns) == (self.grid_rows, self.grid_columns)

    def size(self, name: str | None = None) -> Size:
        """The size of a name, by default the bundle's own. Raises: KeyError: pictures have no such size."""
        own = Size(name=f"{self.image_width}x{self.image_height}", rows=self.grid_rows, columns=self.grid_columns)
        by_name = {size.name: size for size in self.sizes or (own,)}
        return next(filter(self._is_default, by_name.values())) if name is None else by_name[name]

    def pixels(self, size: Size) -> tuple[int, int]:
        """Width and height of a picture of this size."""
        return self.image_width * size.columns // self.grid_columns, self.image_height * size.rows // self.grid_rows

    @property
    def max_image_tokens(self) -> int:
        """Most tokens of a picture in its sequence: codes, and ends of all rows but the last."""
        return max(size.codes + (size.rows - 1) * (self.row_end is not None) for size in self.sizes or (self.size(),))

    @property
    def codes_per_image(self) -> int:
        """Codes of one image of the default size: rows x columns of the grid."""
        return self.grid_rows * self.grid_columns
