"""A toy target and drafter with tabulated probabilities, which notice every wrong mask, position or commit.

A node's logits are looked up by a hash of everything it sees: the sum, over visible cache columns and nodes,
of a hash of (code, position). A wrong mask, position, commit or rollback changes the sum, hence the logits.
On top of that each node checks that the positions it sees are the real prefix and then every position up to
its own, once each. A node that fails gets NaN logits and cannot be appended to a cache.

The target's hidden state carries its context hash, its position and where it came from, so the drafter can
check that every slot was given the hidden state of its own position and the code that followed it.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lantern_rt.methods import Ar, MethodConfig, Sampling
from lantern_rt.runtime import decode as decoding
from lantern_rt.runtime import likelihood as likelihoods
from lantern_rt.runtime.decode import Step
from lantern_rt.runtime.drafters import count_nodes
from lantern_rt.runtime.engine import HiddenView, Pass, PassOutput
from lantern_rt.runtime.layout import ImageLayout, PassLayout
from lantern_rt.runtime.likelihood import Likelihood
from lantern_rt.runtime.raster import RasterLayout, RowEndLayout
from lantern_rt.runtime.state import DrafterLayout, ImageSequence, Model, Plan, PrefixRow, Prompt
from lantern_rt.runtime.target import TargetOutput
from lantern_rt.runtime.tree import TreeStructure

Hashes = NDArray[np.uint64]
TARGET = 1.0  # where a hidden state came from
DRAFTER = 2.0
MAXIMUM = 512


def scramble(*values: NDArray | int) -> Hashes:
    """A well mixed 64-bit hash of integers, elementwise."""
    state = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for value in values:
            state = state + np.asarray(value).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state


POSITION_KEYS = scramble(np.arange(MAXIMUM), 77)
KEYS_UP_TO = np.cumsum(POSITION_KEYS)


def table_logits(context: Hashes, vocabulary: int, seed: int, spread: float) -> NDArray[np.float32]:
    """The table: logits `[..., vocabulary]` of a context hash `[...]`, uniform in [-spread, spread]."""
    hashed = scramble(context[..., None], np.arange(vocabulary), seed)
    return (spread * (2 * (hashed >> np.uint64(40)).astype(np.float64) / 2**24 - 1)).astype(np.float32)


def to_floats(context: Hashes) -> NDArray[np.float32]:
    """A hash as three float32 numbers that hold it exactly."""
    low = np.uint64(2**22 - 1)
    pieces = [context & low, (context >> np.uint64(22)) & low, context >> np.uint64(44)]
    return np.stack(pieces, -1).astype(np.float32)


def from_floats(pieces: NDArray[np.float32]) -> Hashes:
    """The inverse of `to_floats`."""
    low, middle, high = (pieces[..., i].astype(np.uint64) for i in range(3))
    return low | (middle << np.uint64(22)) | (high << np.uint64(44))


@dataclass
class Entries:
    """Per node or cache column: hash of (code, position), position, context hash, origin, padding flag, fault."""

    hashes: Hashes
    positions: NDArray[np.int64]
    contexts: Hashes
    origin: NDArray[np.float32]
    padding: NDArray[np.bool_]
    fault: NDArray[np.bool_]

    @classmethod
    def junk(cls, shape: tuple[int, int]) -> Entries:
        """What a cache holds where nothing was committed: values that would spoil every sum."""
        noise = scramble(np.arange(shape[0] * shape[1]), 991).reshape(shape)
        yes = np.ones(shape, bool)
        return cls(noise, np.full(shape, MAXIMUM - 1), noise.copy(), np.zeros(shape, np.float32), ~yes, yes)

    def columns(self) -> list[NDArray]:
        return [self.hashes, self.positions, self.contexts, self.origin, self.padding, self.fault]


class ToyCache:
    """Entries per row, junk past the end; appending a node with a fault is an error."""

    def __init__(self, rows: int, capacity: int, contiguous: bool, last_position: int) -> None:
        self._lengths = np.zeros(rows, np.int64)
        self.entries = Entries.junk((rows, capacity))
        self.contiguous = contiguous
        self.last_position = last_position

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self._lengths.copy()

    def append(self, new_kv: Entries, accepted_indices: list[NDArray[np.int64]]) -> None:
        counts = np.array([len(pick) for pick in accepted_indices])
        assert len(counts) == len(self._lengths)
        rows = np.repeat(np.arange(len(accepted_indices)), counts)
        picked = np.concatenate(accepted_indices)
        columns = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) + self._lengths[rows]
        assert columns.max(initial=-1) < self.entries.hashes.shape[1], "the cache is too small"
        assert not new_kv.fault[rows, picked].any(), "a node with a wrong mask, position or input was committed"
        for kept, new in zip(self.entries.columns(), new_kv.columns(), strict=True):
            kept[rows, columns] = new[rows, picked]
        self._lengths += counts
        if self.contiguous:
            self._check_chain(rows, columns)

    def _check_chain(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> None:
        """Every committed code must follow the one before it, at the next position, having seen it."""
        positions = self.entries.positions
        contexts = self.entries.contexts
        code = ~self.entries.padding[rows, columns] & (columns > 0)
        code[code] &= ~self.entries.padding[rows[code], columns[code] - 1]
        rows = rows[code]
        columns = columns[code]
        following = np.minimum(positions[rows, columns - 1] + 1, self.last_position)
        assert (positions[rows, columns] == following).all(), "committed positions jump"
        before = contexts[rows, columns - 1] + self.entries.hashes[rows, columns]
        assert (contexts[rows, columns] == before).all(), "a committed code has not seen the one before it"

    def discard(self) -> None:
        pass

    def truncate(self, lengths: NDArray[np.int64]) -> None:
        assert (lengths <= self._lengths).all()
        self._lengths = np.array(lengths, np.int64)
        past = np.arange(self.entries.hashes.shape[1]) >= self._lengths[:, None]
        junk = Entries.junk(past.shape)
        for kept, noise in zip(self.entries.columns(), junk.columns(), strict=True):
            kept[past] = noise[past]
        assert (self.entries.origin[~past] == TARGET).all(), "a draft node stayed in the drafter's cache"

    def keep_rows(self, rows: NDArray[np.int64]) -> None:
        self._lengths = self._lengths[rows]
        self.entries = Entries(*(column[rows] for column in self.entries.columns()))

    def extend(self, other: ToyCache) -> None:
        rows = len(self._lengths)
        capacity = max(one.entries.hashes.shape[1] for one in (self, other))
        joined = Entries.junk((rows + len(other._lengths), capacity))
        for one, place in ((self, slice(rows)), (other, slice(rows, None))):
            for column, own in zip(joined.columns(), one.entries.columns(), strict=True):
                column[place, : own.shape[1]] = own
        self._lengths = np.concatenate([self._lengths, other._lengths])
        self.entries = joined


@dataclass
class ToyEngine:
    """What target and drafter share. `round_span`: spans are rounded up to a multiple, as engines may."""

    vocabulary: int = 4
    prefix: int = 3
    seed: int = 1
    spread: float = 1.5
    last_position: int = MAXIMUM - 2
    round_span: int = 1
    passes: list[tuple[int, int]] = field(default_factory=list)  # rows, nodes of every pass
    contiguous = True

    def new_cache(self, rows: int, capacity: int) -> ToyCache:
        return ToyCache(rows, capacity, self.contiguous, self.last_position)

    def next_past_length(self, cache: ToyCache, nodes: int) -> int:
        longest = int(cache.lengths.max())
        return min(-(-longest // self.round_span) * self.round_span, cache.entries.hashes.shape[1])

    def _sums(self, batch: Pass, cache: ToyCache, new: Hashes) -> tuple[Hashes, NDArray[np.bool_]]:
        """Context hash per node, and whether the positions it sees are right; `[rows, nodes]`."""
        rows, nodes = batch.positions.shape
        self.passes.append((rows, nodes))
        past_length = self.next_past_length(cache, nodes)
        assert batch.attention_mask.shape == (rows, nodes, past_length + nodes)
        assert batch.attention_mask.dtype == bool
        assert batch.positions.dtype == np.int64
        assert nodes >= 2, "one-node passes use another matrix kernel"
        assert batch.positions.min() >= 0
        assert batch.positions.max() <= self.last_position
        own = np.arange(nodes)
        assert batch.attention_mask[:, own, past_length + own].all(), "every node sees at least itself"
        values = np.concatenate([cache.entries.hashes[:, :past_length], new], 1)
        positions = np.concatenate([cache.entries.positions[:, :past_length], batch.positions], 1)
        context = _masked_sum(batch.attention_mask, values)
        keys = _masked_sum(batch.attention_mask, POSITION_KEYS[positions])
        padding = np.where(
            cache.entries.padding[:, :past_length], POSITION_KEYS[positions[:, :past_length]], np.uint64(0)
        )
        expected = KEYS_UP_TO[batch.positions] - padding.sum(1, dtype=np.uint64)[:, None]
        return context, (keys == expected) | (batch.positions == self.last_position)


def _masked_sum(attention_mask: NDArray[np.bool_], values: Hashes) -> Hashes:
    return np.einsum("rnc,rc->rn", attention_mask.astype(np.uint64), values)


@dataclass
class ToyTarget(ToyEngine):
    """Tabulated target. Prefix rows carry (identity, slot, padding flag); see `make_prompt`."""

    row_end: int | None = None  # the token behind all codes, if rows end with it
    vectors: int = 0  # learned vectors, tokens behind all codes

    def code_hash(self, codes: NDArray[np.int64], positions: NDArray[np.int64]) -> Hashes:
        return scramble(codes, positions, self.seed)

    def prefix_hash(self, embeds: NDArray[np.float32]) -> Hashes:
        return scramble(embeds[..., 0].astype(np.int64), embeds[..., 1].astype(np.int64), 5)

    def logits(self, context: Hashes) -> NDArray[np.float32]:
        return table_logits(context, self.vocabulary, self.seed, self.spread)

    def run(self, batch: Pass, cache: ToyCache) -> PassOutput:
        assert batch.hidden is None
        if batch.embeds is not None:
            assert batch.tokens is None
            assert (cache.lengths == 0).all()
            new = self.prefix_hash(batch.embeds)
            padding = batch.embeds[..., 2] > 0
            context, _ = self._sums(batch, cache, new)
            nodes = batch.positions.shape[1]
            wanted = ~padding[:, None] & np.tri(nodes, dtype=bool)
            right = (batch.attention_mask[:, :, -nodes:] == wanted).all(2) | padding
            right &= batch.positions == batch.embeds[..., 1]
        else:
            assert batch.tokens is not None
            assert batch.tokens.min() >= 0
            assert batch.tokens.max() < self.vocabulary + (self.row_end is not None) + self.vectors
            new = self.code_hash(batch.tokens, batch.positions)
            padding = np.zeros(batch.tokens.shape, bool)
            context, right = self._sums(batch, cache, new)
        logits = self.logits(context)
        logits[~right] = np.nan
        origin = np.full(context.shape, TARGET, np.float32)
        rest = [batch.positions.astype(np.float32), origin, padding.astype(np.float32)]
        hidden = np.concatenate([to_floats(context), np.stack(rest, -1)], -1)
        return PassOutput(logits, hidden, Entries(new, batch.positions, context, origin, padding, ~right))


@dataclass
class AnyOrder(ToyTarget):
    """The toy target without its checks of order: what a node sees is only told by its logits."""

    contiguous = False

    def _sums(self, batch: Pass, cache: ToyCache, new: Hashes) -> tuple[Hashes, NDArray[np.bool_]]:
        context, right = super()._sums(batch, cache, new)
        return context, np.ones_like(right)


@dataclass
class ToyDrafter(ToyEngine):
    """Tabulated drafter: the target's logits of the same context, blended with a table of its own.

    agreement: 1 drafts from the target's own distribution, 0 from an unrelated one.
    """

    target: ToyTarget = field(default_factory=ToyTarget)
    agreement: float = 0.5
    layout: DrafterLayout = field(default_factory=DrafterLayout)
    contiguous = False

    def logits(self, context: Hashes) -> NDArray[np.float32]:
        own = table_logits(context, self.vocabulary, self.seed + 1000, self.spread)
        return (self.agreement * self.target.logits(context) + (1 - self.agreement) * own).astype(np.float32)

    def run(self, batch: Pass, cache: ToyCache) -> PassOutput:
        assert batch.tokens is not None
        assert batch.hidden is not None
        assert batch.embeds is None
        hidden = batch.hidden.read() if isinstance(batch.hidden, HiddenView) else batch.hidden
        before = from_floats(hidden)
        slot_of_hidden = hidden[..., 3].astype(np.int64)
        origin = hidden[..., 4]
        padding = hidden[..., 5] > 0
        first = self.prefix - 1  # the slot that holds the first code
        in_prefix = batch.positions < first
        code = self.target.code_hash(batch.tokens, slot_of_hidden + 1)
        new = np.where(in_prefix, np.uint64(0), code + np.where(batch.positions == first, before, np.uint64(0)))
        seen, right = self._sums_with_prefix(batch, cache, new, padding)
        context = before + code
        clipped = batch.positions == self.last_position
        right &= (slot_of_hidden == batch.positions) | clipped
        right &= np.where(in_prefix, batch.tokens == self.layout.prefix_token, (seen == context) | clipped)
        right &= origin > 0
        logits = self.logits(context)
        logits[~right] = np.nan
        rest = [slot_of_hidden + 1.0, np.full(context.shape, DRAFTER), np.zeros(context.shape)]
        hidden = np.concatenate([to_floats(context), np.stack(rest, -1).astype(np.float32)], -1)
        masked = padding & self.layout.masks_prefix
        return PassOutput(logits, hidden, Entries(new, batch.positions, context, origin, masked, ~right))

    def _sums_with_prefix(
        self, batch: Pass, cache: ToyCache, new: Hashes, padding: NDArray[np.bool_]
    ) -> tuple[Hashes, NDArray[np.bool_]]:
        """`_sums`, where padded prefix slots of this very pass must be hidden too (if the layout masks them)."""
        seen, right = self._sums(batch, cache, new)
        if self.layout.masks_prefix and padding.any():
            nodes = batch.positions.shape[1]
            hidden = batch.attention_mask[:, :, -nodes:] & padding[:, None] & ~np.eye(nodes, dtype=bool)
            right = ~hidden.any(2)  # masked slots are left out of the sum that `_sums` expects
        return seen, right


@dataclass(frozen=True)
class ToyModel(Model):
    """A model with the layout of its images."""

    image: ImageLayout = field(default_factory=lambda: RasterLayout(4))

    @property
    def num_codes(self) -> int:
        return self.image.num_codes

    @property
    def raster(self) -> RasterLayout:
        assert isinstance(self.image, RasterLayout)
        return self.image

    @property
    def row_end(self) -> int | None:
        return self.image.row_end if isinstance(self.image, RowEndLayout) else None


def raster_layout(codes: int, columns: int = 1, row_end: int | None = None) -> RasterLayout:
    """The layout of an image with or without row ends."""
    return RasterLayout(codes, columns) if row_end is None else RowEndLayout(codes, columns, row_end=row_end)


def plan_of(layout: ImageLayout, sampling: Sampling, method: MethodConfig, adaptive: bool = False) -> Plan:
    """How images of a layout are generated."""
    return Plan(layout, sampling, method, count_nodes(method), adaptive)


def decode(
    model: ToyModel,
    prompts: Iterable[Prompt],
    seeds: Sequence[int],
    sampling: Sampling,
    method: MethodConfig,
    adaptive: bool = False,
    **more: Any,
) -> Generator[Step, None, None]:
    """Decode images of the model's layout."""
    plan = Plan(model.image, sampling, method, count_nodes(method, model.max_nodes), adaptive)
    return decoding.decode(model, plan, prompts, seeds, **more)


