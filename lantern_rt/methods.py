"""Decoding methods and sampling settings, with the limits of every parameter.

Each method is a class, whose fields are the parameters of the method. Manifests, requests, command-line options, method
strings such as `lantern++:lambda=3:tree=chain-4`, presets and PNG metadata use the same names. A parameter that is None
has no effect.
"""

from __future__ import annotations

import re
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias, Union

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    create_model,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

FilterOrder = Literal["top-k, top-p", "top-p, top-k"]
Residual = Literal["aggregated", "neighborhood"]


class FrozenModel(BaseModel):
    """Base class of methods, sampling settings and parts of the manifest.

    Objects are immutable. Validation rejects unknown fields, NaN and infinity.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True, serialize_by_alias=True
    )


class ExtendedModel(FrozenModel):
    """Base class of models with fields that were added later, which JSON omits if they have their defaults.

    So bundles without these fields have the same bytes as before.
    """

    added_fields: ClassVar[frozenset[str]]

    @model_serializer(mode="wrap")
    def _omit_unset_fields(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        unset = {name for name in self.added_fields if getattr(self, name) == type(self).model_fields[name].default}
        return {name: value for name, value in fields.items() if name not in unset}


def _check_temperature(temperature: float) -> float:
    if 0 < temperature < 1e-3:
        raise ValueError("expected a temperature of 0 (greedy) or 0.001 .. 1000")
    return temperature


def _parse_cfg_tokens(value: Any) -> Any:
    text = value if isinstance(value, str) else ""
    if re.fullmatch("[0-9]{1,20}", text):
        return int(text)
    # The recipe of an image records the share, so every share has one text: 050.0% is 50%.
    share = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{0,9})?)%", text)
    if share and (percentage := Decimal(share[1])) <= 100:
        return f"{percentage.normalize():f}%"
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if value is None or is_count:
        return value
    raise ValueError("expected a number of tokens from 0, or a percentage of the image's tokens such as 50%")


CfgTokens = Annotated[int | str | None, BeforeValidator(_parse_cfg_tokens)]


def _check_cfg_schedule(schedule: str) -> str:
    number = r"[0-9]{1,2}(\.[0-9]{1,6})?"
    if not re.fullmatch(rf"({number}x[0-9]{{1,4}},)?(constant|linear|cosine-{number})", schedule):
        raise ValueError("expected constant, linear, or cosine and its power, such as cosine-2.75")
    return schedule


CfgSchedule = Annotated[str, AfterValidator(_check_cfg_schedule)]


class SettableByRequest(NamedTuple):
    """Marks a sampling setting that requests may set; `metavar` is its placeholder in the command line's help."""

    metavar: str | None = None


