"""Drafts by a bundle's `DraftHeads`, without a drafter pass: windows of `sjd`, and the trees of the other methods.

What the last pass said about a position that it left undecided is kept: of all nodes there, what the first one's state
gave, which in trees is the most probable. The logits of the next draft there follow from that and from the code to its
left, and where there was no node from `DraftHeads.predict`; so they are a bigram's at every position, and a tree grows
level by level with one product each. Drafts are made with the noise of their position, as an `EagleDrafter` makes them.

For relaxed acceptance q is what a draft was drawn from. It depends on passes over other drafts, and that is as
`jacobi.py` has it: all of it lies at positions before, none on the noise of the position itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ..methods import Drafted, Sampling, Sjd
from .drafting import Commit
from .engine import Floats, Ints
from .heads import DraftHeads
from .sampling import Probabilities, apply_guidance, best_codes, shape_distribution, shape_logits
from .state import ImageSequence
from .tree import DraftTree, DynamicTree, DynamicTreeBuilder, StaticTree, StaticTreeBuilder, no_proposal
from .tree_drafts import TreeDrafter
from .tree_names import parse_tree


class HeadDrafter(TreeDrafter):
    """Drafts for every sequence that windows or trees may draw."""

    needs_new_codes = True

    def __init__(self, heads: DraftHeads) -> None:
        super().__init__()
        self._heads = heads
        self._states: dict[ImageSequence, DraftHeadState] = {}

    def commit(self, commits: Sequence[Commit]) -> None:
        """Keep what a pass said about positions that are undecided."""
        for one in commits:
            method = one.sequence.method
            ours = isinstance(method, Sjd) or (isinstance(method, Drafted) and method.uses_draft_heads)
            if one.sequence.remaining and ours:
                if one.sequence not in self._states:
                    self._states[one.sequence] = DraftHeadState(one.sequence, self._heads)
                self._states[one.sequence].update(one)

    def draft_trees(self, sequences: Sequence[ImageSequence]) -> list[DraftTree]:
        """Return a chain or tree for every sequence."""
        return [self._states[sequence].draft() for sequence in sequences]

    def leave(self, sequences: Sequence[ImageSequence]) -> None:
        """Forget these sequences."""
        for sequence in sequences:
            self._states.pop(sequence, None)


class UnacceptedPosition(NamedTuple):
    """What the last pass said about a position that it left undecided."""

    previous: int  # the code that stood before it
    logits: Floats  # guided, `[vocab_size]`
    gate: Floats  # of `DraftHeads.gates`


class DraftHeadState:
    """What is known about the next positions of one sequence."""

    def __init__(self, sequence: ImageSequence, heads: DraftHeads) -> None:
        self.sequence, self.heads = sequence, heads
        # see `DraftHeads.context`
        self.context = np.zeros((sequence.raster.num_codes, 2, heads.left.shape[1]), np.float32)
        self.unaccepted: dict[int, UnacceptedPosition] = {}  # by position

    def update(self, commit: Commit) -> None:
        """Take in a pass over a draft of any method."""
        done, count = len(self.sequence.codes), len(commit.tokens)
        undecided: list[int] = []  # the first node of each depth that no code was committed of
        if commit.draft is not None:
            depths = commit.draft.structure.depths
            undecided = [int(np.argmax(depths == depth)) for depth in range(count, int(depths.max()) + 1)]
        nodes = np.stack([np.append(kept[-count:], undecided).astype(np.int64) for kept in commit.nodes])
        rows = np.arange(commit.rows.start, commit.rows.stop)[:, None]
        states = apply_guidance(commit.hidden[rows, nodes], self.sequence.sampling)  # [nodes, hidden_size]
        self.context[done - count : done] = self.heads.context(states[:count])
        self.unaccepted = {}
        for i, (node, gate) in enumerate(zip(undecided, self.heads.gates(states[count:]), strict=True)):
            assert commit.draft is not None
            self.unaccepted[done + i] = UnacceptedPosition(
                int(commit.draft.tokens[node]), commit.target.guided_logits(node), gate
            )

    def draft(self) -> DraftTree:
        """The next draft, of the method in use."""
        method, max_depth = self.sequence.method, self.sequence.tokens_until_preserved() - 1
        if isinstance(method, Sjd):
            return self._chain(min(self.sequence.window, max_depth))
        assert isinstance(method, Drafted)
        shape = parse_tree(method.tree)
        return self._static(shape, max_depth) if isinstance(shape, StaticTree) else self._dynamic(shape, max_depth)

    def logits(self, position: int, previous: Ints) -> Floats:
        """Guided logits of a code at an undecided position after each of some codes `[n]`: `[n, vocab_size]`."""
        if (unaccepted := self.unaccepted.get(position)) is None:
            return self.heads.predict(previous, position - self.sequence.raster.columns, self.context)
        if len(previous) == 1 and previous[0] == unaccepted.previous:
            return unaccepted.logits[None]
        return unaccepted.logits + self.heads.correction(unaccepted.gate, unaccepted.previous, previous)

    def perturb_logits(self, position: int, logits: Floats, add_noise: bool = True) -> Floats:
        """Return shaped logits plus the Gumbel noise of a position.

        Args:
            position: position of the token in the sequence.
            logits: guided logits `[n, vocab_size]`.
            add_noise: whether to add noise. Greedy decoding has none.
        """
        values = shape_logits(logits, self.sequence.sampling)
        if add_noise and not self.sequence.sampling.greedy:
            values = values + self.sequence.noise.gumbel(position, 1, values.shape[1])
        return values

    def _chain(self, length: int) -> DraftTree:
        codes, first = self.sequence.codes[-1:], len(self.sequence.codes)
        levels: list[Floats] = []
        for position in range(first, first + length):
            levels.append(self.logits(position, np.array(codes[-1:])))
            codes.append(int(self.perturb_logits(position, levels[-1]).argmax()))
        proposal = no_proposal if self.sequence.exact else partial(_chain_proposal, levels, self.sequence.sampling)
        return DraftTree(np.array(codes, np.int64), np.arange(length + 1, dtype=np.int64) - 1, proposal)

    def _static(self, shape: StaticTree, max_depth: int) -> DraftTree:
        builder, first = StaticTreeBuilder(shape, self.sequence.codes[-1]), len(self.sequence.codes)
        levels: list[Floats] = []
        for depth, inner in enumerate(shape.levels[:max_depth]):
            levels.append(self.logits(first + depth, builder.tokens[inner]))
            children = max(len(shape.children[node]) for node in inner)
            builder.add_children(inner, *best_codes(self.perturb_logits(first + depth, levels[-1]), children))
        proposal = no_proposal if self.sequence.exact else partial(_proposal, shape, levels, self.sequence.sampling)
        return builder.build(proposal, self.sequence.sampling.greedy)

    def _dynamic(self, shape: DynamicTree, max_depth: int) -> DraftTree:
        builder, first = DynamicTreeBuilder(self.sequence.codes[-1]), len(self.sequence.codes)
        for position in range(first, first + min(shape.depth, max_depth)):
            chosen = builder.best_of_last_level(shape.branch)
            values = self.perturb_logits(position, self.logits(position, builder.tokens[chosen]), self.sequence.exact)
            builder.add_children(chosen, *best_codes(values, shape.branch))
        return builder.prune(shape.nodes)


def _chain_proposal(levels: Sequence[Floats], sampling: Sampling, node: int) -> Probabilities:
    return shape_distribution(levels[node][0], sampling)


def _proposal(shape: StaticTree, levels: Sequence[Floats], sampling: Sampling, node: int) -> Probabilities:
    depth = len(shape.paths[node - 1]) if node else 0
    return shape_distribution(levels[depth][np.searchsorted(shape.levels[depth], node)], sampling)
