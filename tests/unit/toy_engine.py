"""A toy target and a toy drafter in NumPy. A hash function gives their logits, so tests can compute probabilities.

Each pair (token, position) has a hash. The context hash of a node is the sum of the hashes that the node attends to.
The node's logits are a function of the context hash, so a wrong mask, position or KV cache changes the logits. A node
must attend exactly once to every position up to the node, except padding. Otherwise the logits of the node are NaN,
and appending the node to a cache is an error.

A hidden state holds the node's context hash, the position and the origin (target or drafter). A slot is a node of the
drafter: it pairs a hidden state with the next token. The drafter checks the position and the token of every slot.
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
from lantern_rt.runtime.engine import PassInput, PassOutput, read_hidden_states
from lantern_rt.runtime.layout import ImageLayout, PassLayout
from lantern_rt.runtime.likelihood import Likelihood
from lantern_rt.runtime.raster import RasterLayout, RowEndLayout
from lantern_rt.runtime.state import DrafterLayout, ImageSequence, LoadedModel, Plan, PrefixRow, Prompt
from lantern_rt.runtime.target import TargetOutput
from lantern_rt.runtime.tree import TreeStructure

Hashes = NDArray[np.uint64]
# Models that make hidden states.
TARGET = 1.0
DRAFTER = 2.0
MAX_POSITIONS = 512


def hash_integers(*values: NDArray | int) -> Hashes:
    """Return 64-bit hashes (splitmix64). The arrays broadcast; each hash depends on one element of every array."""
    state = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for value in values:
            state = state + np.asarray(value).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state


POSITION_HASHES = hash_integers(np.arange(MAX_POSITIONS), 77)
POSITION_HASH_SUMS = np.cumsum(POSITION_HASHES)


def look_up_logits(context: Hashes, vocabulary: int, seed: int, max_logit: float) -> NDArray[np.float32]:
    hashed = hash_integers(context[..., None], np.arange(vocabulary), seed)
    return (max_logit * (2 * (hashed >> np.uint64(40)).astype(np.float64) / 2**24 - 1)).astype(np.float32)


def encode_hashes(context: Hashes) -> NDArray[np.float32]:
    """Encode hashes `[...]` without loss as three float32 numbers each, `[..., 3]`: a float32 holds 24 bits."""
    low = np.uint64(2**22 - 1)
    pieces = [context & low, (context >> np.uint64(22)) & low, context >> np.uint64(44)]
    return np.stack(pieces, -1).astype(np.float32)


def decode_hashes(pieces: NDArray[np.float32]) -> Hashes:
    low, middle, high = (pieces[..., i].astype(np.uint64) for i in range(3))
    return low | (middle << np.uint64(22)) | (high << np.uint64(44))


@dataclass
class CacheEntries:
    """Values of the nodes of a forward pass or of the columns of a KV cache, each `[rows, nodes or columns]`."""

    hashes: Hashes
    positions: NDArray[np.int64]
    contexts: Hashes
    origin: NDArray[np.float32]
    padding: NDArray[np.bool_]
    has_fault: NDArray[np.bool_]

    @classmethod
    def make_random(cls, shape: tuple[int, int]) -> CacheEntries:
        """Return random entries for empty columns: attending to an empty column changes the context hash."""
        hashes = hash_integers(np.arange(shape[0] * shape[1]), 991).reshape(shape)
        positions = np.full(shape, MAX_POSITIONS - 1)
        origin = np.zeros(shape, np.float32)
        has_fault = np.ones(shape, bool)
        return cls(hashes, positions, hashes.copy(), origin, padding=~has_fault, has_fault=has_fault)

    def list_arrays(self) -> list[NDArray]:
        return [self.hashes, self.positions, self.contexts, self.origin, self.padding, self.has_fault]


class ToyCache:
    """A KV cache of `CacheEntries`, with random entries past the end of each row. Faulty nodes are rejected."""

    def __init__(self, rows: int, capacity: int, contiguous: bool, last_position: int) -> None:
        self._lengths = np.zeros(rows, np.int64)
        self.entries = CacheEntries.make_random((rows, capacity))
        self.contiguous = contiguous
        self.last_position = last_position

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self._lengths.copy()

    def append(self, new_kv: CacheEntries, accepted_indices: list[NDArray[np.int64]]) -> None:
        counts = np.array([len(indices) for indices in accepted_indices])
        assert len(counts) == len(self._lengths)
        rows = np.repeat(np.arange(len(accepted_indices)), counts)
        nodes = np.concatenate(accepted_indices)
        columns = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) + self._lengths[rows]
        assert columns.max(initial=-1) < self.entries.hashes.shape[1], "the cache is too small"
        assert not new_kv.has_fault[rows, nodes].any(), "a node with a wrong mask, position or input was committed"
        for array, new_array in zip(self.entries.list_arrays(), new_kv.list_arrays(), strict=True):
            array[rows, columns] = new_array[rows, nodes]
        self._lengths += counts
        if self.contiguous:
            self._check_committed_tokens(rows, columns)

    def _check_committed_tokens(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> None:
        """Check that each committed token has the next position and attends to the token before it."""
        positions = self.entries.positions
        contexts = self.entries.contexts
        # The first token of a row has no token before it.
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
        empty_entries = CacheEntries.make_random(is_past_end.shape)
        for array, empty_array in zip(self.entries.list_arrays(), empty_entries.list_arrays(), strict=True):
            array[is_past_end] = empty_array[is_past_end]
        assert (self.entries.origin[~is_past_end] == TARGET).all(), "a draft node stayed in the drafter's cache"

    def keep_rows(self, rows: NDArray[np.int64]) -> None:
        self._lengths = self._lengths[rows]
        self.entries = CacheEntries(*(array[rows] for array in self.entries.list_arrays()))

    def extend(self, cache: ToyCache) -> None:
        rows = len(self._lengths)
        capacity = max(part.entries.hashes.shape[1] for part in (self, cache))
        joined = CacheEntries.make_random((rows + len(cache._lengths), capacity))
        for source, joined_rows in ((self, slice(rows)), (cache, slice(rows, None))):
            for joined_array, array in zip(joined.list_arrays(), source.entries.list_arrays(), strict=True):
                joined_array[joined_rows, : array.shape[1]] = array
        self._lengths = np.concatenate([self._lengths, cache._lengths])
        self.entries = joined


@dataclass
class ToyEngine:
    """Settings and checks that the toy target and the toy drafter share."""

    vocabulary: int = 4
    prefix: int = 3
    seed: int = 1
    max_logit: float = 1.5
    last_position: int = MAX_POSITIONS - 2
    past_length_multiple: int = 1
    passes: list[tuple[int, int]] = field(default_factory=list)
    contiguous = True

    def make_cache(self, rows: int, capacity: int) -> ToyCache:
        return ToyCache(rows, capacity, self.contiguous, self.last_position)

    def past_columns(self, cache: ToyCache, nodes: int) -> int:
        longest = int(cache.lengths.max())
        return min(-(-longest // self.past_length_multiple) * self.past_length_multiple, cache.entries.hashes.shape[1])

    def _compute_context_hashes(
        self, batch: PassInput, cache: ToyCache, new_hashes: Hashes
    ) -> tuple[Hashes, NDArray[np.bool_]]:
        """Check a pass; return the context hash of each node, and whether it attends to the right positions."""
        rows, nodes = batch.positions.shape
        self.passes.append((rows, nodes))
        past_length = self.past_columns(cache, nodes)
        assert batch.attention_mask.shape == (rows, nodes, past_length + nodes)
        assert batch.attention_mask.dtype == bool
        assert batch.positions.dtype == np.int64
        assert nodes >= 2, "a pass of one node: engines would use another matrix kernel, which rounds differently"
        assert batch.positions.min() >= 0
        assert batch.positions.max() <= self.last_position
        node_indices = np.arange(nodes)
        attends_to_itself = batch.attention_mask[:, node_indices, past_length + node_indices]
        assert attends_to_itself.all(), "a node does not attend to itself"
        values = np.concatenate([cache.entries.hashes[:, :past_length], new_hashes], 1)
        positions = np.concatenate([cache.entries.positions[:, :past_length], batch.positions], 1)
        context = _sum_attended_hashes(batch.attention_mask, values)
        # A node attends to the right positions if the sum of their hashes is right.
        position_sums = _sum_attended_hashes(batch.attention_mask, POSITION_HASHES[positions])
        is_padding = cache.entries.padding[:, :past_length]
        padding_hashes = np.where(is_padding, POSITION_HASHES[positions[:, :past_length]], np.uint64(0))
        expected_sums = POSITION_HASH_SUMS[batch.positions] - padding_hashes.sum(1, dtype=np.uint64)[:, None]
        return context, (position_sums == expected_sums) | (batch.positions == self.last_position)


def _sum_attended_hashes(attention_mask: NDArray[np.bool_], values: Hashes) -> Hashes:
    return np.einsum("rnc,rc->rn", attention_mask.astype(np.uint64), values)


@dataclass
class ToyTarget(ToyEngine):
    """Toy target model. An embedding of the prefix is (prompt id, position, padding flag); see `make_prompt`.

    Attributes:
        row_end: token that ends each grid row, equal to the number of codes; None for images without row ends.
    """

    row_end: int | None = None
    vectors: int = 0

    def hash_codes(self, codes: NDArray[np.int64], positions: NDArray[np.int64]) -> Hashes:
        return hash_integers(codes, positions, self.seed)

    def hash_prefix(self, embeds: NDArray[np.float32]) -> Hashes:
        return hash_integers(embeds[..., 0].astype(np.int64), embeds[..., 1].astype(np.int64), 5)

    def compute_logits(self, context: Hashes) -> NDArray[np.float32]:
        return look_up_logits(context, self.vocabulary, self.seed, self.max_logit)

    def run(self, batch: PassInput, cache: ToyCache) -> PassOutput:
        assert batch.hidden is None
        if batch.embeds is not None:
            assert batch.tokens is None
            assert (cache.lengths == 0).all()
            hashes = self.hash_prefix(batch.embeds)
            padding = batch.embeds[..., 2] > 0
            context, _ = self._compute_context_hashes(batch, cache, hashes)
            nodes = batch.positions.shape[1]
            expected_mask = ~padding[:, None] & np.tri(nodes, dtype=bool)
            is_right = (batch.attention_mask[:, :, -nodes:] == expected_mask).all(2) | padding
            is_right &= batch.positions == batch.embeds[..., 1]
        else:
            assert batch.tokens is not None
            assert batch.tokens.min() >= 0
            assert batch.tokens.max() < self.vocabulary + (self.row_end is not None) + self.vectors
            hashes = self.hash_codes(batch.tokens, batch.positions)
            padding = np.zeros(batch.tokens.shape, bool)
            context, is_right = self._compute_context_hashes(batch, cache, hashes)
        logits = self.compute_logits(context)
        logits[~is_right] = np.nan
        origin = np.full(context.shape, TARGET, np.float32)
        other_states = [batch.positions.astype(np.float32), origin, padding.astype(np.float32)]
        hidden = np.concatenate([encode_hashes(context), np.stack(other_states, -1)], -1)
        return PassOutput(logits, hidden, CacheEntries(hashes, batch.positions, context, origin, padding, ~is_right))


@dataclass
class AnyOrderTarget(ToyTarget):
    """A toy target whose nodes may attend to any positions, for images that are not generated in raster order."""

    contiguous = False

    def _compute_context_hashes(
        self, batch: PassInput, cache: ToyCache, new_hashes: Hashes
    ) -> tuple[Hashes, NDArray[np.bool_]]:
        context, is_right = super()._compute_context_hashes(batch, cache, new_hashes)
        return context, np.ones_like(is_right)


@dataclass
class ToyDrafter(ToyEngine):
    """Toy drafter: its logits are the target's, with the weight `agreement` (0 .. 1), plus unrelated logits."""

    target: ToyTarget = field(default_factory=ToyTarget)
    agreement: float = 0.5
    layout: DrafterLayout = field(default_factory=DrafterLayout)
    contiguous = False

    def compute_logits(self, context: Hashes) -> NDArray[np.float32]:
        unrelated_logits = look_up_logits(context, self.vocabulary, self.seed + 1000, self.max_logit)
        logits = self.agreement * self.target.compute_logits(context) + (1 - self.agreement) * unrelated_logits
        return logits.astype(np.float32)

    def run(self, batch: PassInput, cache: ToyCache) -> PassOutput:
        assert batch.tokens is not None
        assert batch.hidden is not None
        assert batch.embeds is None
        hidden = read_hidden_states(batch.hidden)
        previous_contexts = decode_hashes(hidden)
        slot_of_hidden = hidden[..., 3].astype(np.int64)
        origin = hidden[..., 4]
        padding = hidden[..., 5] > 0
        first_slot = self.prefix - 1  # pairs the last hidden state of the prefix with the first token
        in_prefix = batch.positions < first_slot
        code_hashes = self.target.hash_codes(batch.tokens, slot_of_hidden + 1)
        # The first slot also represents the prefix, whose slots have hash 0.
        hashes = code_hashes + np.where(batch.positions == first_slot, previous_contexts, np.uint64(0))
        hashes = np.where(in_prefix, np.uint64(0), hashes)
        attended_contexts, is_right = self._compute_contexts_and_check_prefix(batch, cache, hashes, padding)
        context = previous_contexts + code_hashes
        clipped = batch.positions == self.last_position
        is_right &= (slot_of_hidden == batch.positions) | clipped
        is_right_context = (attended_contexts == context) | clipped
        is_right &= np.where(in_prefix, batch.tokens == self.layout.prefix_token, is_right_context)
        is_right &= origin > 0
        logits = self.compute_logits(context)
        logits[~is_right] = np.nan
        other_states = [slot_of_hidden + 1.0, np.full(context.shape, DRAFTER), np.zeros(context.shape)]
        hidden = np.concatenate([encode_hashes(context), np.stack(other_states, -1).astype(np.float32)], -1)
        masked = padding & self.layout.masks_prefix
        return PassOutput(logits, hidden, CacheEntries(hashes, batch.positions, context, origin, masked, ~is_right))

    def _compute_contexts_and_check_prefix(
        self, batch: PassInput, cache: ToyCache, new: Hashes, padding: NDArray[np.bool_]
    ) -> tuple[Hashes, NDArray[np.bool_]]:
        """Compute context hashes as `_compute_context_hashes` does; also check that padding of the prefix is masked."""
        context, is_right = self._compute_context_hashes(batch, cache, new)
        if self.layout.masks_prefix and padding.any():
            nodes = batch.positions.shape[1]
            attends_to_padding = batch.attention_mask[:, :, -nodes:] & padding[:, None] & ~np.eye(nodes, dtype=bool)
            is_right = ~attends_to_padding.any(2)  # replaces the check of `_compute_context_hashes`
        return context, is_right


