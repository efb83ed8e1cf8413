"""A toy target and drafter in NumPy whose probabilities are tabulated, so that tests can enumerate them.

The logits of a node depend on its context hash: the sum, over all cache columns and nodes that the node attends to, of
a hash of (token, position). A wrong attention mask, position, commit or rollback changes the sum, and so the logits.
Each node also checks that it attends to the unpadded prefix and to every position up to itself, each exactly once. A
node that fails this check gets NaN logits, and appending it to a cache is an error.

The target's hidden state holds the node's context hash, its position and its origin (target or drafter). The drafter
uses it to check that every slot gets the hidden state of the right position, with the token that followed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lantern_rt.methods import Autoregressive, MethodConfig, Sampling
from lantern_rt.runtime import decode as decoding
from lantern_rt.runtime import likelihood as likelihoods
from lantern_rt.runtime.decode import DecodeStep
from lantern_rt.runtime.drafters import count_draft_nodes
from lantern_rt.runtime.engine import HiddenStateView, PassInput, PassOutput
from lantern_rt.runtime.layout import ImageLayout, PassLayout
from lantern_rt.runtime.likelihood import Likelihood
from lantern_rt.runtime.raster import RasterLayout, RowEndLayout
from lantern_rt.runtime.state import DecodeSettings, DrafterLayout, ImageSequence, LoadedModel, PrefixRow, Prompt
from lantern_rt.runtime.target import TargetOutput
from lantern_rt.runtime.tree import TreeStructure

Hashes = NDArray[np.uint64]
# Origins of a hidden state.
TARGET = 1.0
DRAFTER = 2.0
MAX_POSITIONS = 512


def scramble(*values: NDArray | int) -> Hashes:
    """Return a well mixed 64-bit hash of integers, elementwise."""
    state = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for value in values:
            state = state + np.asarray(value).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state


POSITION_KEYS = scramble(np.arange(MAX_POSITIONS), 77)
KEYS_UP_TO = np.cumsum(POSITION_KEYS)


def table_logits(context: Hashes, vocabulary: int, seed: int, spread: float) -> NDArray[np.float32]:
    """Return the logits `[..., vocabulary]` of context hashes `[...]`, uniform in [-spread, spread]."""
    hashed = scramble(context[..., None], np.arange(vocabulary), seed)
    return (spread * (2 * (hashed >> np.uint64(40)).astype(np.float64) / 2**24 - 1)).astype(np.float32)


def to_floats(context: Hashes) -> NDArray[np.float32]:
    """Encode each hash as three float32 numbers, without loss: `[...]` to `[..., 3]`."""
    low = np.uint64(2**22 - 1)
    pieces = [context & low, (context >> np.uint64(22)) & low, context >> np.uint64(44)]
    return np.stack(pieces, -1).astype(np.float32)


def from_floats(pieces: NDArray[np.float32]) -> Hashes:
    """Decode hashes that `to_floats` encoded."""
    low, middle, high = (pieces[..., i].astype(np.uint64) for i in range(3))
    return low | (middle << np.uint64(22)) | (high << np.uint64(44))


@dataclass
class Entries:
    """Fields of the nodes of a pass or of a cache's columns, each `[rows, nodes or columns]`.

    Attributes:
        hashes: hash of (token, position).
        positions: position in the sequence.
        contexts: context hash: sum of the hashes that the node attends to.
        origin: model that made the hidden state at the input, `TARGET` or `DRAFTER`.
        padding: true at padding of the prefix.
        fault: true if the mask, position or input was wrong.
    """

    hashes: Hashes
    positions: NDArray[np.int64]
    contexts: Hashes
    origin: NDArray[np.float32]
    padding: NDArray[np.bool_]
    fault: NDArray[np.bool_]

    @classmethod
    def junk(cls, shape: tuple[int, int]) -> Entries:
        """Return entries that would spoil every sum, for columns to which nothing is committed."""
        hashes = scramble(np.arange(shape[0] * shape[1]), 991).reshape(shape)
        positions = np.full(shape, MAX_POSITIONS - 1)
        origin = np.zeros(shape, np.float32)
        fault = np.ones(shape, bool)
        return cls(hashes, positions, hashes.copy(), origin, padding=~fault, fault=fault)

    def arrays(self) -> list[NDArray]:
        return [self.hashes, self.positions, self.contexts, self.origin, self.padding, self.fault]


class ToyCache:
    """A KV cache of `Entries`, with junk past the end of each row. Appending a node with a fault is an error.

    Args:
        contiguous: whether committed positions must follow each other without gaps.
        last_position: position that all later nodes share, too.
    """

    def __init__(self, rows: int, capacity: int, contiguous: bool, last_position: int) -> None:
        self._lengths = np.zeros(rows, np.int64)
        self.entries = Entries.junk((rows, capacity))
        self.contiguous = contiguous
        self.last_position = last_position

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self._lengths.copy()

    def append(self, new_kv: Entries, accepted_indices: list[NDArray[np.int64]]) -> None:
        counts = np.array([len(indices) for indices in accepted_indices])
        assert len(counts) == len(self._lengths)
        rows = np.repeat(np.arange(len(accepted_indices)), counts)
        nodes = np.concatenate(accepted_indices)
        columns = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) + self._lengths[rows]
        assert columns.max(initial=-1) < self.entries.hashes.shape[1], "the cache is too small"
        assert not new_kv.fault[rows, nodes].any(), "a node with a wrong mask, position or input was committed"
        for array, new_array in zip(self.entries.arrays(), new_kv.arrays(), strict=True):
            array[rows, columns] = new_array[rows, nodes]
        self._lengths += counts
        if self.contiguous:
            self._check_chain(rows, columns)

    def _check_chain(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> None:
        """Check that each committed token follows the token before it: at the next position, and attending to it."""
        positions = self.entries.positions
        contexts = self.entries.contexts
        is_token = ~self.entries.padding[rows, columns] & (columns > 0)
        is_token[is_token] &= ~self.entries.padding[rows[is_token], columns[is_token] - 1]
        rows = rows[is_token]
        columns = columns[is_token]
        following = np.minimum(positions[rows, columns - 1] + 1, self.last_position)
        assert (positions[rows, columns] == following).all(), "committed positions jump"
        expected_contexts = contexts[rows, columns - 1] + self.entries.hashes[rows, columns]
        message = "a committed token did not attend to the token before it"
        assert (contexts[rows, columns] == expected_contexts).all(), message

    def forbid_memory_reuse(self) -> None:
        pass

    def truncate(self, lengths: NDArray[np.int64]) -> None:
        assert (lengths <= self._lengths).all()
        self._lengths = np.array(lengths, np.int64)
        is_past_end = np.arange(self.entries.hashes.shape[1]) >= self._lengths[:, None]
        junk = Entries.junk(is_past_end.shape)
        for array, junk_array in zip(self.entries.arrays(), junk.arrays(), strict=True):
            array[is_past_end] = junk_array[is_past_end]
        assert (self.entries.origin[~is_past_end] == TARGET).all(), "a draft node stayed in the drafter's cache"

    def keep_rows(self, rows: NDArray[np.int64]) -> None:
        self._lengths = self._lengths[rows]
        self.entries = Entries(*(array[rows] for array in self.entries.arrays()))

    def extend(self, other: ToyCache) -> None:
        rows = len(self._lengths)
        capacity = max(cache.entries.hashes.shape[1] for cache in (self, other))
        joined = Entries.junk((rows + len(other._lengths), capacity))
        for cache, joined_rows in ((self, slice(rows)), (other, slice(rows, None))):
            for joined_array, array in zip(joined.arrays(), cache.entries.arrays(), strict=True):
                joined_array[joined_rows, : array.shape[1]] = array
        self._lengths = np.concatenate([self._lengths, other._lengths])
        self.entries = joined


@dataclass
class ToyEngine:
    """Settings and checks that the toy target and the toy drafter share.

    Attributes:
        vocabulary: number of codes.
        prefix: positions before the first token.
        seed: number of the table of logits.
        spread: largest absolute logit.
        last_position: position that all later nodes share, too.
        round_span: the past length is rounded up to a multiple of this, as engines may do.
        passes: rows and nodes of every forward pass that was run.
    """

    vocabulary: int = 4
    prefix: int = 3
    seed: int = 1
    spread: float = 1.5
    last_position: int = MAX_POSITIONS - 2
    round_span: int = 1
    passes: list[tuple[int, int]] = field(default_factory=list)
    contiguous = True

    def new_cache(self, rows: int, capacity: int) -> ToyCache:
        return ToyCache(rows, capacity, self.contiguous, self.last_position)

    def padded_past_length(self, cache: ToyCache, nodes: int) -> int:
        longest = int(cache.lengths.max())
        return min(-(-longest // self.round_span) * self.round_span, cache.entries.hashes.shape[1])

    def _sums(self, batch: PassInput, cache: ToyCache, new_hashes: Hashes) -> tuple[Hashes, NDArray[np.bool_]]:
        """Check the inputs of a pass, and compute its context hashes.

        Returns:
            The context hash of each node, and whether it attends to the right positions; both `[rows, nodes]`.
        """
        rows, nodes = batch.positions.shape
        self.passes.append((rows, nodes))
        past_length = self.padded_past_length(cache, nodes)
        assert batch.attention_mask.shape == (rows, nodes, past_length + nodes)
        assert batch.attention_mask.dtype == bool
        assert batch.positions.dtype == np.int64
        assert nodes >= 2, "a pass of one node: engines would use another matrix kernel, which rounds differently"
        assert batch.positions.min() >= 0
        assert batch.positions.max() <= self.last_position
        node_indices = np.arange(nodes)
        assert batch.attention_mask[:, node_indices, past_length + node_indices].all(), (
            "a node does not attend to itself"
        )
        values = np.concatenate([cache.entries.hashes[:, :past_length], new_hashes], 1)
        positions = np.concatenate([cache.entries.positions[:, :past_length], batch.positions], 1)
        context = _masked_sum(batch.attention_mask, values)
        # The key of a set of positions is the sum of their keys: each node must attend to all positions up to itself.
        keys = _masked_sum(batch.attention_mask, POSITION_KEYS[positions])
        padding_keys = np.where(
            cache.entries.padding[:, :past_length], POSITION_KEYS[positions[:, :past_length]], np.uint64(0)
        )
        expected_keys = KEYS_UP_TO[batch.positions] - padding_keys.sum(1, dtype=np.uint64)[:, None]
        return context, (keys == expected_keys) | (batch.positions == self.last_position)


def _masked_sum(attention_mask: NDArray[np.bool_], values: Hashes) -> Hashes:
    return np.einsum("rnc,rc->rn", attention_mask.astype(np.uint64), values)


@dataclass
class ToyTarget(ToyEngine):
    """Target model with tabulated logits. Prefix rows hold (identity, slot, padding flag); see `make_prompt`.

    Attributes:
        row_end: token that ends each row of the image, the first after the codes; None without row ends.
        vectors: number of learned vectors, which are tokens after the codes.
    """

    row_end: int | None = None
    vectors: int = 0

    def code_hash(self, codes: NDArray[np.int64], positions: NDArray[np.int64]) -> Hashes:
        return scramble(codes, positions, self.seed)

    def prefix_hash(self, embeds: NDArray[np.float32]) -> Hashes:
        return scramble(embeds[..., 0].astype(np.int64), embeds[..., 1].astype(np.int64), 5)

    def logits(self, context: Hashes) -> NDArray[np.float32]:
        return table_logits(context, self.vocabulary, self.seed, self.spread)

    def run(self, batch: PassInput, cache: ToyCache) -> PassOutput:
        assert batch.hidden is None
        if batch.embeds is not None:
            assert batch.tokens is None
            assert (cache.lengths == 0).all()
            hashes = self.prefix_hash(batch.embeds)
            padding = batch.embeds[..., 2] > 0
            context, _ = self._sums(batch, cache, hashes)
            nodes = batch.positions.shape[1]
            expected_mask = ~padding[:, None] & np.tri(nodes, dtype=bool)
            is_right = (batch.attention_mask[:, :, -nodes:] == expected_mask).all(2) | padding
            is_right &= batch.positions == batch.embeds[..., 1]
        else:
            assert batch.tokens is not None
            assert batch.tokens.min() >= 0
            assert batch.tokens.max() < self.vocabulary + (self.row_end is not None) + self.vectors
            hashes = self.code_hash(batch.tokens, batch.positions)
            padding = np.zeros(batch.tokens.shape, bool)
            context, is_right = self._sums(batch, cache, hashes)
        logits = self.logits(context)
        logits[~is_right] = np.nan
        origin = np.full(context.shape, TARGET, np.float32)
        other_states = [batch.positions.astype(np.float32), origin, padding.astype(np.float32)]
        hidden = np.concatenate([to_floats(context), np.stack(other_states, -1)], -1)
        return PassOutput(logits, hidden, Entries(hashes, batch.positions, context, origin, padding, ~is_right))


@dataclass
class AnyOrder(ToyTarget):
    """The toy target without its checks of order: only its logits show what a node attends to."""

    contiguous = False

    def _sums(self, batch: PassInput, cache: ToyCache, new_hashes: Hashes) -> tuple[Hashes, NDArray[np.bool_]]:
        context, is_right = super()._sums(batch, cache, new_hashes)
        return context, np.ones_like(is_right)


@dataclass
class ToyDrafter(ToyEngine):
    """Drafter with tabulated logits: the target's logits of the same context, blended with unrelated logits.

    Attributes:
        target: target whose tokens are drafted.
        agreement: share of the target's logits in the blend: 1 drafts from the target's distribution.
        layout: where the drafter's slots and positions are.
    """

    target: ToyTarget = field(default_factory=ToyTarget)
    agreement: float = 0.5
    layout: DrafterLayout = field(default_factory=DrafterLayout)
    contiguous = False

    def logits(self, context: Hashes) -> NDArray[np.float32]:
        unrelated_logits = table_logits(context, self.vocabulary, self.seed + 1000, self.spread)
        return (self.agreement * self.target.logits(context) + (1 - self.agreement) * unrelated_logits).astype(
            np.float32
        )

    def run(self, batch: PassInput, cache: ToyCache) -> PassOutput:
        assert batch.tokens is not None
        assert batch.hidden is not None
        assert batch.embeds is None
        hidden = batch.hidden.read() if isinstance(batch.hidden, HiddenStateView) else batch.hidden
        previous_contexts = from_floats(hidden)
        slot_of_hidden = hidden[..., 3].astype(np.int64)
        origin = hidden[..., 4]
        padding = hidden[..., 5] > 0
        first_slot = self.prefix - 1  # slot of the first token, as a slot pairs a hidden state with the next token
        in_prefix = batch.positions < first_slot
        code_hashes = self.target.code_hash(batch.tokens, slot_of_hidden + 1)
        hashes = np.where(
            in_prefix,
            np.uint64(0),
            code_hashes + np.where(batch.positions == first_slot, previous_contexts, np.uint64(0)),
        )
        attended_contexts, is_right = self._sums_with_prefix(batch, cache, hashes, padding)
        context = previous_contexts + code_hashes
        clipped = batch.positions == self.last_position
        is_right &= (slot_of_hidden == batch.positions) | clipped
        is_right &= np.where(
            in_prefix, batch.tokens == self.layout.prefix_token, (attended_contexts == context) | clipped
        )
        is_right &= origin > 0
        logits = self.logits(context)
        logits[~is_right] = np.nan
        other_states = [slot_of_hidden + 1.0, np.full(context.shape, DRAFTER), np.zeros(context.shape)]
        hidden = np.concatenate([to_floats(context), np.stack(other_states, -1).astype(np.float32)], -1)
        masked = padding & self.layout.masks_prefix
        return PassOutput(logits, hidden, Entries(hashes, batch.positions, context, origin, masked, ~is_right))

    def _sums_with_prefix(
        self, batch: PassInput, cache: ToyCache, new: Hashes, padding: NDArray[np.bool_]
    ) -> tuple[Hashes, NDArray[np.bool_]]:
        """Compute context hashes as `_sums` does, and check that padded prefix slots of the same pass are masked."""
        context, is_right = self._sums(batch, cache, new)
        if self.layout.masks_prefix and padding.any():
            nodes = batch.positions.shape[1]
            attends_to_padding = batch.attention_mask[:, :, -nodes:] & padding[:, None] & ~np.eye(nodes, dtype=bool)
            is_right = ~attends_to_padding.any(2)  # `_sums` expects the masked slots, too, so its check does not apply
        return context, is_right


@dataclass(frozen=True)
class ToyModel(LoadedModel):
    """A toy model and the layout of its images."""

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
    """Return the layout of an image, with row ends if `row_end` is their token."""
    return RasterLayout(codes, columns) if row_end is None else RowEndLayout(codes, columns, row_end=row_end)


def plan_of(layout: ImageLayout, sampling: Sampling, method: MethodConfig, adaptive: bool = False) -> DecodeSettings:
    return DecodeSettings(layout, sampling, method, count_draft_nodes(method), adaptive)


def decode(
    model: ToyModel,
    prompts: Iterable[Prompt],
    seeds: Sequence[int],
    sampling: Sampling,
    method: MethodConfig,
    adaptive_window: bool = False,
    **options: Any,
) -> Generator[DecodeStep, None, None]:
    plan = DecodeSettings(model.image, sampling, method, count_draft_nodes(method, model.max_nodes), adaptive_window)
    return decoding.decode(model, plan, prompts, seeds, **options)


def likelihood(model: ToyModel, prompt: Prompt, codes: Any, sampling: Sampling, counted: Any = None) -> Likelihood:
    settings = plan_of(model.image, sampling, Autoregressive())
    return likelihoods.compute_likelihood(model, settings, prompt, codes, counted)


def make_prompt(identity: int, prefix: int = 3, padding: int = 0) -> Prompt:
    """Make a prompt whose first `padding` prefix positions are padding; `identity` tells prompts apart."""
    rows = np.zeros((2, prefix, 3), np.float32)
    rows[:, :, 0] = np.array([[identity], [identity + 5000]])
    rows[:, :, 1] = np.arange(prefix)
    rows[:, :padding, 2] = 1
    is_real_token = np.arange(prefix) >= padding
    return Prompt(PrefixRow(rows[0], is_real_token), PrefixRow(rows[1], is_real_token))


def make_model(
    vocabulary: int = 4,
    codes: int = 4,
    prefix: int = 3,
    seed: int = 1,
    spread: float = 1.5,
    agreement: float = 0.5,
    round_span: int = 1,
    positions: int = MAX_POSITIONS - 1,
    layout: DrafterLayout | None = None,
    columns: int = 3,
    neighbors: NDArray[np.integer] | None = None,
    row_ends: bool = False,
) -> ToyModel:
    """Make a toy target and drafter.

    Args:
        agreement: share of the target's logits in the drafter's.
        round_span: the past length is rounded up to a multiple of this, as engines may do.
        positions: size of the rotary table; deeper nodes share its last position.
        row_ends: whether each row ends with a token, the first after the codes.
    """
    layout = layout or DrafterLayout()
    row_end = vocabulary if row_ends else None
    target = ToyTarget(vocabulary, prefix, seed, spread, positions - 1, round_span, row_end=row_end)
    last_drafter_position = positions - 1 + layout.position_shift
    drafter = ToyDrafter(
        vocabulary,
        prefix,
        seed,
        spread,
        last_drafter_position,
        round_span,
        target=target,
        agreement=agreement,
        layout=layout,
    )
    return ToyModel(target, drafter, positions, layout, neighbors, image=raster_layout(codes, columns, row_end))


@dataclass
class ToyNodes:
    """Nodes of a draft, without preceding tokens."""

    tree_structure: TreeStructure
    next_code_indices: Sequence[int]

    def preceding_codes(self, node: int) -> NDArray[np.int64]:
        return np.empty(0, np.int64)


def output_of(
    logits: NDArray[Any],
    tree_structure: TreeStructure,
    cells: Sequence[int],
    layout: PassLayout | None = None,
    rows: slice = slice(None),
    seed: int = 0,
) -> TargetOutput:
    """Make a target's output over the nodes of a draft, from logits `[rows, nodes, vocabulary]`."""
    sequence = ImageSequence(0, plan_of(RasterLayout(1), Sampling(), Autoregressive()), make_prompt(0), seed)
    depths = tree_structure.depths
    layout = layout or PassLayout(depths, depths, tree_structure.ancestor_mask)
    return TargetOutput(sequence, ToyNodes(tree_structure, cells), layout, logits, rows)


def codes_of(steps: Iterable[DecodeStep], images: int) -> list[list[int]]:
    """Return the tokens of each image that steps committed."""
    codes: list[list[int]] = [[] for _ in range(images)]
    for step in steps:
        for part in step.parts:
            codes[part.sequence] += part.codes.tolist()
    return codes