class Sampling(ExtendedModel, strict=True):
    """Sampling settings: how the logits of a token become a distribution.

    Attributes:
        cfg_scale: guidance scale, 0 .. 1000. Guided logits are uncond + cfg_scale * (cond - uncond). At exactly 1
            forward passes have no unconditional row.
        cfg_tokens: number of image tokens that are sampled with guidance, the first tokens in generation order: from 0,
            or a percentage of the image's tokens such as `"50%"`; None: all tokens. Later tokens are sampled from the
            conditional logits, without an unconditional row. LlamaGen's `cfg_interval` of n is a `cfg_tokens` of n + 2.
        cfg_schedule: schedule of the guidance scale within an image. `"linear"` gives token t of n tokens, from 1 in
            generation order, the scale 1 + (cfg_scale - 1) t / n, as in RandAR. `"cosine-P"` gives token t, from 0, the
            scale 1 + (cfg_scale - 1) (1 - cos(pi (t / n)^P)) / 2, as in RAR. None: `"constant"`.
            `"0.7x16,linear"` gives the first 16 tokens the scale 0.7; the schedule is that of the others (Prologue).
        cfg_final: guidance scale at the end of an image, as in Lumina-mGPT 2.0. A larger `cfg_scale` falls to this
            scale within the first rows, and a smaller `cfg_scale` is raised to it (`runtime/guidance.py`). None:
            `cfg_scale` holds for the whole image.
        temperature: sampling temperature, 0 (greedy) or 0.001 .. 1000.
        top_k: number of most probable tokens to keep; 0 keeps all.
        top_p: total probability of the tokens to keep, above 0 up to 1; 1 keeps all.
        min_p: share of the largest probability that a token needs to be kept, 0 .. 1. It is applied after top-k and
            top-p, as in transformers. None or 0: all tokens are kept.
        filter_order: filter that is applied first. LlamaGen applies top-k first. LANTERN, like the logits warpers of
            transformers, applies top-p first.
        repetition_penalty: divisor of the conditional logits of tokens that the image already contains, 0.01 .. 100.
            Negative logits are multiplied by the penalty instead. It is applied before guidance. None: no penalty.
    """

    added_fields = frozenset({"min_p"})
    own_names: ClassVar[tuple[str, ...]] = ()  # settings of users; every forward pass asks for them

    cfg_scale: Annotated[
        float,
        Field(ge=0, le=1000, description="Scale of classifier-free guidance; 1 turns it off."),
        SettableByRequest(),
    ] = 1.0
    cfg_tokens: Annotated[
        CfgTokens,
        Field(description="How many of the image's tokens guidance is for, such as 128 or 50%: fewer are faster."),
        SettableByRequest("NUMBER|SHARE%"),
    ] = None
    cfg_schedule: Annotated[
        CfgSchedule | None,
        Field(description="Linear, or cosine and a power: guidance grows from 1 to its scale within an image."),
        SettableByRequest("constant|linear|cosine-POWER"),
    ] = None
    cfg_final: Annotated[float, Field(gt=0, le=1000)] | None = None
    temperature: Annotated[
        float,
        Field(ge=0, le=1000, description="Sampling temperature; 0 is greedy."),
        AfterValidator(_check_temperature),
        SettableByRequest(),
    ] = 1.0
    top_k: Annotated[
        int,
        Field(ge=0, le=2**31, description="Number of most probable tokens to sample from; 0: all."),
        SettableByRequest(),
    ] = 0
    top_p: Annotated[
        float,
        Field(gt=0, le=1, description="Total probability of the tokens to sample from; 1: all."),
        SettableByRequest(),
    ] = 1.0
    min_p: Annotated[
        float | None,
        Field(ge=0, le=1, description="Share of the largest probability that a token needs to be sampled; 0: none."),
        SettableByRequest(),
    ] = None
    filter_order: FilterOrder = "top-k, top-p"
    repetition_penalty: Annotated[
        float | None,
        Field(ge=0.01, le=100, description="Divisor of the logits of tokens that the image contains already; 1: none."),
        SettableByRequest(),
    ] = None

    @property
    def last_cfg_scale(self) -> float:
        """Guidance scale at the end of an image."""
        return self.cfg_scale if self.cfg_final is None else self.cfg_final

    @property
    def has_repetition_penalty(self) -> bool:
        return self.repetition_penalty not in (None, 1.0)

    @property
    def own_settings(self) -> dict[str, Any]:
        """Settings that `register_sampling_setting` added, and that have an effect."""
        values = {name: getattr(self, name) for name in self.own_names}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def uses_guidance(self) -> bool:
        """Whether at least the first tokens of an image are sampled with guidance, which needs an unconditional row."""
        # 2^30 is more tokens than any image has, so a small percentage is not rounded to 0 tokens.
        return self.cfg_scale != 1.0 and self.count_guided_tokens(1 << 30) > 0

    def count_guided_tokens(self, num_codes: int) -> int:
        """Return how many tokens are sampled with guidance, in an image of `num_codes` tokens."""
        if self.cfg_scale == 1.0:
            return 0
        if isinstance(self.cfg_tokens, str):
            return round(num_codes * float(self.cfg_tokens.removesuffix("%")) / 100)
        return num_codes if self.cfg_tokens is None else min(self.cfg_tokens, num_codes)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


# Sampling settings that requests may set. The options of Python, the command line and HTTP follow from this table.
SAMPLING = {
    name: field
    for name, field in Sampling.model_fields.items()
    if any(isinstance(mark, SettableByRequest) for mark in field.metadata)
}


@cache
def find_sampling_class() -> type[Sampling]:
    """Return the class of the sampling settings of requests: `Sampling`, to which settings of users may be added."""
    own: dict[str, Any] = {
        name: (field.annotation, field) for name, field in SAMPLING.items() if name not in Sampling.model_fields
    }
    if not own:
        return Sampling
    own_class = create_model("Sampling", __base__=Sampling, **own)
    own_class.own_names = (*own,)
    return own_class


def add_sampling_setting(name: str, annotation: Any) -> None:
    """Add a setting to the table. Users call `register_sampling_setting`."""
    marked: Any = Annotated[annotation, SettableByRequest()]
    SAMPLING[name] = FieldInfo.from_annotated_attribute(marked, None)
    find_sampling_class.cache_clear()


