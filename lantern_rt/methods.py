"""Decoding methods and sampling: what each may be told, within which limits, and what it means.

One class a method. Its fields are the method's parameters, wherever they are written: in a manifest, a request, options
of the command line, method strings such as `lantern++:lambda=3:tree=chain-4`, presets and pictures. The
runtime reads the same objects. None of a parameter means that the method does without it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, TypedDict, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from .errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray
    from PIL.Image import Image

Embeddings: TypeAlias = "ArrayLike | tuple[ArrayLike, ArrayLike]"
ImageSource: TypeAlias = "Image | NDArray[Any] | str | Path | bytes"
FilterOrder = Literal["top-k, top-p", "top-p, top-k"]
Residual = Literal["aggregated", "neighborhood"]


class FrozenModel(BaseModel):
    """Base of methods, sampling and manifest parts: immutable, rejects unknown fields, NaN and infinity."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True, serialize_by_alias=True
    )


def _greedy_or_warm(temperature: float) -> float:
    if 0 < temperature < 1e-3:
        raise ValueError("expected 0 (greedy) or 0.001 .. 1000")
    return temperature


class Sampling(FrozenModel, strict=True):
    """How a distribution is made from logits.

    Guided logits are uncond + cfg_scale * (cond - uncond); at exactly 1 the unconditional row is not run at all.
    filter_order: LlamaGen applies top-k first, LANTERN (the transformers warpers) top-p first. repetition_penalty:
    conditional logits of codes that the image has already are divided by it, negative ones multiplied, before guidance.
    """

    cfg_scale: Annotated[float, Field(ge=0, le=1000, description="Guidance; 1 is off.")] = 1.0
    temperature: Annotated[float, AfterValidator(_greedy_or_warm)] = Field(
        default=1.0, ge=0, le=1000, description="0 is greedy."
    )
    top_k: Annotated[int, Field(ge=0, le=2**31, description="Keep the k most probable tokens; 0 is off.")] = 0
    top_p: Annotated[float, Field(gt=0, le=1, description="Keep this much probability; 1 is off.")] = 1.0
    filter_order: FilterOrder = "top-k, top-p"
    repetition_penalty: Annotated[float, Field(gt=0, le=100, description="1 is off.")] | None = None

    @property
    def penalised(self) -> bool:
        """Whether a distribution depends on the codes before in more than what the target makes of them."""
        return self.repetition_penalty not in (None, 1.0)

    @property
    def guided(self) -> bool:
        """Whether an unconditional row is run beside every conditional one."""
        return self.cfg_scale != 1.0

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0

    @property
    def filtered(self) -> bool:
        """Whether some tokens are left out: never when greedy."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0)


class MethodConfig(FrozenModel, strict=True):
    """Base of the methods. method: its name. needs_drafter: whether a bundle must have a drafter or heads."""

    method: str
    needs_drafter: ClassVar[bool] = False

    @property
    def exact(self) -> bool:
        """Whether the output has the target's own distribution."""
        return True

    @property
    def measures_distance(self) -> bool:
        """Whether decoding adds up how far tokens move from the target's distribution (`realised_tvd`)."""
        return True

    def parameters(self) -> dict[str, Any]:
        """The parameters that are set, by the names that users give."""
        return self.model_dump(exclude={"method"}, exclude_none=True)

    def __str__(self) -> str:
        """The method string, which `parse_method` reads."""
        given = {name: str(value).removesuffix(".0") for name, value in self.parameters().items()}
        return ":".join([self.method, *(f"{name}={value}" for name, value in given.items())])


class Ar(MethodConfig):
    """Plain decoding: no drafts, one token per forward pass."""

    method: Literal["ar"] = "ar"


Tree = Annotated[str, Field(min_length=1, description="Draft tree by name, such as chain-4, mc-25 or tree-2-10-1.")]


DrafterName = Annotated[
    Literal["eagle", "heads"] | None,
    Field(description="What drafts: the bundle's EAGLE drafter, or its heads. [default: heads, if it has any]"),
]


class Drafted(MethodConfig):
    """Methods that draft trees, with an EAGLE drafter or heads."""

    needs_drafter: ClassVar[bool] = True
    tree: Tree = "chain-3"
    drafter: DrafterName = None

    @property
    def uses_draft_heads(self) -> bool:
        """Whether heads draft."""
        return self.drafter == "heads"


class Eagle(Drafted):
    """Exact speculative decoding with an EAGLE drafter."""

    method: Literal["eagle"] = "eagle"


Neighbors = Annotated[int | None, Field(ge=1, description="How many nearby codes may add their probability.")]


class Relaxed(MethodConfig):
    """What relaxed acceptance takes; see `runtime.acceptance`.

    Neighbours and a bound (delta or lambda) go together.
    """

    neighbors: Neighbors = None
    residual: Residual | None = Field(
        default=None, description="What a rejection removes: aggregated, or neighborhood as the published code does."
    )

    @property
    def bound(self) -> float | None:
        """delta or lambda, None where neighbours add nothing."""
        return next((value for name in ("delta", "lambda_") if (value := getattr(self, name, None)) is not None), None)

    @property
    def exact(self) -> bool:
        """Whether nothing is relaxed."""
        return self.bound is None

    @model_validator(mode="after")
    def _parts_fit(self) -> Relaxed:
        if getattr(self, "delta", None) is not None and getattr(self, "lambda_", None) is not None:
            raise ValueError("delta and lambda are two bounds on the same thing, expected one")
        if (self.neighbors is None) != (self.bound is None):
            raise ValueError("neighbors and a bound (delta or lambda) go together")
        if self.residual is not None and self.bound is None:
            raise ValueError("residual is of neighbours, and there are none; leave residual out")
        return self


