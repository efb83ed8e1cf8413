"""Draft trees from an EAGLE drafter, for several requests at once.

A drafter slot p reads code p + 1 and the hidden state of position p, and predicts the hidden state p + 1.
Slots of committed codes stay in the drafter's cache; slots of draft nodes are dropped after each draft.
Static trees draw children without replacement from the drafter's distribution (its true q is kept), or
take the most probable ones when decoding greedily; dynamic trees always take the most probable ones.

Does not know acceptance, or what the target thinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .engine import Bools, Cache, Engine, Floats, Ints, Pass, PassOutput
from .passes import committed_mask, run_pass
from .sampling import (
    Probabilities,
    Sampling,
    draw_without_replacement,
    guide,
    log_softmax,
    refuse_damaged,
    shape_distribution,
)
from .statistics import Clock
from .streams import Streams
from .tree import DraftTree, DynamicTree, StaticTree, TreeShape


@dataclass
class Level:
    """Slots that were run together: hidden states, and guided logits per request."""

    hidden: Floats  # [rows, slots, width]
    logits: list[Floats]  # per request: [slots, vocabulary]


class Drafter:
    """Drafts for a batch of requests; rows are all conditional ones, then all unconditional ones."""

    def __init__(
        self,
        engine: Engine,
        shape: TreeShape,
        sampling: Sampling,
        clock: Clock,
        position_shift: int,
        last_position: int,
    ) -> None:
        self.engine, self.shape, self.sampling, self.clock = engine, shape, sampling, clock
        self.position_shift, self.last_position = position_shift, last_position
        self.cache: Cache
        self.hidden_columns: Bools

    def start(self, rows: int, capacity: int, hidden_columns: Bools) -> None:
        """Open a cache; `hidden_columns [rows, prefix]` marks prefix slots nobody may see."""
        self.cache, self.hidden_columns = self.engine.new_cache(rows, capacity), hidden_columns

    def keep_rows(self, rows: Ints) -> None:
        """Go on with these rows only."""
        self.cache.keep_rows(rows)
        self.hidden_columns = self.hidden_columns[rows]

    def draft(self, tokens: list[Ints], hidden: list[Floats], streams: Sequence[Streams]) -> list[DraftTree]:
        """Commit new slots and draft one tree per request.

        tokens: per request the codes that followed the newly committed positions, the root last. hidden:
        per *row* the target's hidden states at those positions, `[slots, width]`.
        """
        requests = len(tokens)
        roots = np.array([codes[-1] for codes in tokens], np.int64)
        level = self._commit(tokens, hidden)
        committed = self.cache.lengths.copy()
        if isinstance(self.shape, StaticTree):
            trees = self._draft_static(self.shape, roots, level, committed, streams)
        else:
            trees = self._draft_dynamic(self.shape, roots, level, committed)
        self.cache.truncate(committed)
        assert len(trees) == requests
        return trees

    def _commit(self, tokens: list[Ints], hidden: list[Floats]) -> Level:
        """Run the committed slots, append them, and return the last slot as the root's level."""
        requests, rows = len(tokens), len(hidden)
        counts = np.array([len(codes) for codes in tokens])
        slots, width = max(2, int(counts.max())), hidden[0].shape[-1]
        codes = np.zeros((rows, slots), np.int64)
        states = np.zeros((rows, slots, width), np.float32)
        new = np.zeros((rows, slots, slots), bool)
        lengths = self.cache.lengths
        for row in range(rows):
            count = counts[row % requests]
            codes[row, :count], states[row, :count] = tokens[row % requests], hidden[row]
            new[row] = np.tri(slots, dtype=bool)
            prefix = self.hidden_columns.shape[1]
            if lengths[row] < prefix:  # the prefix itself is being committed
                new[row, :, :prefix] &= ~self.hidden_columns[row, None, :slots] | np.eye(slots, prefix, dtype=bool)
        positions = lengths[:, None] + np.arange(slots)
        output = self._run(codes, states, positions, new, self._past_mask(slots))
        self.cache.append(output.fresh, [np.arange(counts[row % requests]) for row in range(rows)])
        last = np.array([counts[row % requests] - 1 for row in range(rows)])
        hidden_last = output.hidden[np.arange(rows), last][:, None]  # [rows, 1, width]
        logits = [
            guide(output.logits[[r, r + requests] if rows > requests else [r], counts[r] - 1], self.sampling.cfg_scale)[
                None
            ]
            for r in range(requests)
        ]
        return Level(hidden_last, logits)

    def _past_mask(self, nodes: int) -> Bools:
        span = self.engine.next_span(self.cache, nodes)
        return committed_mask(self.cache.lengths, self.hidden_columns, span)

    def _run(self, tokens: Ints, hidden: Floats, positions: Ints, new: Bools, past: Bools) -> PassOutput:
        """One pass; `new [rows, slots, slots]`, `past [rows, span]` or `[rows, slots, span]`."""
        rows, slots = tokens.shape
        if past.ndim == 2:
            past = np.broadcast_to(past[:, None], (rows, slots, past.shape[1]))
        batch = Pass(
            positions=np.minimum(positions, self.last_position + self.position_shift),
            visible=np.concatenate([past, new], -1),
            tokens=tokens,
            hidden=hidden,
        )
        return run_pass(self.engine, batch, self.cache, self.clock.drafter)

    def _expand(
        self, trees_tokens: list[Ints], parents_slot: list[Ints], depth: int, base: Ints, above: Bools, hidden: Floats
    ) -> tuple[Floats, list[Floats], Bools]:
        """Run one level of draft nodes and append its slots.

        trees_tokens: per request codes `[slots]`. parents_slot: per request the slot of each node's parent in
        the previous level, whose `hidden [rows, slots, width]` it reads. above: `[requests, previous, slots
        so far]`, what each previous slot saw of the draft. Returns hidden, guided logits and the new `above`.
        """
        requests, rows = len(trees_tokens), len(hidden)
        slots = len(trees_tokens[0])
        padded = max(2, slots)
        drafted = above.shape[2]
        codes = np.zeros((rows, padded), np.int64)
        states = np.zeros((rows, padded, hidden.shape[-1]), np.float32)
        sees = np.zeros((requests, slots, drafted + slots), bool)
        for r in range(requests):
            sees[r, :, :drafted] = above[r, parents_slot[r]]
            sees[r, :, drafted:] = np.eye(slots, dtype=bool)
            for row in range(r, rows, requests):
                codes[row, :slots] = trees_tokens[r]
                states[row, :slots] = hidden[row, parents_slot[r]]
        span = self.engine.next_span(self.cache, padded)
        past = np.repeat(committed_mask(base, self.hidden_columns, span)[:, None], padded, 1)
        new = np.zeros((rows, padded, padded), bool)
        new[:, np.arange(padded), np.arange(padded)] = True
        for row in range(rows):
            past[row, :slots, base[row] : base[row] + drafted] = sees[row % requests, :, :drafted]
        positions = np.broadcast_to((base + depth - 1)[:, None], (rows, padded))
        output = self._run(codes, states, positions, new, past)
        self.cache.append(output.fresh, [np.arange(slots)] * rows)
        logits = [
            guide(output.logits[r::requests, :slots], self.sampling.cfg_scale) for r in range(requests)
        ]  # [slots, vocabulary]
        return output.hidden[:, :slots], logits, sees

    def _draft_static(
        self, shape: StaticTree, roots: Ints, level: Level, base: Ints, streams: Sequence[Streams]
    ) -> list[DraftTree]:
        requests = len(roots)
        tokens = np.zeros((requests, shape.nodes), np.int64)
        tokens[:, 0] = roots
        alive = np.zeros((requests, shape.nodes), bool)  # nodes whose code has been drawn
        alive[:, 0] = True
        proposals: list[dict[int, Probabilities]] = [{} for _ in range(requests)]
        above = np.zeros((requests, 1, 0), bool)
        hidden, logits = level.hidden, level.logits
        inner_before = np.zeros(1, np.int64)
        for depth, inner in enumerate(shape.levels):
            if depth > 0:
                slot_of = {int(node): slot for slot, node in enumerate(inner_before)}
                parents = np.array([slot_of[int(shape.parents[node])] for node in inner])
                hidden, logits, above = self._expand(
                    [tokens[r, inner] for r in range(requests)], [parents] * requests, depth, base, above, hidden
                )
            for r in range(requests):
                for slot, node in enumerate(inner):
                    children = shape.children[int(node)]
                    if alive[r, node]:
                        codes = self._choose(logits[r][slot], len(children), proposals[r], int(node), streams[r])
                        tokens[r, children[: len(codes)]] = codes
                        alive[r, children[: len(codes)]] = True
            inner_before = inner
        leaf_order = shape.leaves if self.sampling.greedy else None  # sampling knows no ties
        trees = [DraftTree(tokens[r], shape.parents, proposals[r], leaf_order) for r in range(requests)]
        return [_without(tree, alive[r]) for r, tree in enumerate(trees)]

    def _choose(
        self, logits: Floats, count: int, proposals: dict[int, Probabilities], node: int, streams: Streams
    ) -> Ints:
        """Codes of a node's children; sampled ones leave their distribution in `proposals`."""
        if self.sampling.greedy:
            refuse_damaged(logits)
            count = min(count, len(logits))
            first = np.argpartition(-logits, count - 1)[:count]
            ranked: Ints = first[np.argsort(-logits[first], kind="stable")]
            return ranked
        distribution = shape_distribution(logits, self.sampling)
        proposals[node] = distribution
        return draw_without_replacement(distribution, count, streams.draft)

    def _draft_dynamic(self, shape: DynamicTree, roots: Ints, level: Level, base: Ints) -> list[DraftTree]:
        requests = len(roots)
        grown = [_Growth(int(root)) for root in roots]
        above = np.zeros((requests, 1, 0), bool)
        hidden, logits = level.hidden, level.logits
        for growth, rows_of_logits in zip(grown, logits, strict=True):
            growth.add_children(np.zeros(1, np.int64), self._log_probabilities(rows_of_logits), shape.branch)
        for depth in range(1, shape.depth):
            slots = [growth.best_of_last_level(shape.branch) for growth in grown]
            width = max(len(chosen) for chosen, _ in slots)
            codes = [_stretch(growth.token_of(chosen), width) for growth, (chosen, _) in zip(grown, slots, strict=True)]
            parents = [_stretch(parent, width) for _, parent in slots]
            hidden, logits, above = self._expand(codes, parents, depth, base, above, hidden)
            for growth, (chosen, _), scores in zip(grown, slots, logits, strict=True):
                growth.add_children(chosen, self._log_probabilities(scores[: len(chosen)]), shape.branch)
        return [growth.prune(shape.nodes) for growth in grown]

    def _log_probabilities(self, logits: Floats) -> Floats:
        """Log-probabilities `[slots, vocabulary]`, after temperature and filters unless greedy."""
        if not self.sampling.filtered:
            refuse_damaged(logits)
            return log_softmax(self.sampling.scale(logits))
        with np.errstate(divide="ignore"):
            scores = np.log(np.stack([shape_distribution(row, self.sampling) for row in logits]))
        return scores.astype(np.float32)


