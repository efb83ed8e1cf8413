"""Draft trees from an EAGLE drafter, for several sequences at once.

Drafter slot p reads token p + 1 and the hidden state of position p, and predicts the hidden state of position p + 1.
Slots of committed tokens stay in the drafter's cache; slots of draft nodes are removed after each draft.

The children of a node are the k tokens with the highest log q + g, where q is the drafter's distribution and g the
Gumbel noise of the position. The target samples with the same noise, so where both distributions agree it chooses the
first child. The k children are also samples from q without replacement, as relaxed acceptance requires. A dynamic tree
expands the paths with the highest sums of log softmax(log q + g). These estimate how likely the target is to accept a
path, given the noise. With relaxed acceptance or greedy decoding, a dynamic tree takes the most probable tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..methods import Drafted
from .device import DeviceLogits, SampleRequest
from .drafting import Commit
from .engine import (
    Bools,
    Cache,
    DeviceArray,
    Engine,
    Floats,
    HiddenView,
    Ints,
    Pass,
    PassOutput,
    read_states,
    stack_hidden,
)
from .passes import MIN_NODES, committed_mask, stack_padding
from .sampling import Probabilities, best_codes, require_finite, shape_distribution, shape_logits
from .state import ImageSequence, Model
from .statistics import Clock
from .tree import DraftTree, DynamicTree, DynamicTreeBuilder, StaticTree, StaticTreeBuilder, no_proposal
from .tree_drafts import TreeDrafter
from .tree_names import parse_tree

MAX_SLOTS = 64  # maximum number of committed slots of a row in one drafter pass, without the prefix


def _num_draft_slots(shape: StaticTree | DynamicTree) -> int:
    return max(shape.nodes, shape.depth * shape.branch) if isinstance(shape, DynamicTree) else shape.nodes


@dataclass
class LevelOutput:
    """Output of a drafter pass at the slots of one tree level."""

    attends_to: Bools  # draft slots in the cache that each slot attends to, bool `[sequences, slots, drafted]`
    logits: DeviceArray  # logits of the pass, `[rows, nodes, vocab_size]`
    hidden: DeviceArray  # hidden states of the pass, `[rows, nodes, hidden_size]`
    nodes: Ints  # pass node of each slot, int64 `[rows, slots]`


@dataclass
class PendingSlots:
    """Committed slots of a sequence that the drafter has not run."""

    prefix: list[Ints]  # tokens of each row's prefix slots; empty once they have been run
    # Tokens that each target pass committed, with end-of-row tokens; the very last is the root of the next draft.
    tokens: list[Ints] = field(default_factory=list)
    # Hidden states of each target pass, float32 `[slots, hidden_size]` per row. The first pass includes the prefix.
    hidden: list[list[Floats | HiddenView]] = field(default_factory=list)


class EagleDrafter(TreeDrafter):
    """Drafter that runs an EAGLE model for all sequences with the same method.

    Args:
        model: engines and layout; `model.drafter` must be set.
        method: tree and acceptance of the drafts.
        clock: counter of drafter passes and of their time.
    """

    needs_new_codes = True

    def __init__(self, model: Model, method: Drafted, clock: Clock) -> None:
        super().__init__(model.max_nodes)
        assert model.drafter is not None  # requests for EAGLE methods are rejected before this
        self.engine: Engine = model.drafter
        self.shape = parse_tree(method.tree)
        self.relaxed = not method.exact
        self.clock = clock
        self.layout = model.layout
        self.last_position = model.num_positions - 1 + model.layout.position_shift
        self.draft_slots = _num_draft_slots(self.shape)
        self.max_slots = min(model.max_nodes, MAX_SLOTS)
        self.sequences: list[ImageSequence] = []  # sequences of the cache rows, in their order
        self.cache: Cache | None = None
        self.pending: dict[ImageSequence, PendingSlots] = {}
        self._index_rows()

    def commit(self, commits: Sequence[Commit]) -> None:
        """Store tokens and hidden states of a target pass; `draft_trees` runs them."""
        joining = [commit.sequence for commit in commits if commit.sequence not in self.sequences]
        if joining:
            self._join(joining)
        for commit in commits:
            sequence = commit.sequence
            pending = self.pending.get(sequence)
            if pending is None:
                rows = sequence.rows if sequence in joining else []
                pending = self.pending[sequence] = PendingSlots([row.drafter_tokens(self.layout) for row in rows])
            # A view keeps the whole output of its pass in memory, so only the latest states stay views.
            pending.hidden = [[read_states(states) for states in earlier] for earlier in pending.hidden]
            first = len(sequence.codes) - len(commit.tokens)
            pending.tokens.append(sequence.raster.insert_tokens(commit.tokens, first))
            nodes_of_row = enumerate(commit.nodes, commit.rows.start)
            pending.hidden.append(
                [HiddenView(commit.hidden, np.full(len(nodes), row), nodes) for row, nodes in nodes_of_row]
            )

    def leave(self, sequences: Sequence[ImageSequence]) -> None:
        """Delete the pending slots and cache rows of these sequences, and the rows that other sequences removed."""
        if not self.sequences:  # those that leave failed before their first commit
            return
        rows_of = {
            sequence: rows[: len(sequence.rows)]
            for sequence, rows in zip(self.sequences, self._batch_rows(), strict=True)
            if sequence not in sequences
        }
        if sum(map(len, rows_of.values())) == len(self.sequence_of_row):
            return
        if any(sequence.error is not None for sequence in sequences):
            self._cache.discard()
        if rows_of:
            self._cache.keep_rows(np.concatenate([*rows_of.values()]))
        else:
            self.cache = None
        self.sequences = [*rows_of]
        self._index_rows()
        self.pending = {sequence: pending for sequence, pending in self.pending.items() if sequence in rows_of}
        for sequence, pending in self.pending.items():
            pending.prefix = pending.prefix[: len(sequence.rows)]
            pending.hidden = [states[: len(sequence.rows)] for states in pending.hidden]

    def draft_trees(self, sequences: Sequence[ImageSequence]) -> list[DraftTree]:
        """Run the pending slots, and return one tree for each of `sequences`, which must be all of this drafter."""
        roots = np.array([self.pending[sequence].tokens[-1][-1] for sequence in self.sequences], np.int64)
        level = self._commit_slots()
        committed = self._cache.lengths.copy()
        if isinstance(self.shape, StaticTree):
            trees = self._draft_static(self.shape, roots, level)
        else:
            trees = self._draft_dynamic(self.shape, roots, level)
        self._cache.truncate(committed)
        drafted = dict(zip(self.sequences, trees, strict=True))
        return [drafted[sequence] for sequence in sequences]

    @property
    def _cache(self) -> Cache:
        assert self.cache is not None
        return self.cache

    def _join(self, sequences: Sequence[ImageSequence]) -> None:
        columns = max(
            sequence.cache_columns + sequence.layout.count_pass_nodes(self.draft_slots) for sequence in sequences
        )
        cache = self.engine.new_cache(sum(len(sequence.rows) for sequence in sequences), columns)
        if self.cache is None:
            self.cache = cache
        else:
            self.cache.extend(cache)
        self.sequences += sequences
        self._index_rows()

    def _index_rows(self) -> None:
        """Update the sequence and the prefix padding of every row, after sequences have joined or left."""
        num_rows = [len(sequence.rows) for sequence in self.sequences]
        self.sequence_of_row = np.repeat(np.arange(len(num_rows)), num_rows)  # [rows]
        self.first_row = np.searchsorted(self.sequence_of_row, np.arange(len(self.sequences)))  # [sequences]
        padding = stack_padding([~row.real for sequence in self.sequences for row in sequence.rows])
        self.prefix_padding = padding[:, :-1] if self.layout.masks_prefix else np.zeros_like(padding[:, :-1])

    def _batch_rows(self) -> list[Ints]:
        """Return the batch rows of each sequence."""
        return np.split(np.arange(len(self.sequence_of_row)), self.first_row[1:])

    def _rows_at(self, depth: int) -> list[Ints]:
        """Return the batch rows that the distribution of each sequence's children at `depth` depends on."""
        return [
            rows[: sequence.guidance.rows(len(sequence.codes) + depth)]
            for sequence, rows in zip(self.sequences, self._batch_rows(), strict=True)
        ]

    def _top_children(self, level: LevelOutput, depth: int, count: int, add_noise: bool) -> list[tuple[Ints, Floats]]:
        """Return the best children of every slot at `depth`: per sequence tokens and scores, both `[slots, count]`."""
        noises = [sequence.noise if add_noise and not sequence.sampling.greedy else None for sequence in self.sequences]
        on_device = level.logits
        if isinstance(on_device, DeviceLogits) and all(
            on_device.can_sample(sequence.sampling) for sequence in self.sequences
        ):
            samples = []
            for sequence, rows, noise in zip(self.sequences, self._rows_at(depth), noises, strict=True):
                codes = np.full(level.nodes.shape[1], len(sequence.codes) + depth)
                batch_rows = slice(int(rows[0]), int(rows[-1]) + 1)
                scales = sequence.guidance.scales(codes)
                samples.append(SampleRequest(batch_rows, level.nodes[rows], sequence.sampling, noise, codes, scales))
            best = on_device.best_codes(samples, count)
            for sequence, (_, scores) in zip(self.sequences, best, strict=True):
                with sequence.own_errors():
                    require_finite(scores)
                if sequence.error is not None:
                    scores[:] = 0  # any tree will do
            return best
        best = []
        for sequence, rows, noise in zip(self.sequences, self._rows_at(depth), noises, strict=True):
            logits = level.logits[rows[:, None], level.nodes[rows]]  # [rows of the sequence, slots, vocab_size]
            code = len(sequence.codes) + depth
            slots = logits.shape[1]  # any tree will do after an error
            codes, scores = np.zeros((slots, count), np.int64), np.zeros((slots, count), np.float32)
            with sequence.own_errors():
                values = shape_logits(sequence.guidance.mix(logits, [code] * slots), sequence.sampling)
                if noise is not None:
                    values = values + noise.gumbel(code, 1, values.shape[1])
                codes, scores = best_codes(values, count)
            best.append((codes, scores))
        return best

    def _commit_slots(self) -> LevelOutput:
        """Run the pending slots, append them to the cache, and return the last slot of each row as the root's level.

        Rows with more than `max_slots` slots besides the prefix take several passes, as after many preserved codes.
        All rows end in the last pass.
        """
        tokens, states = self._pop_pending_slots()
        prefixes = [len(row.embeds) - 1 for sequence in self.sequences for row in sequence.rows]
        lengths = self._cache.lengths.tolist()
        # Slots to run, without the prefix, which is pending where the cache is empty.
        remaining = [
            len(row_tokens) - (0 if length else prefix)
            for row_tokens, length, prefix in zip(tokens, lengths, prefixes, strict=True)
        ]
        # `later` is the number of slots at a row's end that are left for later passes.
        for later in range((max(remaining) - 1) // self.max_slots * self.max_slots, 0, -self.max_slots):
            counts = [
                len(row_tokens) - later if slots > later else 0
                for row_tokens, slots in zip(tokens, remaining, strict=True)
            ]
            self._run_committed(tokens, states, counts)
            tokens = [row_tokens[count:] for row_tokens, count in zip(tokens, counts, strict=True)]
            states = [read_states(row_states)[count:] for row_states, count in zip(states, counts, strict=True)]
            remaining = [min(slots, later) for slots in remaining]
        counts = [len(row_tokens) for row_tokens in tokens]
        output = self._run_committed(tokens, states, counts)
        no_draft_slots = np.zeros((len(self.sequences), 1, 0), bool)
        return LevelOutput(no_draft_slots, output.logits, output.hidden, np.array(counts)[:, None] - 1)

    def _pop_pending_slots(self) -> tuple[list[Ints], list[Floats | HiddenView]]:
        """Remove the pending slots, and return each row's tokens `[slots]` and hidden states `[slots, hidden_size]`."""
        tokens: list[Ints] = []
        hidden: list[Floats | HiddenView] = []
        for pending in (self.pending.pop(sequence) for sequence in self.sequences):
            codes = np.concatenate(pending.tokens) + self.layout.code_offset
            row_states = [
                passes[0] if len(passes) == 1 else np.concatenate([*map(read_states, passes)])
                for passes in zip(*pending.hidden, strict=True)
            ]
            tokens += [np.concatenate([prefix, codes]) for prefix in pending.prefix] or [codes] * len(row_states)
            hidden += row_states
        return tokens, hidden

    def _run_committed(self, tokens: list[Ints], states: list[Floats | HiddenView], counts: list[int]) -> PassOutput:
        """Run the first `counts` slots of each row, and append them to the cache."""
        slots = max(MIN_NODES, *counts)
        padded = np.zeros((len(tokens), slots), np.int64)
        for row, count in enumerate(counts):
            padded[row, :count] = tokens[row][:count]
        hidden = stack_hidden(states, counts, slots)
        lengths = self._cache.lengths
        prefix = self.prefix_padding.shape[1]
        attention_mask, past_length = committed_mask(self.engine, self._cache, lengths, slots, self.prefix_padding)
        attention_mask[:, :, past_length:] = np.tri(slots, dtype=bool)
        for row in np.flatnonzero(lengths == 0).tolist():  # this pass runs the prefix of these rows
            attended = ~self.prefix_padding[row] | np.eye(slots, prefix, dtype=bool)
            attention_mask[row, :, past_length : past_length + prefix] &= attended[:, :slots]
        output = self._run(padded, hidden, lengths[:, None] + np.arange(slots), attention_mask)
        self.clock.append(self._cache, output.new_kv, [np.arange(count) for count in counts])
        return output

    def _run(self, tokens: Ints, hidden: Floats | HiddenView, positions: Ints, attention_mask: Bools) -> PassOutput:
        batch = Pass(np.minimum(positions, self.last_position), attention_mask, tokens, hidden=hidden)
        return self.clock.run(self.engine, batch, self._cache)

    def _append_unsampled(self, level: LevelOutput, depth: int) -> LevelOutput:
        """Run the tokens that follow the codes at `depth` unsampled, as row ends do; return the output to draft from.

        The pass runs all sequences. Its output replaces that of `level` for the sequences with such a token.
        """
        following = [seq.raster.token_after(len(seq.codes) - 1 + depth) for seq in self.sequences]
        ends = np.array([token is not None for token in following])  # [sequences]
        if not ends.any():
            return level
        slots = level.nodes.shape[1]
        slot_indices = np.tile(np.arange(slots), (len(ends), 1))
        tokens = np.repeat([[token or 0] for token in following], slots, 1)
        after = self._expand(tokens, slot_indices, depth, level, offset=1)
        if ends.all():
            return after
        level_of_row = [after if ends[sequence] else level for sequence in self.sequence_of_row]
        logits, hidden = (
            np.stack([getattr(output, name)[row, output.nodes[row]] for row, output in enumerate(level_of_row)])
            for name in ("logits", "hidden")
        )
        before = np.pad(level.attends_to, ((0, 0), (0, 0), (0, slots)))
        attends_to = np.where(ends[:, None, None], after.attends_to, before)
        return LevelOutput(attends_to, logits, hidden, slot_indices[self.sequence_of_row])

    def _expand(self, tokens: Ints, parents: Ints, depth: int, level: LevelOutput, offset: int = 0) -> LevelOutput:
        """Run draft tokens below the slots of `level`, and append them to the cache.

        Args:
            tokens: draft tokens, int64 `[sequences, slots]`.
            parents: slot of each token's parent in `level`, int64 `[sequences, slots]`.
            depth: depth of the tokens in the tree.
            level: output at the slots of the parents.
            offset: number of positions after the code at `depth`: 1 for end-of-row tokens, else 0.
        """
        sequences, slots = tokens.shape
        rows = len(level.nodes)
        padded = max(MIN_NODES, slots)
        drafted = level.attends_to.shape[2]
        base = self._cache.lengths - drafted  # committed slots, [rows]
        codes = np.zeros((rows, padded), np.int64)
        codes[:, :slots] = tokens[self.sequence_of_row] + self.layout.code_offset
        parent_nodes = np.repeat(level.nodes[:, :1], padded, 1)
        parent_nodes[:, :slots] = level.nodes[np.arange(rows)[:, None], parents[self.sequence_of_row]]
        states = HiddenView(level.hidden, np.repeat(np.arange(rows)[:, None], padded, 1), parent_nodes)
        attends_to = np.zeros((sequences, slots, drafted + slots), bool)
        attends_to[:, :, :drafted] = level.attends_to[np.arange(sequences)[:, None], parents]
        attends_to[:, :, drafted:] = np.eye(slots, dtype=bool)
        attention_mask, past_length = committed_mask(self.engine, self._cache, base, padded, self.prefix_padding)
        attention_mask[:, :, past_length:] = np.eye(padded, dtype=bool)
        for row, start in enumerate(base.tolist()):
            attention_mask[row, :slots, start : start + drafted] = attends_to[self.sequence_of_row[row], :, :drafted]
        roots = [(sequence.raster, len(sequence.codes) - 1) for sequence in self.sequences]
        # Number of positions from the last code to the code `depth` further, with end-of-row tokens, [sequences]
        below = np.array([raster.position(root + depth) - raster.position(root) for raster, root in roots])
        positions = np.repeat((base + below[self.sequence_of_row] + offset - 1)[:, None], padded, 1)
        output = self._run(codes, states, positions, attention_mask)
        self.clock.append(self._cache, output.new_kv, [np.arange(slots)] * rows)
        return LevelOutput(attends_to, output.logits, output.hidden, np.repeat(np.arange(slots)[None], rows, 0))

    def _draft_static(self, shape: StaticTree, roots: Ints, level: LevelOutput) -> list[DraftTree]:
        builders = [StaticTreeBuilder(shape, int(root)) for root in roots]
        levels: list[LevelOutput] = []
        for depth, inner in enumerate(shape.levels):
            if depth > 0:
                slots = np.searchsorted(shape.levels[depth - 1], shape.parents[inner])
                tokens = np.stack([builder.tokens[inner] for builder in builders])
                level = self._expand(tokens, np.repeat(slots[None], len(roots), 0), depth, level)
            level = self._append_unsampled(level, depth)
            levels.append(level)
            count = max(len(shape.children[node]) for node in inner)
            for builder, best in zip(builders, self._top_children(level, depth, count, add_noise=True), strict=True):
                builder.add_children(inner, *best)
        trees: list[DraftTree] = []
        rows_at = [self._rows_at(depth) for depth in range(len(levels))]
        for i, (sequence, builder) in enumerate(zip(self.sequences, builders, strict=True)):
            rows = [batch_rows[i] for batch_rows in rows_at]
            proposal = (
                partial(_child_distribution, shape, levels, rows, len(sequence.codes), sequence)
                if self.relaxed
                else no_proposal
            )
            trees.append(builder.build(proposal, sequence.sampling.greedy))
        return trees

    def _draft_dynamic(self, shape: DynamicTree, roots: Ints, level: LevelOutput) -> list[DraftTree]:
        builders = [DynamicTreeBuilder(int(root)) for root in roots]
        for depth in range(shape.depth):
            chosen = [builder.best_of_last_level(shape.branch) for builder in builders]
            if depth > 0:
                slots = np.arange(max(map(len, chosen)))  # the last node of a smaller level is repeated
                padded = [nodes[np.minimum(slots, len(nodes) - 1)] for nodes in chosen]
                codes = np.stack([builder.tokens[nodes] for builder, nodes in zip(builders, padded, strict=True)])
                parents = np.stack(
                    [builder.slot_of_parent[nodes] for builder, nodes in zip(builders, padded, strict=True)]
                )
                level = self._expand(codes, parents, depth, level)
            level = self._append_unsampled(level, depth)
            best = self._top_children(level, depth, shape.branch, add_noise=not self.relaxed)
            for builder, nodes, (codes, scores) in zip(builders, chosen, best, strict=True):
                builder.add_children(nodes, codes[: len(nodes)], scores[: len(nodes)])
        return [builder.prune(shape.nodes) for builder in builders]


def _child_distribution(
    shape: StaticTree, levels: list[LevelOutput], rows_at: list[Ints], first: int, sequence: ImageSequence, node: int
) -> Probabilities:
    depth = len(shape.paths[node - 1]) if node else 0
    level = levels[depth]
    rows = rows_at[depth]
    slot = np.searchsorted(shape.levels[depth], node)
    logits: Floats = level.logits[rows, level.nodes[rows, slot]][:, None]  # [rows, 1, vocab_size]
    return shape_distribution(sequence.guidance.mix(logits, [first + depth])[0], sequence.sampling)