def likelihood(model: ToyModel, prompt: Prompt, codes: Any, sampling: Sampling, counted: Any = None) -> Likelihood:
    """The likelihood of an image of the model's layout."""
    return likelihoods.likelihood(model, plan_of(model.image, sampling, Ar()), prompt, codes, counted)


def make_prompt(identity: int, prefix: int = 3, padding: int = 0) -> Prompt:
    """A prompt whose first `padding` prefix positions are padding."""
    rows = np.zeros((2, prefix, 3), np.float32)
    rows[:, :, 0] = np.array([[identity], [identity + 5000]])
    rows[:, :, 1] = np.arange(prefix)
    rows[:, :padding, 2] = 1
    real = np.arange(prefix) >= padding
    return Prompt(PrefixRow(rows[0], real), PrefixRow(rows[1], real))


def make_model(
    vocabulary: int = 4,
    codes: int = 4,
    prefix: int = 3,
    seed: int = 1,
    spread: float = 1.5,
    agreement: float = 0.5,
    round_span: int = 1,
    positions: int = MAXIMUM - 1,
    layout: DrafterLayout | None = None,
    columns: int = 3,
    neighbors: NDArray[np.integer] | None = None,
    row_ends: bool = False,
) -> ToyModel:
    """A toy target and drafter; `positions` in the rotary table, so ever deeper nodes share the last one.

    row_ends: whether rows end with a token, the one behind all codes.
    """
    layout = layout or DrafterLayout()
    row_end = vocabulary if row_ends else None
    target = ToyTarget(vocabulary, prefix, seed, spread, positions - 1, round_span, row_end=row_end)
    last = positions - 1 + layout.position_shift
    drafter = ToyDrafter(
        vocabulary, prefix, seed, spread, last, round_span, target=target, agreement=agreement, layout=layout
    )
    return ToyModel(target, drafter, positions, layout, neighbors, image=raster_layout(codes, columns, row_end))