class MethodRequirements(NamedTuple):
    """Parts that a bundle must have for a decoding method, as `bundle.manifest.explain_unsupported_method` checks.

    Args:
        drafters: drafters that the method can use for draft trees, `heads` or `eagle`, of which the bundle must have
            one. Empty: the method needs no drafter.
        uses_heads: whether the method uses draft heads if the bundle has draft heads.
        neighbors: number of neighbours per code that the bundle's neighbour table must have; 0: no table is needed.
        order: whether the model must generate groups of cells per pass; False: the model must generate one code after
            another.
    """

    drafters: tuple[str, ...] = ()
    uses_heads: bool = False
    neighbors: int = 0
    order: bool = False


class MethodConfig(FrozenModel, strict=True):
    """Base class of decoding methods.

    Attributes:
        method: name of the method.
        measures_tvd: whether statistics include `realised_tvd`, the total variation distance from the target's
            distribution.
        drafts_tokens: whether passes verify draft tokens.
        exact: whether the method samples tokens from exactly the target model's distribution.
        relaxed: whether acceptance is relaxed. A method may be neither exact nor relaxed.
        has_flexible_window: whether the number of draft tokens may change between passes without changing the image.
    """

    method: str
    measures_tvd: ClassVar[bool] = True
    drafts_tokens: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    relaxed: ClassVar[bool] = False
    has_flexible_window: ClassVar[bool] = False

    @property
    def requirements(self) -> MethodRequirements:
        """Parts that a bundle must have for the method."""
        return MethodRequirements()

    def limit_nodes(self, max_nodes: int) -> MethodConfig:
        """Return a method of the same images whose drafts have at most `max_nodes` nodes, if there is one."""
        return self

    def parameters(self) -> dict[str, Any]:
        """Return the parameters that are not None, by their public names (`lambda`, not `lambda_`)."""
        return self.model_dump(exclude={"method"}, exclude_none=True)

    def __str__(self) -> str:
        """Return the method string, such as `sjd:window=5`, which `parse_method` reads."""
        texts = {name: str(value).removesuffix(".0") for name, value in self.parameters().items()}
        return ":".join([self.method, *(f"{name}={text}" for name, text in texts.items())])


class Autoregressive(MethodConfig):
    """Autoregressive decoding without drafts: one token per forward pass."""

    method: Literal["ar"] = "ar"
    drafts_tokens: ClassVar[bool] = False


Tree = Annotated[str, Field(min_length=1, description="Draft tree by name, such as chain-4, mc-25 or tree-2-10-1.")]


DrafterName = Annotated[
    Literal["eagle", "heads"] | None,
    Field(description="Source of draft tokens: EAGLE drafter or draft heads. [default: heads, if the bundle has them]"),
]


class TreeMethod(MethodConfig):
    """Base class of methods that make draft trees with an EAGLE drafter or draft heads."""

    tree: Tree = "chain-3"
    drafter: DrafterName = None

    @property
    def requirements(self) -> MethodRequirements:
        drafters = ("heads", "eagle") if self.drafter is None else (self.drafter,)
        return MethodRequirements(drafters, uses_heads="heads" in drafters)

    @property
    def uses_draft_heads(self) -> bool:
        return self.drafter == "heads"


class Eagle(TreeMethod):
    """Exact speculative decoding with an EAGLE drafter."""

    method: Literal["eagle"] = "eagle"


Neighbors = Annotated[int | None, Field(ge=1, description="How many nearby codes may add their probability.")]


class RelaxedMethod(MethodConfig):
    """Base class of methods with relaxed acceptance, which `runtime.acceptance` explains.

    A method is relaxed if it has a bound, delta or lambda. The bound limits the probability that the neighbours of a
    draft token add to the token's probability.

    Attributes:
        neighbors: number of nearest codes whose probabilities may be added to the probability of a draft token, at
            least 1; None: acceptance is exact.
        residual: set of codes whose probability is removed after a rejection.
    """

    neighbors: Neighbors = None
    residual: Residual | None = Field(
        default=None,
        description="Codes excluded after a rejection: aggregated, or neighborhood as in the published code.",
    )

    @property
    def requirements(self) -> MethodRequirements:
        return super().requirements._replace(neighbors=self.neighbors or 0)

    @property
    def acceptance_bounds(self) -> tuple[float | None, float | None]:
        """Pair of the bounds delta and lambda. At most one bound is set; acceptance is exact if both are None."""
        return None, None

    # The parameters decide here, so these class variables are properties.
    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.acceptance_bounds == (None, None)

    @property
    def relaxed(self) -> bool:  # type: ignore[override]
        return not self.exact

    @model_validator(mode="after")
    def _check_parameters(self) -> RelaxedMethod:
        if None not in self.acceptance_bounds:
            raise ValueError("delta and lambda are two bounds on the probability of neighbors, expected one of them")
        if (self.neighbors is None) != self.exact:
            raise ValueError("neighbors needs a bound (delta or lambda), and a bound needs neighbors")
        if self.residual is not None and self.exact:
            raise ValueError("residual has no effect without neighbors; leave residual out")
        return self