class _Growth:
    """A dynamic tree of one request while it grows; node 0 is the root."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.scores = np.array([root]), np.array([-1]), np.zeros(1)
        self.slot_of_parent = np.zeros(1, np.int64)  # slot of a node's parent among those expanded last
        self.last_level = np.zeros(1, np.int64)

    def add_children(self, nodes: Ints, log_probabilities: Floats, branch: int) -> None:
        """Give each of `nodes` its `branch` most probable children, best first."""
        branch = min(branch, log_probabilities.shape[1])
        first = np.argpartition(-log_probabilities, branch - 1, axis=1)[:, :branch]
        order = np.argsort(-np.take_along_axis(log_probabilities, first, 1), axis=1, kind="stable")
        codes = np.take_along_axis(first, order, 1)  # [nodes, branch]
        scores = np.take_along_axis(log_probabilities, codes, 1) + self.scores[nodes][:, None]
        possible = np.isfinite(scores).ravel()
        start = len(self.tokens)
        self.tokens = np.concatenate([self.tokens, codes.ravel()[possible]])
        self.scores = np.concatenate([self.scores, scores.ravel()[possible]])
        self.parents = np.concatenate([self.parents, np.repeat(nodes, branch)[possible]])
        slots = np.repeat(np.arange(len(nodes)), branch)[possible]
        self.slot_of_parent = np.concatenate([self.slot_of_parent, slots])
        self.last_level = np.arange(start, len(self.tokens))

    def best_of_last_level(self, count: int) -> tuple[Ints, Ints]:
        """The best nodes of the last level, best first, and the slots of their parents."""
        order = np.argsort(-self.scores[self.last_level], kind="stable")[:count]
        chosen = self.last_level[order]
        return chosen, self.slot_of_parent[chosen]

    def token_of(self, nodes: Ints) -> Ints:
        """Codes of nodes."""
        return self.tokens[nodes]

    def prune(self, count: int) -> DraftTree:
        """Keep the root and the `count` - 1 best nodes, in order of creation."""
        best = np.argsort(-self.scores[1:], kind="stable")[: count - 1] + 1
        kept = np.concatenate([[0], np.sort(best)])
        renumber = np.full(len(self.tokens) + 1, -1)
        renumber[kept] = np.arange(len(kept))
        return DraftTree(self.tokens[kept].astype(np.int64), renumber[self.parents[kept]].astype(np.int64))


def _stretch(values: Ints, count: int) -> Ints:
    """Repeat the last value up to `count` values."""
    return np.concatenate([values, np.repeat(values[-1:], count - len(values))])


def _without(tree: DraftTree, alive: Bools) -> DraftTree:
    """The tree of the nodes that have a code (a peaked distribution may run out of codes)."""
    if alive.all():
        return tree
    kept = np.flatnonzero(alive)
    renumber = np.full(tree.nodes + 1, -1)
    renumber[kept] = np.arange(len(kept))
    proposals = {int(renumber[node]): q for node, q in tree.proposals.items()}
    return DraftTree(tree.tokens[kept], renumber[tree.parents[kept]].astype(np.int64), proposals)