@dataclass
class ToyNodes:
    """Nodes of a draft of which nothing else is asked."""

    structure: TreeStructure
    cells: Sequence[int]

    def preceding_codes(self, node: int) -> NDArray[np.int64]:
        return np.empty(0, np.int64)


def output_of(
    logits: NDArray[Any],
    structure: TreeStructure,
    cells: Sequence[int],
    layout: PassLayout | None = None,
    rows: slice = slice(None),
    seed: int = 0,
) -> TargetOutput:
    """The output of a target after the nodes of a draft, from logits `[rows, nodes, vocabulary]`."""
    sequence = ImageSequence(0, plan_of(RasterLayout(1), Sampling(), Ar()), make_prompt(0), seed)
    depths = structure.depths
    layout = layout or PassLayout(depths, depths, structure.ancestors)
    return TargetOutput(sequence, ToyNodes(structure, cells), layout, logits, rows)


def codes_of(steps: Iterable[Step], images: int) -> list[list[int]]:
    """The codes that steps committed, of each image."""
    codes: list[list[int]] = [[] for _ in range(images)]
    for step in steps:
        for part in step.parts:
            codes[part.sequence] += part.codes.tolist()
    return codes


def naive_distribution(logits: NDArray[np.float64], sampling: Sampling) -> NDArray[np.float64]:
    """Temperature, top-k and top-p written down plainly, as a second opinion on `shape_distribution`."""
    weights = np.exp((logits - logits.max()) / (sampling.temperature or 1.0))
    for name in sampling.filter_order.split(", "):
        order = sorted(range(len(weights)), key=lambda code: -weights[code])
        if name == "top-k" and sampling.top_k:
            for code in order[sampling.top_k :]:
                weights[code] = 0
        if name == "top-p" and sampling.top_p < 1:
            total = weights.sum()
            passed = 0.0
            for code in order:
                share = weights[code] / total
                if passed > sampling.top_p:
                    weights[code] = 0
                passed += share
    return weights / weights.sum()