@dataclass(frozen=True)
class ToyModel(LoadedModel):
    """Toy target and drafter, and the layout of the images."""

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


def make_raster_layout(codes: int, columns: int = 1, row_end: int | None = None) -> RasterLayout:
    """Return the layout of an image of `codes` tokens, with row ends unless `row_end` is None."""
    return RasterLayout(codes, columns) if row_end is None else RowEndLayout(codes, columns, row_end=row_end)


def make_plan(layout: ImageLayout, sampling: Sampling, method: MethodConfig) -> Plan:
    return Plan(layout, sampling, method, count_draft_nodes(method))


def decode(
    model: ToyModel,
    prompts: Iterable[Prompt],
    seeds: Sequence[int],
    sampling: Sampling,
    method: MethodConfig,
    adaptive_window: bool = False,
    **options: Any,
) -> Generator[DecodeStep, None, None]:
    plan = Plan(model.image, sampling, method, count_draft_nodes(method, model.max_nodes), adaptive_window)
    return decoding.decode(model, plan, prompts, seeds, **options)


def compute_likelihood(
    model: ToyModel, prompt: Prompt, codes: Any, sampling: Sampling, counted: Any = None
) -> Likelihood:
    plan = make_plan(model.image, sampling, Autoregressive())
    return likelihoods.compute_likelihood(model, plan, prompt, codes, counted)


