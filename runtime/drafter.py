"""Draft trees from an EAGLE drafter, for several requests at once.

A drafter slot p reads token p + 1 and the hidden state of position p, and predicts the hidden state p + 1.
Slots of committed tokens stay in the drafter's cache; slots of draft nodes are dropped after each draft.
Children are the k best of log q + g, with the noise g of their position: what the target chooses if it agrees, and k
draws without replacement from q, which relaxed acceptance is told. Dynamic trees grow where the sum along a path of the
logarithm of softmax(log q + g) is highest, which says how likely the target is to agree, given the noise. For relaxed
acceptance they take the most probable tokens instead, as does greedy decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..methods import Drafted, MethodConfig
from .drafts import Batch, Committed, Drafts, Request
from .engine import Bools, Cache, Engine, Floats, Ints, Pass, PassOutput
from .passes import MINIMUM_NODES, committed_mask
from .sampling import Probabilities, best_codes, guide, shape_logits, softmax
from .tree import DraftTree, DynamicTree, StaticTree
from .tree_names import named_tree


def _slots(shape: StaticTree | DynamicTree) -> int:
    """Cache slots that drafting takes; pruned nodes are drafted too."""
    return max(shape.nodes, shape.depth * shape.branch) if isinstance(shape, DynamicTree) else shape.nodes


@dataclass
class Level:
    """Slots that were run together."""

    sees: Bools  # what each saw of the draft: [requests, slots, drafted]
    hidden: Floats  # [rows, slots, hidden_size]
    logits: list[Floats]  # guided, per request: [slots, vocab_size]


class TreeDrafts(Drafts):
    """Drafts for a batch; rows are all conditional ones, then, with guidance, all unconditional ones."""

    def __init__(self, batch: Batch, methods: Sequence[Drafted]) -> None:
        model, self.shapes = batch.model, {method.tree: named_tree(method.tree) for method in methods}
        assert model.drafter is not None  # requests are refused where there is none
        self.engine: Engine = model.drafter
        self.relaxed = not methods[0].exact
        self.sampling, self.clock, self.layout = batch.sampling, batch.drafter_clock, model.layout
        self.last_position = model.positions - 1 + model.layout.position_shift
        padding = batch.prefix_padding if model.layout.masks_prefix else np.zeros_like(batch.prefix_padding)
        self.prefix_padding = padding[:, :-1]
        self.prefix = [row.drafter_tokens(model.layout) for row in batch.rows]  # until it is committed
        self.slots = max(map(_slots, self.shapes.values()))
        self.cache: Cache = self.engine.new_cache(len(batch.rows), batch.capacity(self.slots))
        self.committed_masks: dict[int, Bools] = {}  # by past length, for as long as the same slots are committed
        # not run yet: per request the tokens after committed positions, the root last; per row the hidden states there
        self.tokens: list[Ints] = []
        self.hidden: list[Floats] = []
        self.use(methods[0])

    def use(self, method: MethodConfig) -> None:
        """Draft the method's tree."""
        assert isinstance(method, Drafted)
        self.shape = self.shapes[method.tree]
        self.nodes = self.shape.nodes

    def commit(self, active: Sequence[Request], committed: Committed) -> None:
        """Remember tokens and hidden states of a pass; they are run with the next draft."""
        hidden = [committed.output.hidden[row, nodes] for row, nodes in enumerate(committed.accepted_indices)]
        if self.tokens:
            self.tokens = [np.concatenate(pair) for pair in zip(self.tokens, committed.tokens, strict=True)]
            self.hidden = [np.concatenate(pair) for pair in zip(self.hidden, hidden, strict=True)]
        else:
            self.tokens, self.hidden = committed.tokens, hidden

    def keep(self, slots: Sequence[int], rows: Ints) -> None:
        """Go on with these requests and rows only."""
        self.cache.keep_rows(rows)
        self.prefix_padding = self.prefix_padding[rows]
        self.prefix = [self.prefix[row] for row in rows] if self.prefix else []
        self.tokens = [self.tokens[slot] for slot in slots]
        self.hidden = [self.hidden[row] for row in rows]

    def draft(self, active: Sequence[Request]) -> list[DraftTree]:
        """Commit new slots and draft one tree per request."""
        roots = np.array([tokens[-1] for tokens in self.tokens], np.int64)
        level = self._commit_slots()
        committed = self.cache.lengths.copy()
        if isinstance(self.shape, StaticTree):
            trees = self._draft_static(self.shape, active, roots, level)
        else:
            trees = self._draft_dynamic(self.shape, active, roots, level)
        self.cache.truncate(committed)
        return trees

    def _commit_slots(self) -> Level:
        """Run the committed slots, append them, and return the last slot as the root's level."""
        self.committed_masks = {}
        requests, rows = len(self.tokens), len(self.hidden)
        read = [self.tokens[row % requests] + self.layout.code_offset for row in range(rows)]
        if self.prefix:
            read = [np.concatenate([prefix, tokens]) for prefix, tokens in zip(self.prefix, read, strict=True)]
            self.prefix = []
        counts = [len(ids) for ids in read]
        slots = max(MINIMUM_NODES, *counts)
        tokens = np.zeros((rows, slots), np.int64)
        states = np.zeros((rows, slots, self.hidden[0].shape[-1]), np.float32)
        for row, count in enumerate(counts):
            tokens[row, :count], states[row, :count] = read[row], self.hidden[row]
        lengths, prefix = self.cache.lengths, self.prefix_padding.shape[1]
        attention_mask, past_length = self._committed_mask(lengths, slots)
        attention_mask[:, :, past_length:] = np.tri(slots, dtype=bool)
        for row in np.flatnonzero(lengths == 0).tolist():  # the prefix itself is being committed
            seen = ~self.prefix_padding[row] | np.eye(slots, prefix, dtype=bool)
            attention_mask[row, :, past_length : past_length + prefix] &= seen
        output = self._run(tokens, states, lengths[:, None] + np.arange(slots), attention_mask)
        self.clock.append(self.cache, output.new_kv, [np.arange(count) for count in counts])
        self.committed_masks, self.tokens, self.hidden = {}, [], []
        last = np.arange(rows), np.array(counts) - 1
        hidden_last, logits = output.hidden[last][:, None], output.logits[last][:, None]  # [rows, 1, ...]
        guided = [guide(logits[r::requests], self.sampling.cfg_scale) for r in range(requests)]
        return Level(np.zeros((requests, 1, 0), bool), hidden_last, guided)

    def _committed_mask(self, lengths: Ints, slots: int) -> tuple[Bools, int]:
        """What new slots see of the `lengths [rows]` committed ones, `[rows, slots, past + slots]`, and the past."""
        past_length = self.engine.next_past_length(self.cache, slots)
        if past_length not in self.committed_masks:
            self.committed_masks[past_length] = committed_mask(lengths, self.prefix_padding, past_length)[:, None]
        attention_mask = np.zeros((len(lengths), slots, past_length + slots), bool)
        attention_mask[:, :, :past_length] = self.committed_masks[past_length]
        return attention_mask, past_length

    def _run(self, tokens: Ints, hidden: Floats, positions: Ints, attention_mask: Bools) -> PassOutput:
        batch = Pass(np.minimum(positions, self.last_position), attention_mask, tokens, hidden=hidden)
        return self.clock.run(self.engine, batch, self.cache)

    def _expand(self, tokens: Ints, parents: Ints, depth: int, level: Level) -> Level:
        """Run the draft nodes below `level` and append their slots.

        tokens: `[requests, slots]`. parents: where their parents are in `level`, `[requests, slots]`.
        """
        requests, slots = tokens.shape
        rows, _, width = level.hidden.shape
        request = np.arange(rows) % requests
        padded, drafted = max(MINIMUM_NODES, slots), level.sees.shape[2]
        base = self.cache.lengths - drafted  # committed slots, [rows]
        codes = np.zeros((rows, padded), np.int64)
        codes[:, :slots] = tokens[request] + self.layout.code_offset
        states = np.zeros((rows, padded, width), np.float32)
        states[:, :slots] = level.hidden[np.arange(rows)[:, None], parents[request]]
        sees = np.zeros((requests, slots, drafted + slots), bool)
        sees[:, :, :drafted] = level.sees[np.arange(requests)[:, None], parents]
        sees[:, :, drafted:] = np.eye(slots, dtype=bool)
        attention_mask, past_length = self._committed_mask(base, padded)
        attention_mask[:, :, past_length:] = np.eye(padded, dtype=bool)
        for row, start in enumerate(base.tolist()):
            attention_mask[row, :slots, start : start + drafted] = sees[row % requests, :, :drafted]
        positions = np.repeat((base + depth - 1)[:, None], padded, 1)
        output = self._run(codes, states, positions, attention_mask)
        self.clock.append(self.cache, output.new_kv, [np.arange(slots)] * rows)
        logits = [guide(output.logits[r::requests, :slots], self.sampling.cfg_scale) for r in range(requests)]
        return Level(sees, output.hidden[:, :slots], logits)

    def _draft_static(self, shape: StaticTree, active: Sequence[Request], roots: Ints, level: Level) -> list[DraftTree]:
        requests, keeps_proposals = len(roots), self.relaxed and not self.sampling.greedy
        tokens = np.zeros((requests, shape.nodes), np.int64)
        alive = np.zeros((requests, shape.nodes), bool)  # nodes whose token has been drawn
        tokens[:, 0], alive[:, 0] = roots, True
        proposals: list[dict[int, Probabilities]] = [{} for _ in range(requests)]
        for depth, inner in enumerate(shape.levels):
            if depth > 0:
                slots = np.searchsorted(shape.levels[depth - 1], shape.parents[inner])
                level = self._expand(tokens[:, inner], np.repeat(slots[None], requests, 0), depth, level)
            most = max(len(shape.children[node]) for node in inner)
            for r, request in enumerate(active):
                weights = shape_logits(level.logits[r], self.sampling)
                noise = self._noise(request, depth, weights.shape[1])
                codes, scores = best_codes(weights if noise is None else weights + noise, most)
                for slot, node in enumerate(inner.tolist()):
                    if not alive[r, node]:
                        continue
                    drawn = codes[slot, np.isfinite(scores[slot])]
                    filled = shape.children[node][: len(drawn)]
                    tokens[r, filled], alive[r, filled] = drawn[: len(filled)], True
                    if keeps_proposals:
                        proposals[r][node] = softmax(weights[slot])
        leaf_order = shape.leaves if self.sampling.greedy else None  # sampling knows no ties
        trees = [DraftTree(tokens[r], shape.parents, proposals[r], leaf_order) for r in range(requests)]
        # a peaked distribution may run out of codes
        return [t if own.all() else _subtree(t, np.flatnonzero(own)) for t, own in zip(trees, alive, strict=True)]

    def _draft_dynamic(
        self, shape: DynamicTree, active: Sequence[Request], roots: Ints, level: Level
    ) -> list[DraftTree]:
        grown = [_Growth(int(root)) for root in roots]
        for depth in range(shape.depth):
            chosen = [growth.best_of_last_level(shape.branch) for growth in grown]
            if depth > 0:
                slots = np.arange(max(map(len, chosen)))  # the last node of a smaller level is repeated
                same = [nodes[np.minimum(slots, len(nodes) - 1)] for nodes in chosen]
                codes = np.stack([growth.tokens[nodes] for growth, nodes in zip(grown, same, strict=True)])
                parents = np.stack([growth.slot_of_parent[nodes] for growth, nodes in zip(grown, same, strict=True)])
                level = self._expand(codes, parents, depth, level)
            for request, growth, nodes, logits in zip(active, grown, chosen, level.logits, strict=True):
                weights = shape_logits(logits[: len(nodes)], self.sampling)
                noise = None if self.relaxed else self._noise(request, depth, weights.shape[1])
                weights = weights if noise is None else weights + noise
                growth.add_children(nodes, *best_codes(weights, shape.branch))
        return [growth.prune(shape.nodes) for growth in grown]

    def _noise(self, request: Request, depth: int, size: int) -> Floats | None:
        """The noise that children of nodes at `depth` are drawn with, `[1, size]`."""
        return None if self.sampling.greedy else request.noise.gumbel(len(request.codes) + depth, 1, size)