def next_distribution(model: ToyModel, prompt: Prompt, codes: Sequence[int], sampling: Sampling) -> NDArray[np.float64]:
    """The target's distribution after tokens, from the table, without any engine or runtime."""
    target = model.target
    assert isinstance(target, ToyTarget)
    prefix = len(prompt.cond.real)
    rows = []
    for side in [prompt.cond, prompt.uncond]:
        parts = target.prefix_hash(side.embeds)[side.real]
        if codes:
            parts = np.append(parts, target.code_hash(np.array(codes), prefix + np.arange(len(codes))))
        rows.append(target.logits(parts.sum(dtype=np.uint64, keepdims=True))[0].astype(np.float64))
    cond, uncond = rows
    penalty = sampling.repetition_penalty or 1.0
    for code in {one for one in codes if one < len(cond)}:  # ends of rows are no choice
        cond[code] = cond[code] * penalty if cond[code] < 0 else cond[code] / penalty
    cell = sum(code < len(cond) for code in codes)
    scale = sampling.cfg_scale if cell < sampling.count_guided(model.num_codes) else 1.0
    if sampling.cfg_schedule == "linear":
        scale = 1 + (scale - 1) * (cell + 1) / model.num_codes
    return naive_distribution(uncond + scale * (cond - uncond), sampling)


def joint_distribution(model: ToyModel, prompt: Prompt, sampling: Sampling) -> NDArray[np.float64]:
    """Probability of every sequence of codes, `[vocabulary] * codes`, by enumeration."""
    vocabulary = model.target.vocabulary  # type: ignore[attr-defined]
    joint = np.ones((vocabulary,) * model.num_codes)
    for length in range(model.num_codes):
        for before in itertools.product(range(vocabulary), repeat=length):
            step = next_distribution(model, prompt, before, sampling)
            joint[before] *= step.reshape((vocabulary,) + (1,) * (model.num_codes - length - 1))
    return joint