def make_prompt(prompt_id: int, prefix: int = 3, padding: int = 0) -> Prompt:
    """Make a prompt whose first `padding` positions are padding; prompts with different ids have different logits."""
    rows = np.zeros((2, prefix, 3), np.float32)
    rows[:, :, 0] = np.array([[prompt_id], [prompt_id + 5000]])
    rows[:, :, 1] = np.arange(prefix)
    rows[:, :padding, 2] = 1
    is_real_token = np.arange(prefix) >= padding
    return Prompt(PrefixRow(rows[0], is_real_token), PrefixRow(rows[1], is_real_token))


def make_model(
    vocabulary: int = 4,
    codes: int = 4,
    prefix: int = 3,
    seed: int = 1,
    max_logit: float = 1.5,
    agreement: float = 0.5,
    past_length_multiple: int = 1,
    positions: int = MAX_POSITIONS - 1,
    layout: DrafterLayout | None = None,
    columns: int = 3,
    neighbors: NDArray[np.integer] | None = None,
    row_ends: bool = False,
) -> ToyModel:
    layout = layout or DrafterLayout()
    row_end = vocabulary if row_ends else None
    target = ToyTarget(vocabulary, prefix, seed, max_logit, positions - 1, past_length_multiple, row_end=row_end)
    last_drafter_position = positions - 1 + layout.position_shift
    shared_settings = (vocabulary, prefix, seed, max_logit, last_drafter_position, past_length_multiple)
    drafter = ToyDrafter(*shared_settings, target=target, agreement=agreement, layout=layout)
    return ToyModel(target, drafter, positions, layout, neighbors, image=make_raster_layout(codes, columns, row_end))