Delta = Annotated[
    float | None, Field(gt=0, lt=1, description="Bound on the probability that neighbours add, between 0 and 1.")
]
Lambda = Annotated[
    float | None,
    Field(alias="lambda", gt=1, le=1e6, description="Bound relative to the token's own probability, above 1."),
]


class Lantern(Relaxed, Drafted):
    """Relaxed speculative decoding with an absolute bound (LANTERN, ICLR 2025)."""

    method: Literal["lantern"] = "lantern"
    tree: Tree = "dynamic-8-4-2"
    neighbors: Neighbors = 100
    delta: Delta = 0.2


class LanternPlusPlus(Relaxed, Drafted):
    """Relaxed speculative decoding with a relative bound (LANTERN++)."""

    method: Literal["lantern++"] = "lantern++"
    tree: Tree = "chain-4"
    neighbors: Neighbors = 10
    lambda_: Lambda = 2.0


Window = Annotated[
    int, Field(ge=1, le=128, description="Tokens drafted ahead, or how far a row stays behind the one above; 1 .. 128.")
]


class Sjd(Relaxed):
    """Speculative Jacobi decoding: a window of drafts from the target's own last pass; exact unless relaxed."""

    method: Literal["sjd"] = "sjd"
    window: Window = 8
    delta: Delta = None
    lambda_: Lambda = None


class RowParallel(MethodConfig):
    """Row-parallel decoding: every row of the grid follows the one above at a distance; not exact."""

    method: Literal["rows"] = "rows"
    window: Window = 6
    drafts: Annotated[int, Field(ge=0, le=16, description="Tokens drafted ahead in every row, 0 .. 16.")] = 0

    @property
    def exact(self) -> bool:
        """Never: tokens see less than the target was trained to see."""
        return False

    @property
    def measures_distance(self) -> bool:
        """No: it would take a pass over the whole picture."""
        return False


Quality = Literal["strict", "balanced", "fast"]


Method = Annotated[Ar | Eagle | Lantern | LanternPlusPlus | Sjd | RowParallel, Field(discriminator="method")]
MethodName = Literal["ar", "eagle", "lantern", "lantern++", "sjd", "rows"]
_CLASSES: tuple[type[MethodConfig], ...] = get_args(get_args(Method)[0])
METHODS: dict[str, type[MethodConfig]] = {one.model_fields["method"].default: one for one in _CLASSES}


PARAMETERS: dict[str, list[str]] = {}  # every parameter, and the methods that take it
for _name, _class in METHODS.items():
    for _field, _info in _class.model_fields.items():
        if _field != "method":
            PARAMETERS.setdefault(_info.alias or _field, []).append(_name)


class GenerationOptions(TypedDict, total=False):
    """Those of `Options` without a picture that is changed."""

    class_ids: int | Sequence[int] | None
    embeddings: Embeddings | None
    negative_prompt: str | None
    keep_rows: int | None
    seed: int | Sequence[int]
    num_images: int
    quality: Quality | None
    method: str | MethodConfig | None
    cfg_scale: float | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    repetition_penalty: float | None
    size: str | None


class Options(GenerationOptions, total=False):
    """What a call of a pipeline takes besides prompts; what is left out, or None, comes from the bundle.

    What to draw: `class_ids` or `embeddings`, for bundles that take those instead of prompts; embeddings alone or with
    a mask `(embeddings, mask)`, right-padded, `[tokens, dim]` or `[prompts, tokens, dim]`. Image i of a prompt, of
    `num_images`, is drawn with seed + i, whatever else is in the batch; `seed` may be one number per prompt. `size`:
    such as `"768x768"`, width x height, where a bundle draws several. `negative_prompt`: what guidance leads away
    from, for all prompts; of bundles that take prompts, and with guidance. `image`: a picture (Pillow's, an array, a
    file or its bytes) of which a part is drawn anew: where `mask`, of the same size, is transparent or, if nothing of
    it is, white; without one where the picture is transparent; or below its first `keep_rows` rows of codes. Without a
    prompt, that which the picture records.

    How: `quality`, a preset of the bundle (`"strict"`, the default, is exact), or `method`: a name such as
    `"lantern++"`, a method string such as `"sjd:window=5"`, or an object of `lantern_rt.methods`; and what shapes the
    distribution. Limits: docs/methods.md, or `lantern-rt run --help`.
    """

    image: ImageSource | None
    mask: ImageSource | None


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """Name and parameters of a method string, `NAME` or `NAME:PARAMETER=VALUE:...`; limits are not checked yet.

    Raises: RequestError: a part is not PARAMETER=VALUE with a known parameter.
    """
    name, *parts = text.split(":")
    given: dict[str, Any] = {}
    for part in parts:
        parameter, _, value = part.partition("=")
        if parameter not in PARAMETERS or not value:
            raise RequestError(
                field="method", found=f"{part!r} in {text!r}", expected=f"PARAMETER=VALUE, of {', '.join(PARAMETERS)}"
            )
        given[parameter] = _parsed(value)
    return name, given


def _parsed(text: str) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