class _Growth:
    """A dynamic tree of one request while it grows; node 0 is the root."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.scores = np.array([root]), np.array([-1]), np.zeros(1)
        self.slot_of_parent = np.zeros(1, np.int64)  # slot of a node's parent among those expanded last
        self.last_level = 0  # its first node

    def add_children(self, nodes: Ints, codes: Ints, log_probabilities: Floats) -> None:
        """Give each of `nodes` its children: codes and log-probabilities `[nodes, branch]`, best first."""
        branch = codes.shape[1]
        scores = log_probabilities + self.scores[nodes][:, None]
        possible = np.isfinite(scores).ravel()
        self.last_level = len(self.tokens)
        self.tokens = np.concatenate([self.tokens, codes.ravel()[possible]])
        self.scores = np.concatenate([self.scores, scores.ravel()[possible]])
        self.parents = np.concatenate([self.parents, np.repeat(nodes, branch)[possible]])
        slots = np.repeat(np.arange(len(nodes)), branch)[possible]
        self.slot_of_parent = np.concatenate([self.slot_of_parent, slots])

    def best_of_last_level(self, count: int) -> Ints:
        """The best nodes of the last level, best first."""
        return self.last_level + np.argsort(-self.scores[self.last_level :], kind="stable")[:count]

    def prune(self, count: int) -> DraftTree:
        """Keep the root and the `count` - 1 best nodes, in order of creation."""
        best = np.argsort(-self.scores[1:], kind="stable")[: count - 1] + 1
        return _subtree(DraftTree(self.tokens, self.parents), np.concatenate([[0], np.sort(best)]))


def _subtree(tree: DraftTree, kept: Ints) -> DraftTree:
    """The tree of some nodes in their order, every one's parent among them."""
    renumber = np.full(tree.nodes + 1, -1, np.int64)
    renumber[kept] = np.arange(len(kept))
    proposals = {int(renumber[node]): q for node, q in tree.proposals.items()}
    return DraftTree(tree.tokens[kept], renumber[tree.parents[kept]], proposals)