@dataclass
class ToyNodes:
    """Nodes of a draft tree, without row ends or other known tokens before a node."""

    layout: PassLayout
    tree_structure: TreeStructure
    next_code_indices: Sequence[int]
    sampled_nodes: Sequence[int] | None = None

    def preceding_codes(self, node: int) -> NDArray[np.int64]:
        return np.empty(0, np.int64)


def make_target_output(
    logits: NDArray[Any],
    tree_structure: TreeStructure,
    cells: Sequence[int],
    layout: PassLayout | None = None,
    rows: slice = slice(None),
    seed: int = 0,
) -> TargetOutput:
    """Make the target's output for one image; without a layout, node i of the pass is node i of the tree."""
    plan = make_plan(RasterLayout(1), Sampling(), Autoregressive())
    sequence = ImageSequence(0, plan, make_prompt(0), seed)
    depths = tree_structure.depths
    layout = layout or PassLayout(depths, depths, tree_structure.ancestor_mask)
    return TargetOutput(sequence, ToyNodes(layout, tree_structure, cells), logits, rows)


def collect_codes(steps: Iterable[DecodeStep], images: int) -> list[list[int]]:
    codes: list[list[int]] = [[] for _ in range(images)]
    for step in steps:
        for part in step.parts:
            codes[part.sequence] += part.codes.tolist()
    return codes
