"""Drafts from a bundle's `DraftHeads`, without drafter passes: windows for `sjd`, and trees for the other methods.

A target pass also gives logits and hidden states at the positions of unaccepted draft tokens. For each depth of the
draft, the output at the first node is stored; in a tree, this node has the most probable token. The next draft corrects
the stored logits for the codes that it contains. It predicts the logits of positions without a node. So the logits of a
position depend only on the previous code, as in a bigram model, and a tree needs one matrix product per level. Draft
tokens are sampled with the noise of their position, as in `EagleDrafter`.

For relaxed acceptance, q is the distribution that a draft token was sampled from. It depends on passes over earlier
drafts. This is valid for the reason given in `jacobi.py`: q depends only on earlier positions, and never on the noise
of its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ..errors import EngineError
from ..methods import Sampling, SpeculativeJacobi, TreeMethod
from .drafting import CommittedTokens
from .engine import Floats, Ints
from .heads import DraftHeads
from .sampling import Probabilities, compute_distribution, find_top_codes, process_logits
from .state import ImageSequence
from .tree import DraftTree, DynamicTree, DynamicTreeBuilder, StaticTree, StaticTreeBuilder, no_proposal_distribution
from .tree_drafts import TreeDrafter, make_chain
from .tree_names import parse_tree


class HeadDrafter(TreeDrafter):
    """Drafter for all sequences whose method uses windows or draft heads.

    Args:
        heads: the bundle's draft heads.
        max_nodes: maximum number of nodes of a sequence in a forward pass.
    """

    needs_new_codes = True

    def __init__(self, heads: DraftHeads, max_nodes: int) -> None:
        super().__init__(max_nodes)
        self._heads = heads
        self._states: dict[ImageSequence, DraftHeadState] = {}

    def store_committed_tokens(self, commits: Sequence[CommittedTokens]) -> None:
        """Store the output of a target pass."""
        for commit in commits:
            sequence = commit.sequence
            if sequence.num_remaining_codes:
                if sequence not in self._states:
                    self._states[sequence] = DraftHeadState(sequence, self._heads)
                self._states[sequence].update(commit)

    def draft_trees(self, sequences: Sequence[ImageSequence]) -> list[DraftTree]:
        """Return a chain or tree for every sequence."""
        trees = []
        for sequence in sequences:
            try:
                trees.append(self._states[sequence].draft())
            except EngineError as error:
                sequence.error = error
                trees.append(make_chain(sequence.codes[-1:]))  # the sequence ends after the pass
        return trees

    def min_pass_nodes(self, sequence: ImageSequence, num_images: int) -> int:
        """Set the window for the images in the pass, and return the maximum number of nodes of the next draft."""
        sequence.adapt_window(num_images)
        return sequence.max_nodes

    def remove(self, sequences: Sequence[ImageSequence]) -> None:
        """Delete the state of these sequences."""
        for sequence in sequences:
            self._states.pop(sequence, None)


class UnacceptedPosition(NamedTuple):
    """Output of the last target pass for a position without a committed code."""

    previous_code: int  # draft token before the position
    logits: Floats  # guided logits, `[vocab_size]`
    gate: Floats  # output of `DraftHeads.compute_gates`, `[rank]`


class DraftHeadState:
    """State of one sequence between drafts: outputs of passes that its next draft is computed from.

    Args:
        sequence: sequence to draft for.
        heads: the bundle's draft heads.
    """

    def __init__(self, sequence: ImageSequence, heads: DraftHeads) -> None:
        self.sequence = sequence
        self.heads = heads
        # Output of `DraftHeads.compute_context` for each cell, zeros if unknown, `[cells, 2, units]`.
        self.context = np.zeros((sequence.layout.num_codes, 2, heads.left.shape[1]), np.float32)
        self.unaccepted: dict[int, UnacceptedPosition] = {}  # {position: output}

    def update(self, committed: CommittedTokens) -> None:
        """Store the output of a target pass over a draft of any method."""
        done = len(self.sequence.codes)
        count = len(committed.tokens)
        unaccepted: list[int] = []  # first node of each depth from `count` on; shallower depths gave committed codes
        if committed.draft is not None:
            depths = committed.draft.tree_structure.depths
            unaccepted = [int(np.argmax(depths == depth)) for depth in range(count, int(depths.max()) + 1)]
        codes = range(done - count, done + len(unaccepted))
        states = self.sequence.guidance.mix_logits(
            committed.read_target_states(unaccepted), codes
        )  # [nodes, hidden_size]
        # State i predicted code `done - count + i`; the states after the first `count` predicted codes behind the draft
        # tokens that were not accepted.
        self.context[done - count : done] = self.heads.compute_context(states[:count])
        self.unaccepted = {}
        for i, (node, gate) in enumerate(zip(unaccepted, self.heads.compute_gates(states[count:]), strict=True)):
            assert committed.draft is not None
            self.unaccepted[done + i] = UnacceptedPosition(
                int(committed.draft.tokens[node]), committed.target.guided_logits(node), gate
            )

    def draft(self) -> DraftTree:
        """Return the next draft: a chain for `sjd`, and a tree for other methods."""
        method = self.sequence.method
        max_depth = self.sequence.count_codes_until_preserved() - 1  # the target samples one more token than it accepts
        if isinstance(method, SpeculativeJacobi):
            return self._draft_chain(min(self.sequence.window, max_depth))
        assert isinstance(method, TreeMethod)
        shape = parse_tree(method.tree)
        return (
            self._draft_static_tree(shape, max_depth)
            if isinstance(shape, StaticTree)
            else self._draft_dynamic_tree(shape, max_depth)
        )

    def compute_logits(self, position: int, previous_codes: Ints) -> Floats:
        """Return the guided logits of a position after each previous code, `[n, vocab_size]`.

        Args:
            position: position without a code.
            previous_codes: codes at the position before, int64 `[n]`.
        """
        if (unaccepted := self.unaccepted.get(position)) is None:
            return self.heads.predict_logits(
                previous_codes, self.sequence.raster_layout.code_above(position), self.context
            )
        if len(previous_codes) == 1 and previous_codes[0] == unaccepted.previous_code:
            return unaccepted.logits[None]  # the correction would be 0
        return unaccepted.logits + self.heads.compute_logit_correction(
            unaccepted.gate, unaccepted.previous_code, previous_codes
        )

    def perturb_logits(self, position: int, logits: Floats, add_noise: bool = True) -> Floats:
        """Return shaped logits plus the Gumbel noise of a position.

        Args:
            position: position of the token in the sequence.
            logits: guided logits `[n, vocab_size]`.
            add_noise: whether to add noise. Greedy decoding has none.
        """
        values = process_logits(logits, self.sequence.sampling)
        if add_noise and not self.sequence.sampling.greedy:
            values = values + self.sequence.noise.gumbel(position, 1, values.shape[1])
        return values

    def _draft_chain(self, length: int) -> DraftTree:
        codes = self.sequence.codes[-1:]
        first = len(self.sequence.codes)
        levels: list[Floats] = []
        for position in range(first, first + length):
            levels.append(self.compute_logits(position, np.array(codes[-1:])))
            codes.append(int(self.perturb_logits(position, levels[-1]).argmax()))
        proposal = (
            no_proposal_distribution
            if self.sequence.exact
            else partial(_compute_chain_proposal, levels, self.sequence.sampling)
        )
        # Each node is the parent of the next, and the root has parent -1.
        return DraftTree(np.array(codes, np.int64), np.arange(length + 1, dtype=np.int64) - 1, proposal)

    def _draft_static_tree(self, shape: StaticTree, max_depth: int) -> DraftTree:
        builder = StaticTreeBuilder(shape, self.sequence.codes[-1])
        first = len(self.sequence.codes)
        levels: list[Floats] = []
        for depth, inner in enumerate(shape.levels[:max_depth]):
            levels.append(self.compute_logits(first + depth, builder.tokens[inner]))  # [nodes of the level, vocab_size]
            children = max(len(shape.children[node]) for node in inner)
            builder.add_children(inner, *find_top_codes(self.perturb_logits(first + depth, levels[-1]), children))
        proposal = (
            no_proposal_distribution
            if self.sequence.exact
            else partial(_compute_tree_proposal, shape, levels, self.sequence.sampling)
        )
        return builder.build(proposal, self.sequence.sampling.greedy)

    def _draft_dynamic_tree(self, shape: DynamicTree, max_depth: int) -> DraftTree:
        builder = DynamicTreeBuilder(self.sequence.codes[-1])
        first = len(self.sequence.codes)
        for position in range(first, first + min(shape.depth, max_depth)):
            chosen = builder.choose_best_of_last_level(shape.branching_factor)
            values = self.perturb_logits(
                position, self.compute_logits(position, builder.tokens[chosen]), self.sequence.exact
            )
            builder.add_children(chosen, *find_top_codes(values, shape.branching_factor))
        return builder.prune(shape.num_nodes)


def _compute_chain_proposal(levels: Sequence[Floats], sampling: Sampling, node: int) -> Probabilities:
    return compute_distribution(levels[node][0], sampling)


def _compute_tree_proposal(shape: StaticTree, levels: Sequence[Floats], sampling: Sampling, node: int) -> Probabilities:
    depth = len(shape.paths[node - 1]) if node else 0
    return compute_distribution(levels[depth][np.searchsorted(shape.levels[depth], node)], sampling)
