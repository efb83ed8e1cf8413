"""Draft trees from an EAGLE drafter, for several sequences at once.

A drafter slot p reads token p + 1 and the hidden state of position p, and predicts the hidden state p + 1.
Slots of committed tokens stay in the drafter's cache; slots of draft nodes are dropped after each draft.
Children are the k best of log q + g, with the noise g of their position: what the target chooses if it agrees, and k
draws without replacement from q, which relaxed acceptance is told. Dynamic trees grow where the sum along a path of the
logarithm of softmax(log q + g) is highest, which says how likely the target is to agree, given the noise. For relaxed
acceptance they take the most probable tokens instead, as does greedy decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..methods import Drafted, Sampling
from .device import DeviceLogits, SampleRequest
from .drafting import Commit
from .engine import Bools, Cache, DeviceArray, Engine, Floats, HiddenView, Ints, Pass, PassOutput
from .passes import MIN_NODES, stack_padding, unmask_committed
from .sampling import Probabilities, apply_guidance, best_codes, shape_distribution, shape_logits
from .state import ImageSequence, Model
from .statistics import Clock
from .tree import DraftTree, DynamicTree, DynamicTreeBuilder, StaticTree, StaticTreeBuilder, no_proposal
from .tree_drafts import TreeDrafter
from .tree_names import parse_tree

MAX_SLOTS = 64  # committed ones of a row that are run together, its prefix apart


def _slots(shape: StaticTree | DynamicTree) -> int:
    return max(shape.nodes, shape.depth * shape.branch) if isinstance(shape, DynamicTree) else shape.nodes


@dataclass
class LevelOutput:
    """Slots that were run together, and where the output has what came of them."""

    attends_to: Bools  # what each saw of the draft, bool `[sequences, slots, drafted]`
    logits: DeviceArray  # of the output, `[rows, nodes, vocab_size]`
    hidden: DeviceArray  # of the output, `[rows, nodes, hidden_size]`
    nodes: Ints  # of the output that the slots are, int64 `[rows, slots]`


@dataclass
class PendingSlots:
    """Slots of a sequence that were committed, and not run yet."""

    prefix: list[Ints]  # tokens of each row's prefix slots, until they are run
    # pass by pass those after committed positions, ends of rows included, the root last
    tokens: list[Ints] = field(default_factory=list)
    # pass by pass, per row the target's hidden states at these positions, prefix included, float32 `[slots,
    # hidden_size]`
    hidden: list[list[Floats | HiddenView]] = field(default_factory=list)


class EagleDrafter(TreeDrafter):
    """Drafts for sequences of one method."""

    needs_new_codes = True

    def __init__(self, model: Model, method: Drafted, clock: Clock) -> None:
        super().__init__(model.max_nodes)
        assert model.drafter is not None  # sequences are refused where there is none
        self.engine: Engine = model.drafter
        self.shape = parse_tree(method.tree)
        self.relaxed = not method.exact
        self.clock = clock
        self.layout = model.layout
        self.last_position = model.num_positions - 1 + model.layout.position_shift
        self.row_end = model.row_end
        self.slots = _slots(self.shape) * (1 if self.row_end is None else 2)
        self.max_slots = min(model.max_nodes, MAX_SLOTS)
        self.sequences: list[ImageSequence] = []  # as rows of the cache, whose rows are those of each sequence in turn
        self.cache: Cache | None = None
        self.pending: dict[ImageSequence, PendingSlots] = {}
        self._index_rows()

    def commit(self, commits: Sequence[Commit]) -> None:
        """Remember tokens and hidden states of a pass; they are run with the next draft."""
        joining = [one.sequence for one in commits if one.sequence not in self.sequences]
        if joining:
            self._join(joining)
        for one in commits:
            pending = self.pending.get(one.sequence)
            if pending is None:
                rows = one.sequence.rows if one.sequence in joining else []
                pending = self.pending[one.sequence] = PendingSlots([row.drafter_tokens(self.layout) for row in rows])
            pending.hidden = [[_read_states(states) for states in earlier] for earlier in pending.hidden]
            pending.tokens.append(
                one.sequence.raster.insert_row_ends(one.tokens, len(one.sequence.codes) - len(one.tokens))
            )
            sides = enumerate(one.nodes, one.rows.start)
            pending.hidden.append([HiddenView(one.hidden, np.full(len(kept), row), kept) for row, kept in sides])

    def leave(self, sequences: Sequence[ImageSequence]) -> None:
        """Forget these sequences."""
        stays = [sequence not in sequences for sequence in self.sequences]
        if all(stays):
            return
        if any(stays):
            self._cache.keep_rows(np.flatnonzero(np.repeat(stays, self._rows_per_sequence())))
        else:
            self.cache = None
        self.sequences = [sequence for sequence, staying in zip(self.sequences, stays, strict=True) if staying]
        self._index_rows()
        self.pending = {sequence: pending for sequence, pending in self.pending.items() if sequence in self.sequences}

    def draft_trees(self, sequences: Sequence[ImageSequence]) -> list[DraftTree]:
        """Commit new slots and draft one tree per sequence; `sequences` are all that take part."""
        roots = np.array([self.pending[one].tokens[-1][-1] for one in self.sequences], np.int64)
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

    def _rows_per_sequence(self) -> list[int]:
        return [len(sequence.rows) for sequence in self.sequences]

    def _join(self, sequences: Sequence[ImageSequence]) -> None:
        columns = max(sequence.cache_columns for sequence in sequences) + self.slots
        cache = self.engine.new_cache(sum(len(sequence.rows) for sequence in sequences), columns)
        if self.cache is None:
            self.cache = cache
        else:
            self.cache.extend(cache)
        self.sequences += sequences
        self._index_rows()

    def _index_rows(self) -> None:
        """Which sequence a row is of, and the prefix columns it does not see: after sequences have joined or left."""
        self.sequence_of_row = np.repeat(np.arange(len(self.sequences)), self._rows_per_sequence())  # [rows]
        self.first_row = np.searchsorted(self.sequence_of_row, np.arange(len(self.sequences)))  # [sequences]
        padding = stack_padding([~row.real for sequence in self.sequences for row in sequence.rows])
        self.prefix_padding = padding[:, :-1] if self.layout.masks_prefix else np.zeros_like(padding[:, :-1])

    def _batch_rows(self) -> list[Ints]:
        return [
            first + np.arange(sides) for first, sides in zip(self.first_row, self._rows_per_sequence(), strict=True)
        ]

    def _top_children(self, level: LevelOutput, depth: int, count: int, add_noise: bool) -> list[tuple[Ints, Floats]]:
        noises = [one.noise if add_noise and not one.sampling.greedy else None for one in self.sequences]
        on_device = level.logits
        if isinstance(on_device, DeviceLogits) and all(
            on_device.can_sample(sequence.sampling) for sequence in self.sequences
        ):
            samples = []
            for sequence, rows, noise in zip(self.sequences, self._batch_rows(), noises, strict=True):
                positions = np.full(level.nodes.shape[1], len(sequence.codes) + depth)
                own = slice(int(rows[0]), int(rows[-1]) + 1)
                samples.append(SampleRequest(own, level.nodes[rows], sequence.sampling, noise, positions))
            return on_device.best_codes(samples, count)
        best = []
        for sequence, rows, noise in zip(self.sequences, self._batch_rows(), noises, strict=True):
            logits = level.logits[rows[:, None], level.nodes[rows]]  # [sides, slots, vocab_size]
            values = shape_logits(apply_guidance(logits, sequence.sampling), sequence.sampling)
            if noise is not None:
                values = values + noise.gumbel(len(sequence.codes) + depth, 1, values.shape[1])
            best.append(best_codes(values, count))
        return best

    def _commit_slots(self) -> LevelOutput:
        """Run the committed slots, append them, and return the last slot as the root's level.

        At most `self.max_slots` of each row at a time, besides its prefix: those of passes over known codes, if any.
        All rows end in the last pass.
        """
        read, states = self._pending_slots()
        prefixes = [len(row.embeds) - 1 for sequence in self.sequences for row in sequence.rows]
        lengths = self._cache.lengths.tolist()
        # slots to be run, a prefix apart
        left = [len(own) - (0 if n else prefix) for own, n, prefix in zip(read, lengths, prefixes, strict=True)]
        for later in range((max(left) - 1) // self.max_slots * self.max_slots, 0, -self.max_slots):
            counts = [len(own) - later if slots > later else 0 for own, slots in zip(read, left, strict=True)]
            self._run_committed(read, states, counts)
            read = [own[count:] for own, count in zip(read, counts, strict=True)]
            states = [_read_states(own)[count:] for own, count in zip(states, counts, strict=True)]
            left = [min(slots, later) for slots in left]
        counts = [len(own) for own in read]
        output = self._run_committed(read, states, counts)
        nothing = np.zeros((len(self.sequences), 1, 0), bool)
        return LevelOutput(nothing, output.logits, output.hidden, np.array(counts)[:, None] - 1)

    def _pending_slots(self) -> tuple[list[Ints], list[Floats | HiddenView]]:
        """What was committed and not run: per row tokens `[slots]` and hidden states `[slots, hidden_size]`."""
        read: list[Ints] = []
        hidden: list[Floats | HiddenView] = []
        for one in (self.pending.pop(sequence) for sequence in self.sequences):
            codes = np.concatenate(one.tokens) + self.layout.code_offset
            own = [
                p[0] if len(p) == 1 else np.concatenate([*map(_read_states, p)]) for p in zip(*one.hidden, strict=True)
            ]
            read += [np.concatenate([prefix, codes]) for prefix in one.prefix] or [codes] * len(own)
            hidden += own
        return read, hidden

    def _run_committed(self, read: list[Ints], states: list[Floats | HiddenView], counts: list[int]) -> PassOutput:
        slots = max(MIN_NODES, *counts)
        tokens = np.zeros((len(read), slots), np.int64)
        for row, count in enumerate(counts):
            tokens[row, :count] = read[row][:count]
        hidden = _stack_hidden(states, counts, slots)
        lengths, prefix = self._cache.lengths, self.prefix_padding.shape[1]
        attention_mask, past_length = self._committed_mask(lengths, slots)
        attention_mask[:, :, past_length:] = np.tri(slots, dtype=bool)
        for row in np.flatnonzero(lengths == 0).tolist():  # the prefix itself is being committed
            seen = ~self.prefix_padding[row] | np.eye(slots, prefix, dtype=bool)
            attention_mask[row, :, past_length : past_length + prefix] &= seen[:, :slots]
        output = self._run(tokens, hidden, lengths[:, None] + np.arange(slots), attention_mask)
        self.clock.append(self._cache, output.new_kv, [np.arange(count) for count in counts])
        return output

    def _committed_mask(self, lengths: Ints, slots: int) -> tuple[Bools, int]:
        """What new slots see of the `lengths [rows]` committed ones, `[rows, slots, past + slots]`, and the past."""
        past_length = self.engine.next_past_length(self._cache, slots)
        attention_mask = np.zeros((len(lengths), slots, past_length + slots), bool)
        unmask_committed(attention_mask, lengths, self.prefix_padding)
        return attention_mask, past_length

    def _run(self, tokens: Ints, hidden: Floats | HiddenView, positions: Ints, attention_mask: Bools) -> PassOutput:
        batch = Pass(np.minimum(positions, self.last_position), attention_mask, tokens, hidden=hidden)
        return self.clock.run(self.engine, batch, self._cache)

    def _append_row_ends(self, level: LevelOutput, depth: int) -> LevelOutput:
        """The level of this depth, or that of the ends of rows that follow it in some sequences.

        It is run for all of them, and used where a row ends.
        """
        if self.row_end is None:
            return level
        ends = np.array([one.raster.ends_row(len(one.codes) - 1 + depth) for one in self.sequences])
        if not ends.any():
            return level
        sequences, slots = len(ends), level.nodes.shape[1]
        same = np.tile(np.arange(slots), (sequences, 1))
        after = self._expand(np.full_like(same, self.row_end), same, depth, level, behind=1)
        if ends.all():
            return after
        both = [after if ends[sequence] else level for sequence in self.sequence_of_row]  # of each row
        logits, hidden = (
            np.stack([getattr(own, name)[row, own.nodes[row]] for row, own in enumerate(both)])
            for name in ("logits", "hidden")
        )
        before = np.pad(level.attends_to, ((0, 0), (0, 0), (0, slots)))
        return LevelOutput(
            np.where(ends[:, None, None], after.attends_to, before), logits, hidden, same[self.sequence_of_row]
        )

    def _expand(self, tokens: Ints, parents: Ints, depth: int, level: LevelOutput, behind: int = 0) -> LevelOutput:
        """Run the draft nodes below `level` and append their slots.

        tokens: `[sequences, slots]`. parents: where their parents are in `level`, `[sequences, slots]`. behind:
        number of tokens between this depth and the last.
        """
        sequences, slots = tokens.shape
        rows = len(level.nodes)
        padded = max(MIN_NODES, slots)
        drafted = level.attends_to.shape[2]
        base = self._cache.lengths - drafted  # committed slots, [rows]
        codes = np.zeros((rows, padded), np.int64)
        codes[:, :slots] = tokens[self.sequence_of_row] + self.layout.code_offset
        before = np.repeat(level.nodes[:, :1], padded, 1)
        before[:, :slots] = level.nodes[np.arange(rows)[:, None], parents[self.sequence_of_row]]
        states = HiddenView(level.hidden, np.repeat(np.arange(rows)[:, None], padded, 1), before)
        attends_to = np.zeros((sequences, slots, drafted + slots), bool)
        attends_to[:, :, :drafted] = level.attends_to[np.arange(sequences)[:, None], parents]
        attends_to[:, :, drafted:] = np.eye(slots, dtype=bool)
        attention_mask, past_length = self._committed_mask(base, padded)
        attention_mask[:, :, past_length:] = np.eye(padded, dtype=bool)
        for row, start in enumerate(base.tolist()):
            attention_mask[row, :slots, start : start + drafted] = attends_to[self.sequence_of_row[row], :, :drafted]
        below = np.array([_tokens_below(sequence, depth) for sequence in self.sequences])
        positions = np.repeat((base + below[self.sequence_of_row] + behind - 1)[:, None], padded, 1)
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
            level = self._append_row_ends(level, depth)
            levels.append(level)
            count = max(len(shape.children[node]) for node in inner)
            for builder, best in zip(builders, self._top_children(level, depth, count, add_noise=True), strict=True):
                builder.add_children(inner, *best)
        trees: list[DraftTree] = []
        for sequence, rows, builder in zip(self.sequences, self._batch_rows(), builders, strict=True):
            proposal = partial(_proposal, shape, levels, rows, sequence.sampling) if self.relaxed else no_proposal
            trees.append(builder.build(proposal, sequence.sampling.greedy))
        return trees

    def _draft_dynamic(self, shape: DynamicTree, roots: Ints, level: LevelOutput) -> list[DraftTree]:
        builders = [DynamicTreeBuilder(int(root)) for root in roots]
        for depth in range(shape.depth):
            chosen = [builder.best_of_last_level(shape.branch) for builder in builders]
            if depth > 0:
                slots = np.arange(max(map(len, chosen)))  # the last node of a smaller level is repeated
                same = [nodes[np.minimum(slots, len(nodes) - 1)] for nodes in chosen]
                codes = np.stack([builder.tokens[nodes] for builder, nodes in zip(builders, same, strict=True)])
                parents = np.stack(
                    [builder.slot_of_parent[nodes] for builder, nodes in zip(builders, same, strict=True)]
                )
                level = self._expand(codes, parents, depth, level)
            level = self._append_row_ends(level, depth)
            best = self._top_children(level, depth, shape.branch, add_noise=not self.relaxed)
            for builder, nodes, (codes, scores) in zip(builders, chosen, best, strict=True):
                builder.add_children(nodes, codes[: len(nodes)], scores[: len(nodes)])
        return [builder.prune(shape.nodes) for builder in builders]


def _tokens_below(sequence: ImageSequence, depth: int) -> int:
    """Tokens from a sequence's last code to the code `depth` further on, ends of rows between them included."""
    root = len(sequence.codes) - 1
    return sequence.raster.position_of(root + depth) - sequence.raster.position_of(root)


