"""Drafts from draft heads instead of drafter passes: chains for `sjd`, and trees for the other methods.

A target pass also computes logits and hidden states after draft tokens that are not accepted. For each depth of the
draft, the output at the first node is stored. In a tree, the first node has the most probable token. The next draft
contains other codes, so the draft heads correct the stored logits for these codes. For positions without stored output,
the draft heads predict the logits. Within one draft, the logits of a position depend only on the previous code, as in a
bigram model. So a tree needs one matrix product for each level. Draft tokens are sampled with the noise of their
position, as in `EagleDrafter`.

Relaxed acceptance needs the distribution q from which a draft token was sampled. Here q depends on passes over earlier
drafts. This is valid, as the proof in `jacobi.py` shows: q depends only on earlier positions, and never on the noise of
the token's position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .drafting import CommittedTokens
from .engine import Floats, Ints
from .heads import DraftHeads
from .sampling import Probabilities, find_top_codes, make_invalid_logits_error
from .state import ImageSequence
from .tree import (
    DraftTree,
    DynamicTreeBuilder,
    DynamicTreeShape,
    StaticTreeBuilder,
    StaticTreeShape,
    TreeShape,
    no_proposal_distribution,
)
from .tree_drafts import TreeDrafter, make_chain


class HeadDrafter(TreeDrafter):
    """Drafter that computes trees of a shape with draft heads; shape None: chains as long as the window."""

    def __init__(self, heads: DraftHeads, max_nodes: int, shape: TreeShape | None) -> None:
        super().__init__(max_nodes)
        self._heads = heads
        self._shape = shape
        self._states: dict[ImageSequence, DraftHeadState] = {}

    def store_committed_tokens(self, commits: Sequence[CommittedTokens]) -> None:
        for commit in commits:
            sequence = commit.sequence
            if sequence.num_remaining_codes:
                if sequence not in self._states:
                    self._states[sequence] = DraftHeadState(sequence, self._heads)
                self._states[sequence].update(commit)

    def draft_tree(self, sequence: ImageSequence) -> DraftTree:
        tree = self._states[sequence].draft(self._shape)
        if tree.num_nodes == 1 and sequence.count_codes_until_preserved() > 1:  # NaN after the root
            sequence.error = make_invalid_logits_error()
        return tree

    def remove(self, sequences: Sequence[ImageSequence]) -> None:
        for sequence in sequences:
            self._states.pop(sequence, None)


class UnacceptedPosition(NamedTuple):
    """Output of the last target pass for a position whose code is not committed yet."""

    previous_code: int  # draft token before the position
    logits: Floats  # guided logits of the position, float32 `[vocab_size]`
    gate: Floats  # gates of the correction, from `DraftHeads.compute_gates`, float32 `[rank]`


class DraftHeadState:
    """State of one sequence between drafts: the outputs of target passes from which the next draft is computed."""

    def __init__(self, sequence: ImageSequence, heads: DraftHeads) -> None:
        self.sequence = sequence
        self.sampler = sequence.plan.sampler
        self.heads = heads
        # Output of `DraftHeads.compute_context` for each cell, zeros if unknown, `[cells, 2, units]`.
        self.context = np.zeros((sequence.plan.layout.num_codes, 2, heads.left.shape[1]), np.float32)
        self.unaccepted: dict[int, UnacceptedPosition] = {}  # {position: output}

    def update(self, committed: CommittedTokens) -> None:
        done = len(self.sequence.codes)
        count = len(committed.tokens)
        # First node of each depth from `count` on. Nodes at smaller depths predicted the committed codes.
        unaccepted: list[int] = []
        if committed.draft is not None:
            depths = committed.draft.tree_structure.depths
            unaccepted = [int(np.argmax(depths == depth)) for depth in range(count, int(depths.max()) + 1)]
        codes = range(done - count, done + len(unaccepted))
        # Guided hidden states, [nodes, hidden_size]. State i predicted code `done - count + i`. So the first `count`
        # states predicted committed codes. The others predicted codes after draft tokens that were not accepted.
        states = self.sampler.guidance.mix_logits(committed.read_target_states(unaccepted), codes)
        self.context[done - count : done] = self.heads.compute_context(states[:count])
        self.unaccepted = {}
        for i, (node, gate) in enumerate(zip(unaccepted, self.heads.compute_gates(states[count:]), strict=True)):
            assert committed.draft is not None
            logits = committed.target.guided_logits(node)
            # After a rejected token, the output may be NaN. Then the draft heads predict the logits.
            if np.isfinite(logits.max()) and np.isfinite(gate).all():
                self.unaccepted[done + i] = UnacceptedPosition(int(committed.draft.tokens[node]), logits, gate)

    def draft(self, shape: TreeShape | None) -> DraftTree:
        max_depth = self.sequence.count_codes_until_preserved() - 1  # the target samples one more token than it accepts
        if shape is None:
            return self._draft_chain(min(self.sequence.window, max_depth))
        if isinstance(shape, StaticTreeShape):
            return self._draft_static_tree(shape, max_depth)
        return self._draft_dynamic_tree(shape, max_depth)

    def compute_logits(self, position: int, previous_codes: Ints) -> Floats:
        """Return the guided logits of a position for each possible previous code, float32 `[n, vocab_size]`.

        Args:
            position: index of a code that is not committed yet.
            previous_codes: possible codes at the position before, int64 `[n]`.
        """
        if (unaccepted := self.unaccepted.get(position)) is None:
            return self.heads.predict_logits(
                previous_codes, self.sequence.plan.raster_layout.find_code_index_above(position), self.context
            )
        if len(previous_codes) == 1 and previous_codes[0] == unaccepted.previous_code:
            return unaccepted.logits[None]  # the correction would be 0
        return unaccepted.logits + self.heads.compute_logit_correction(
            unaccepted.gate, unaccepted.previous_code, previous_codes
        )

    def _draft_chain(self, length: int) -> DraftTree:
        codes = self.sequence.codes[-1:]
        first = len(self.sequence.codes)
        levels: list[Floats] = []
        for position in range(first, first + length):
            levels.append(self.compute_logits(position, np.array(codes[-1:])))
            values = self.sampler.score(levels[-1], position, self.sequence.noise)
            if not np.isfinite(values.max()):
                break
            codes.append(int(values.argmax()))

        def compute_proposal(node: int) -> Probabilities:
            return self.sampler.compute_distribution(levels[node][0])

        proposal = no_proposal_distribution if self.sequence.plan.method.exact else compute_proposal
        return make_chain(codes, proposal=proposal)

    def _draft_static_tree(self, shape: StaticTreeShape, max_depth: int) -> DraftTree:
        builder = StaticTreeBuilder(shape, self.sequence.codes[-1])
        first = len(self.sequence.codes)
        levels: list[Floats] = []
        for depth, inner in enumerate(shape.levels[:max_depth]):
            levels.append(self.compute_logits(first + depth, builder.tokens[inner]))  # [nodes of the level, vocab_size]
            children = max(len(shape.children[node]) for node in inner)
            values = self.sampler.score(levels[-1], first + depth, self.sequence.noise)
            builder.add_children(inner, *find_top_codes(values, children))

        def compute_proposal(node: int) -> Probabilities:
            """Compute the distribution from which the children of `node` were sampled."""
            depth, index = shape.find_inner_node(node)
            return self.sampler.compute_distribution(levels[depth][index])

        proposal = no_proposal_distribution if self.sequence.plan.method.exact else compute_proposal
        return builder.build(proposal, self.sampler.greedy)

    def _draft_dynamic_tree(self, shape: DynamicTreeShape, max_depth: int) -> DraftTree:
        builder = DynamicTreeBuilder(self.sequence.codes[-1])
        first = len(self.sequence.codes)
        noise = self.sequence.noise if self.sequence.plan.method.exact else None
        for position in range(first, first + min(shape.depth, max_depth)):
            chosen = builder.choose_best_of_last_level(shape.branching_factor)
            logits = self.compute_logits(position, builder.tokens[chosen])
            values = self.sampler.score(logits, position, noise)
            builder.add_children(chosen, *find_top_codes(values, shape.branching_factor))
        return builder.prune(shape.num_nodes)