Delta = Annotated[
    float | None, Field(gt=0, lt=1, description="Bound on the probability that neighbours add, between 0 and 1.")
]
Lambda = Annotated[
    float | None,
    Field(alias="lambda", gt=1, le=1e6, description="Bound relative to the token's own probability, above 1."),
]


class Lantern(RelaxedMethod, TreeMethod):
    """Relaxed speculative decoding with an absolute bound (LANTERN, ICLR 2025)."""

    method: Literal["lantern"] = "lantern"
    tree: Tree = "dynamic-8-4-2"
    neighbors: Neighbors = 100
    delta: Delta = 0.2

    @property
    def acceptance_bounds(self) -> tuple[float | None, float | None]:
        return self.delta, None


class LanternPlusPlus(RelaxedMethod, TreeMethod):
    """Relaxed speculative decoding with a relative bound (LANTERN++)."""

    method: Literal["lantern++"] = "lantern++"
    tree: Tree = "chain-4"
    neighbors: Neighbors = 10
    lambda_: Lambda = 2.0

    @property
    def acceptance_bounds(self) -> tuple[float | None, float | None]:
        return None, self.lambda_


Window = Annotated[
    int, Field(ge=1, le=128, description="Tokens drafted ahead, or how far a row stays behind the one above; 1 .. 128.")
]


class SpeculativeJacobi(RelaxedMethod):
    """Speculative Jacobi decoding, exact unless a bound is set.

    The draft is a window of tokens, which the target's last forward pass or the draft heads propose.
    """

    method: Literal["sjd"] = "sjd"
    window: Window = 8
    delta: Delta = None
    lambda_: Lambda = None

    @property
    def acceptance_bounds(self) -> tuple[float | None, float | None]:
        return self.delta, self.lambda_

    @property
    def requirements(self) -> MethodRequirements:
        return super().requirements._replace(uses_heads=True)  # uses the heads if the bundle has them

    @property
    def has_flexible_window(self) -> bool:  # type: ignore[override]
        return self.exact

    def limit_nodes(self, max_nodes: int) -> MethodConfig:
        max_window = max_nodes - 1  # the other node is the root, the last accepted token
        if not self.exact or self.window <= max_window:
            return self
        return SpeculativeJacobi(window=max_window) if max_window else Autoregressive()


class RowParallel(MethodConfig):
    """Row-parallel decoding, which generates several grid rows at once and is not exact.

    Each row stays `window` tokens behind the row above.
    """

    method: Literal["rows"] = "rows"
    exact: ClassVar[bool] = False
    measures_tvd: ClassVar[bool] = False  # measuring would take another forward pass over the whole image
    window: Window = 6
    drafts: Annotated[int, Field(ge=0, le=16, description="Tokens drafted ahead in every row, 0 .. 16.")] = 0


class GroupDecoding(MethodConfig):
    """Exact decoding of groups of cells, the only method for models that generate several cells per pass."""

    method: Literal["groups"] = "groups"

    @property
    def requirements(self) -> MethodRequirements:
        return MethodRequirements(order=True)


Quality = Literal["strict", "balanced", "fast"]


BUILT_IN_METHODS = (Autoregressive, Eagle, Lantern, LanternPlusPlus, SpeculativeJacobi, RowParallel, GroupDecoding)
# Every method, by its name. Method strings, HTTP fields and recipes follow from this table.
METHODS: dict[str, type[MethodConfig]] = {}
METHODS_BY_PARAMETER: dict[str, list[str]] = {}  # parameter -> names of the methods that take it


def add_method(method_class: type[MethodConfig]) -> None:
    """Add a method to both tables, in place of another class with its name. Users call `register_method`."""
    METHODS[method_class.model_fields["method"].default] = method_class
    METHODS_BY_PARAMETER.clear()
    for name, known in METHODS.items():
        for field, info in known.model_fields.items():
            if field != "method":
                METHODS_BY_PARAMETER.setdefault(info.alias or field, []).append(name)


for _class in BUILT_IN_METHODS:
    add_method(_class)


def _check_method_name(name: str) -> str:
    if name not in METHODS:
        raise PydanticCustomError("method", "expected a method", {"expected": ", ".join(METHODS)})
    return name


MethodName = Annotated[str, AfterValidator(_check_method_name)]
# Method in a manifest, which other programs read, too. Type checkers cannot evaluate a type that is made of a table.
if TYPE_CHECKING:
    Method: TypeAlias = MethodConfig
else:
    Method = Annotated[Union[BUILT_IN_METHODS], Field(discriminator="method")]  # noqa: UP007