def _proposal(shape: StaticTree, levels: list[LevelOutput], rows: Ints, sampling: Sampling, node: int) -> Probabilities:
    depth = len(shape.paths[node - 1]) if node else 0
    level = levels[depth]
    slot = np.searchsorted(shape.levels[depth], node)
    logits: Floats = level.logits[rows, level.nodes[rows, slot]]
    return shape_distribution(apply_guidance(logits, sampling), sampling)


def _read_states(states: Floats | HiddenView) -> Floats:
    return states.read() if isinstance(states, HiddenView) else states


def _stack_hidden(states: list[Floats | HiddenView], counts: list[int], slots: int) -> Floats | HiddenView:
    sources = {id(own.source) if isinstance(own, HiddenView) else None for own in states}
    if isinstance(first := states[0], HiddenView) and len(sources) == 1:
        rows, nodes = np.zeros((2, len(states), slots), np.int64)
        for row, (own, count) in enumerate(zip(states, counts, strict=True)):
            if isinstance(own, HiddenView):
                rows[row, :count], nodes[row, :count] = own.rows[:count], own.nodes[:count]
        return HiddenView(first.source, rows, nodes)
    read = [_read_states(own) for own in states]
    joined = np.zeros((len(read), slots, read[0].shape[-1]), np.float32)
    for row, count in enumerate(counts):
        joined[row, :count] = read[row][:count]
    return joined
