"""Forward passes of an EAGLE drafter over committed and draft tokens, and the cache of the drafter.

A slot is one input position of the drafter. Slot p reads token p + 1 and the hidden state of position p, and predicts
the hidden state of position p + 1. Slots of committed tokens stay in the drafter's cache. Slots of draft tokens are
removed after each draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .drafting import CommittedTokens
from .engine import (
    Bools,
    Cache,
    DeviceArray,
    Engine,
    Floats,
    HiddenStateView,
    Ints,
    PassInput,
    PassOutput,
    read_hidden_states,
    stack_hidden_states,
)
from .passes import MIN_NODES, build_committed_mask, stack_masks
from .state import ImageSequence, LoadedModel
from .statistics import EngineTimer

MAX_SLOTS = 64  # maximum number of committed slots of a row in one drafter pass, without the prefix


@dataclass
class TreeLevelOutput:
    """Output of a drafter pass at the slots of one tree level."""

    ancestor_mask: Bools  # whether each slot attends to each cached draft slot, bool `[sequences, slots, drafted]`
    logits: DeviceArray  # logits of the pass, `[rows, nodes, vocab_size]`
    hidden: DeviceArray  # hidden states of the pass, `[rows, nodes, hidden_size]`
    nodes: Ints  # pass node of each slot, int64 `[rows, slots]`


@dataclass
class PendingTokens:
    """Committed tokens of a sequence that the drafter has not processed yet, with their hidden states."""

    prefix_tokens: list[Ints]  # prefix tokens of each row, int64 `[slots]`; empty once the drafter has processed them
    # Tokens that each target pass committed, with end-of-row tokens. The last token is the root of the next draft.
    tokens: list[Ints] = field(default_factory=list)
    # For each target pass, states of each row, float32 `[slots, hidden_size]`. The first pass includes the prefix.
    hidden: list[list[Floats | HiddenStateView]] = field(default_factory=list)


class EagleRunner:
    """Runner of an EAGLE drafter for several sequences, with the drafter's cache.

    Args:
        max_draft_slots: maximum number of draft slots of a row, without end-of-row tokens.

    Attributes:
        sequences: sequences in the order of their rows in the cache.
        batch_rows: batch rows of each sequence in the cache and in drafter passes.
    """

    def __init__(self, model: LoadedModel, max_draft_slots: int, timer: EngineTimer) -> None:
        assert model.drafter is not None  # requests for EAGLE methods are rejected before this
        self.engine: Engine = model.drafter
        self.layout = model.layout
        self.last_position = model.num_positions - 1 + model.layout.position_shift
        self.max_slots = min(model.max_nodes, MAX_SLOTS)
        self.max_draft_slots = max_draft_slots
        self.timer = timer
        self._cache: Cache | None = None
        self.sequences: list[ImageSequence] = []
        self._pending: dict[ImageSequence, PendingTokens] = {}
        self._index_rows()

    def store_committed_tokens(self, commits: Sequence[CommittedTokens]) -> None:
        joining = [commit.sequence for commit in commits if commit.sequence not in self.sequences]
        if joining:
            self._add_rows(joining)
        for commit in commits:
            sequence = commit.sequence
            pending = self._pending.get(sequence)
            if pending is None:
                rows = sequence.rows if sequence in joining else []
                pending = self._pending[sequence] = PendingTokens([row.drafter_tokens(self.layout) for row in rows])
            # A view keeps the whole output of its pass in memory. So older states are copied, and only the states of
            # the latest pass stay views.
            pending.hidden = [[read_hidden_states(states) for states in earlier] for earlier in pending.hidden]
            first = len(sequence.codes) - len(commit.tokens)  # the sequence has the committed codes already
            pending.tokens.append(sequence.plan.raster_layout.insert_row_ends(commit.tokens, first))
            nodes_of_row = enumerate(commit.nodes, commit.rows.start)
            pending.hidden.append(
                [HiddenStateView(commit.hidden, np.full(len(nodes), row), nodes) for row, nodes in nodes_of_row]
            )

    def remove(self, sequences: Sequence[ImageSequence]) -> None:
        if not self.sequences:  # a sequence may fail before its first commit
            return
        rows_of = {
            sequence: rows[: len(sequence.rows)]
            for sequence, rows in zip(self.sequences, self.batch_rows, strict=True)
            if sequence not in sequences
        }
        if sum(map(len, rows_of.values())) == len(self.sequence_of_row):
            return  # no row changes
        if any(sequence.error is not None for sequence in sequences):
            self.cache.forbid_memory_reuse()
        if rows_of:
            self.cache.keep_rows(np.concatenate([*rows_of.values()]))
        else:
            self._cache = None
        self.sequences = [*rows_of]
        self._index_rows()
        self._pending = {sequence: pending for sequence, pending in self._pending.items() if sequence in rows_of}
        for sequence, pending in self._pending.items():
            pending.prefix_tokens = pending.prefix_tokens[: len(sequence.rows)]
            pending.hidden = [states[: len(sequence.rows)] for states in pending.hidden]

    @property
    def cache(self) -> Cache:
        """Keys and values of the slots; exists only while the drafter has sequences."""
        assert self._cache is not None
        return self._cache

    def root_tokens(self) -> Ints:
        return np.array([self._pending[sequence].tokens[-1][-1] for sequence in self.sequences], np.int64)

    def run_pending_tokens(self) -> TreeLevelOutput:
        """Run the drafter over all pending tokens, and return the output at the root of the next draft.

        A row with more than `max_slots` pending tokens besides the prefix needs several passes. This happens after many
        preserved codes. The last pass contains the last token of every row.
        """
        tokens, states = self._pop_pending_tokens()
        prefixes = [len(row.embeds) - 1 for sequence in self.sequences for row in sequence.rows]
        lengths = self.cache.lengths.tolist()
        # Number of slots to run in each row, without the prefix. The prefix is pending if the row's cache is empty.
        remaining = [
            len(row_tokens) - (0 if length else prefix)
            for row_tokens, length, prefix in zip(tokens, lengths, prefixes, strict=True)
        ]
        # `later` is the number of slots at the end of a row that are left for later passes. It is a multiple of
        # `max_slots`, so the last pass, which comes after the loop, has at most `max_slots` slots of a row.
        for later in range((max(remaining) - 1) // self.max_slots * self.max_slots, 0, -self.max_slots):
            counts = [
                len(row_tokens) - later if slots > later else 0
                for row_tokens, slots in zip(tokens, remaining, strict=True)
            ]
            self._run_committed_tokens(tokens, states, counts)
            tokens = [row_tokens[count:] for row_tokens, count in zip(tokens, counts, strict=True)]
            states = [read_hidden_states(row_states)[count:] for row_states, count in zip(states, counts, strict=True)]
            remaining = [min(slots, later) for slots in remaining]
        counts = [len(row_tokens) for row_tokens in tokens]
        output = self._run_committed_tokens(tokens, states, counts)
        no_draft_slots = np.zeros((len(self.sequences), 1, 0), bool)
        # The root's slot is the last slot of each row, [rows, 1].
        return TreeLevelOutput(no_draft_slots, output.logits, output.hidden, np.array(counts)[:, None] - 1)

    def run_row_end_tokens(self, level: TreeLevelOutput, depth: int) -> TreeLevelOutput:
        """Run the drafter over the end-of-row tokens that follow the codes at `depth`, if there are any.

        Returns the output from which the next level is drafted. For a sequence that ends a row at this depth, it is the
        output after the end-of-row token; for other sequences, it is the output of `level`.
        """
        # For each sequence, the end-of-row token or None. The root at depth 0 is the last committed code.
        following = [seq.plan.raster_layout.row_end_token_after(len(seq.codes) - 1 + depth) for seq in self.sequences]
        ends = np.array([token is not None for token in following])  # [sequences]
        if not ends.any():
            return level
        slots = level.nodes.shape[1]
        # The end-of-row token after slot i is a child of slot i, [sequences, slots].
        slot_indices = np.tile(np.arange(slots), (len(ends), 1))
        tokens = np.repeat([[token or 0] for token in following], slots, 1)  # [sequences, slots]
        after = self.run_draft_tokens(tokens, slot_indices, depth, level, position_offset=1)
        if ends.all():
            return after
        # Only some sequences end a row here, so each batch row takes the output of a different pass. The outputs are
        # stacked: [rows, slots, size].
        level_of_row = [after if ends[sequence] else level for sequence in self.sequence_of_row]
        logits, hidden = (
            np.stack([getattr(output, name)[row, output.nodes[row]] for row, output in enumerate(level_of_row)])
            for name in ("logits", "hidden")
        )
        # The pass also appended slots for sequences without an end-of-row token. Later slots do not attend to them.
        before = np.pad(level.ancestor_mask, ((0, 0), (0, 0), (0, slots)))
        ancestor_mask = np.where(ends[:, None, None], after.ancestor_mask, before)
        return TreeLevelOutput(ancestor_mask, logits, hidden, slot_indices[self.sequence_of_row])

    def run_draft_tokens(
        self, tokens: Ints, parents: Ints, depth: int, level: TreeLevelOutput, position_offset: int = 0
    ) -> TreeLevelOutput:
        """Run the drafter over the draft tokens of one tree level, and append them to the cache.

        Args:
            tokens: draft tokens, int64 `[sequences, slots]`.
            parents: slot of each token's parent in `level`, int64 `[sequences, slots]`.
            depth: depth of the tokens in the tree; an end-of-row token has the depth of the code before it.
            level: output at the slots of the parents.
            position_offset: 1 for end-of-row tokens, which are one position after the code at `depth`; otherwise 0.
        """
        sequences, slots = tokens.shape
        rows = len(level.nodes)
        padded = max(MIN_NODES, slots)
        drafted = level.ancestor_mask.shape[2]  # number of draft slots in the cache, after the committed slots
        base = self.cache.lengths - drafted  # number of committed slots of each row, [rows]
        codes = np.zeros((rows, padded), np.int64)
        codes[:, :slots] = tokens[self.sequence_of_row] + self.layout.code_offset
        parent_nodes = np.repeat(level.nodes[:, :1], padded, 1)  # [rows, padded]; padding may read any node
        parent_nodes[:, :slots] = level.nodes[np.arange(rows)[:, None], parents[self.sequence_of_row]]
        # A slot reads the hidden state that the previous pass computed for its parent.
        states = HiddenStateView(level.hidden, np.repeat(np.arange(rows)[:, None], padded, 1), parent_nodes)
        # A slot attends to the draft slots to which its parent attends, and to itself. These slots are the
        # path from the root.
        ancestor_mask = np.zeros((sequences, slots, drafted + slots), bool)
        ancestor_mask[:, :, :drafted] = level.ancestor_mask[np.arange(sequences)[:, None], parents]
        ancestor_mask[:, :, drafted:] = np.eye(slots, dtype=bool)
        attention_mask, past_length = build_committed_mask(self.engine, self.cache, base, padded, self.prefix_padding)
        attention_mask[:, :, past_length:] = np.eye(padded, dtype=bool)
        for row, start in enumerate(base.tolist()):  # rows have different numbers of committed slots
            attention_mask[row, :slots, start : start + drafted] = ancestor_mask[self.sequence_of_row[row], :, :drafted]
        roots = [(sequence.plan.raster_layout, len(sequence.codes) - 1) for sequence in self.sequences]
        # Number of positions from the root to the codes at `depth`, end-of-row tokens included, [sequences].
        below = np.array(
            [raster.find_token_position(root + depth) - raster.find_token_position(root) for raster, root in roots]
        )
        # Slot p reads token p + 1 at position p. So the root, which is the last committed token, has slot `base - 1`.
        positions = np.repeat((base + below[self.sequence_of_row] + position_offset - 1)[:, None], padded, 1)
        output = self._run_pass(codes, states, positions, attention_mask)
        self.timer.append_to_cache(self.cache, output.new_kv, [np.arange(slots)] * rows)
        return TreeLevelOutput(ancestor_mask, output.logits, output.hidden, np.repeat(np.arange(slots)[None], rows, 0))

    def _add_rows(self, sequences: Sequence[ImageSequence]) -> None:
        columns = max(
            sequence.num_cache_columns + sequence.plan.layout.count_max_nodes_per_pass(self.max_draft_slots)
            for sequence in sequences
        )
        cache = self.engine.make_cache(sum(len(sequence.rows) for sequence in sequences), columns)
        if self._cache is None:
            self._cache = cache
        else:
            self._cache.extend(cache)
        self.sequences += sequences
        self._index_rows()

    def _index_rows(self) -> None:
        num_rows = [len(sequence.rows) for sequence in self.sequences]
        self.sequence_of_row = np.repeat(np.arange(len(num_rows)), num_rows)  # [rows]
        self.batch_rows = np.split(np.arange(len(self.sequence_of_row)), np.cumsum(num_rows, dtype=np.int64)[:-1])
        padding = stack_masks([~row.is_real_token for sequence in self.sequences for row in sequence.rows])
        # Slot p reads token p + 1, which is a token of the image for the last prefix position. So the prefix has one
        # slot less than positions.
        self.prefix_padding = padding[:, :-1] if self.layout.masks_prefix else np.zeros_like(padding[:, :-1])

    def _pop_pending_tokens(self) -> tuple[list[Ints], list[Floats | HiddenStateView]]:
        """Remove the pending tokens, and return tokens `[slots]` and hidden states of each row."""
        tokens: list[Ints] = []
        hidden: list[Floats | HiddenStateView] = []
        for pending in (self._pending.pop(sequence) for sequence in self.sequences):
            codes = np.concatenate(pending.tokens) + self.layout.code_offset
            row_states = [
                passes[0] if len(passes) == 1 else np.concatenate([*map(read_hidden_states, passes)])
                for passes in zip(*pending.hidden, strict=True)
            ]
            tokens += [np.concatenate([prefix_tokens, codes]) for prefix_tokens in pending.prefix_tokens] or [
                codes
            ] * len(row_states)
            hidden += row_states
        return tokens, hidden

    def _run_committed_tokens(
        self, tokens: list[Ints], states: list[Floats | HiddenStateView], counts: list[int]
    ) -> PassOutput:
        """Run the drafter over the first `counts[row]` slots of each row, and append them to the cache."""
        slots = max(MIN_NODES, *counts)
        padded = np.zeros((len(tokens), slots), np.int64)  # [rows, slots]
        for row, count in enumerate(counts):
            padded[row, :count] = tokens[row][:count]
        hidden = stack_hidden_states(states, counts, slots)  # [rows, slots, hidden_size]
        lengths = self.cache.lengths
        prefix = self.prefix_padding.shape[1]
        attention_mask, past_length = build_committed_mask(self.engine, self.cache, lengths, slots, self.prefix_padding)
        attention_mask[:, :, past_length:] = np.tri(slots, dtype=bool)
        for row in np.flatnonzero(lengths == 0).tolist():  # this pass runs the prefix of these rows
            # Slots do not attend to padding. But padding attends to itself, because a softmax over nothing is NaN.
            attended = ~self.prefix_padding[row] | np.eye(slots, prefix, dtype=bool)  # [slots, prefix]
            attention_mask[row, :, past_length : past_length + prefix] &= attended[:, :slots]
        output = self._run_pass(padded, hidden, lengths[:, None] + np.arange(slots), attention_mask)
        self.timer.append_to_cache(self.cache, output.new_kv, [np.arange(count) for count in counts])
        return output

    def _run_pass(
        self, tokens: Ints, hidden: Floats | HiddenStateView, positions: Ints, attention_mask: Bools
    ) -> PassOutput:
        batch = PassInput(np.minimum(positions, self.last_position), attention_mask, tokens, hidden=hidden)
        return self.timer.run_pass(self.engine, batch, self.cache)
