"""Draft trees from an EAGLE drafter, for several sequences at once.

The children of a node are the k tokens with the highest log q + g. Here q is the drafter's distribution, and g is the
Gumbel noise of the position. The target samples with the same noise. So the target chooses the first child wherever
both distributions agree. The k children are also k samples from q without replacement, as relaxed acceptance requires.

A dynamic tree expands the paths with the highest sums of log softmax(log q + g). Given the noise, this sum estimates
how likely the target is to accept the path. With relaxed acceptance or greedy decoding, a dynamic tree uses the most
probable tokens, without noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from ..methods import TreeMethod
from .device import DeviceLogits, SamplingRequest
from .drafting import CommittedTokens
from .eagle_slots import EagleRunner, TreeLevelOutput
from .engine import Floats, Ints
from .sampling import Probabilities, compute_distribution, find_top_codes, make_invalid_logits_error, process_logits
from .state import ImageSequence, LoadedModel
from .statistics import EngineTimer
from .tree import (
    DraftTree,
    DynamicTreeBuilder,
    DynamicTreeShape,
    StaticTreeBuilder,
    StaticTreeShape,
    no_proposal_distribution,
)
from .tree_drafts import TreeDrafter
from .tree_names import parse_tree


class EagleDrafter(TreeDrafter):
    """Drafter that runs an EAGLE model for all sequences with the same method."""

    def __init__(self, model: LoadedModel, method: TreeMethod, timer: EngineTimer) -> None:
        super().__init__(model.max_nodes)
        self.shape = parse_tree(method.tree)
        self.relaxed = not method.exact
        max_slots = self.shape.num_nodes
        if isinstance(self.shape, DynamicTreeShape):  # the drafter also processes nodes that are pruned
            max_slots = max(max_slots, self.shape.depth * self.shape.branching_factor)
        self.slots = EagleRunner(model, max_slots, timer)

    @property
    def sequences(self) -> list[ImageSequence]:
        """Sequences that this drafter drafts for, in the order of their batch rows."""
        return self.slots.sequences

    def store_committed_tokens(self, commits: Sequence[CommittedTokens]) -> None:
        self.slots.store_committed_tokens(commits)

    def remove(self, sequences: Sequence[ImageSequence]) -> None:
        """Delete the slots of these sequences, and the unconditional rows of sequences whose guidance has ended."""
        self.slots.remove(sequences)

    def draft_trees(self, sequences: Sequence[ImageSequence]) -> list[DraftTree]:
        """Run the drafter over its committed tokens, and draft a tree for each of `sequences`."""
        root_tokens = self.slots.root_tokens()
        level = self.slots.run_pending_tokens()
        committed = self.slots.cache.lengths.copy()
        if isinstance(self.shape, StaticTreeShape):
            trees = self._draft_static_trees(self.shape, root_tokens, level)
        else:
            trees = self._draft_dynamic_trees(self.shape, root_tokens, level)
        self.slots.cache.truncate(committed)  # the slots of draft nodes come after the committed slots
        drafted = dict(zip(self.sequences, trees, strict=True))
        for sequence, tree in drafted.items():
            if tree.num_nodes == 1:  # NaN after the root, which is an accepted token; other slots may have NaN
                sequence.error = make_invalid_logits_error()
        return [drafted[sequence] for sequence in sequences]

    def _get_batch_rows_at_depth(self, depth: int) -> list[Ints]:
        """Return, for each sequence, the batch rows whose logits determine the children of nodes at `depth`."""
        return [
            rows[: sequence.plan.guidance.count_batch_rows(len(sequence.codes) + depth)]
            for sequence, rows in zip(self.sequences, self.slots.batch_rows, strict=True)
        ]

    def _choose_children(
        self, level: TreeLevelOutput, depth: int, count: int, add_noise: bool
    ) -> list[tuple[Ints, Floats]]:
        """Return the best children of every slot at `depth`: their tokens and scores, both `[slots, count]`.

        A child has the score -inf (on a device maybe NaN) if a filter excludes it, or if the slot's logits are NaN.
        """
        noises = [
            sequence.noise if add_noise and not sequence.plan.sampling.greedy else None for sequence in self.sequences
        ]
        on_device = level.logits
        if isinstance(on_device, DeviceLogits) and all(
            on_device.supports_sampling(sequence.plan.sampling) for sequence in self.sequences
        ):
            samples = []
            for sequence, rows, noise in zip(self.sequences, self._get_batch_rows_at_depth(depth), noises, strict=True):
                # Children of the root (depth 0) are candidates for the next code. All slots of a level sample the same
                # code index.
                codes = np.full(level.nodes.shape[1], len(sequence.codes) + depth)
                batch_rows = slice(int(rows[0]), int(rows[-1]) + 1)
                scales = sequence.plan.guidance.scales(codes)
                samples.append(
                    SamplingRequest(batch_rows, level.nodes[rows], sequence.plan.sampling, noise, codes, scales)
                )
            best = on_device.sample_top_codes(samples, count)
            if not all(np.isfinite(scores[:, 0]).all() for _, scores in best):
                self.slots.cache.forbid_memory_reuse()  # the slots with NaN stay in the device's memory
            return best
        best = []
        for sequence, rows, noise in zip(self.sequences, self._get_batch_rows_at_depth(depth), noises, strict=True):
            logits = level.logits[rows[:, None], level.nodes[rows]]  # [rows of the sequence, slots, vocab_size]
            code = len(sequence.codes) + depth
            guided = sequence.plan.guidance.mix_logits(logits, [code] * logits.shape[1])
            values = process_logits(guided, sequence.plan.sampling)
            if noise is not None:
                values = values + noise.gumbel(code, 1, values.shape[1])
            best.append(find_top_codes(values, count))
        return best

    def _draft_static_trees(self, shape: StaticTreeShape, root_tokens: Ints, level: TreeLevelOutput) -> list[DraftTree]:
        builders = [StaticTreeBuilder(shape, int(root)) for root in root_tokens]
        levels: list[TreeLevelOutput] = []
        for depth, inner in enumerate(shape.levels):  # nodes that have children
            if depth > 0:
                # The slots of the parents are their indices in `levels[depth - 1]`, which is sorted.
                slots = np.searchsorted(shape.levels[depth - 1], shape.parents[inner])
                # A node without a token is run with token 0. `build` removes this node with its descendants.
                tokens = np.stack([builder.tokens[inner] for builder in builders])  # [sequences, slots]
                level = self.slots.run_draft_tokens(tokens, np.repeat(slots[None], len(root_tokens), 0), depth, level)
            level = self.slots.run_row_end_tokens(level, depth)
            levels.append(level)
            count = max(len(shape.children[node]) for node in inner)
            for builder, best in zip(builders, self._choose_children(level, depth, count, add_noise=True), strict=True):
                builder.add_children(inner, *best)
        trees: list[DraftTree] = []
        rows_by_depth = [self._get_batch_rows_at_depth(depth) for depth in range(len(levels))]
        for i, (sequence, builder) in enumerate(zip(self.sequences, builders, strict=True)):
            rows = [batch_rows[i] for batch_rows in rows_by_depth]  # batch rows of this sequence, by depth
            proposal = (
                partial(_compute_child_distribution, shape, levels, rows, len(sequence.codes), sequence)
                if self.relaxed
                else no_proposal_distribution
            )
            trees.append(builder.build(proposal, sequence.plan.sampling.greedy))
        return trees

    def _draft_dynamic_trees(
        self, shape: DynamicTreeShape, root_tokens: Ints, level: TreeLevelOutput
    ) -> list[DraftTree]:
        builders = [DynamicTreeBuilder(int(root)) for root in root_tokens]
        for depth in range(shape.depth):
            chosen = [builder.choose_best_of_last_level(shape.branching_factor) for builder in builders]
            if depth > 0:
                # All sequences need the same number of slots, so a smaller level repeats its nodes.
                num_slots = max(map(len, chosen))
                if not num_slots:
                    break  # NaN everywhere
                padded = [np.resize(nodes, num_slots) for nodes in chosen]
                # tokens and the slots of the tokens' parents, both [sequences, slots]
                codes = np.stack([builder.tokens[nodes] for builder, nodes in zip(builders, padded, strict=True)])
                parents = np.stack(
                    [builder.slot_of_parent[nodes] for builder, nodes in zip(builders, padded, strict=True)]
                )
                level = self.slots.run_draft_tokens(codes, parents, depth, level)
            level = self.slots.run_row_end_tokens(level, depth)
            best = self._choose_children(level, depth, shape.branching_factor, add_noise=not self.relaxed)
            for builder, nodes, (codes, scores) in zip(builders, chosen, best, strict=True):
                builder.add_children(nodes, codes[: len(nodes)], scores[: len(nodes)])  # without the repeated slots
        return [builder.prune(shape.num_nodes) for builder in builders]


def _compute_child_distribution(
    shape: StaticTreeShape,
    levels: list[TreeLevelOutput],
    rows_by_depth: list[Ints],
    next_code_index: int,
    sequence: ImageSequence,
    node: int,
) -> Probabilities:
    """Compute the drafter's distribution from which the children of a node were sampled.

    `levels` and `rows_by_depth` are the output of the drafter, and the batch rows of the sequence, at each depth.
    """
    depth = len(shape.paths[node - 1]) if node else 0  # `paths` has no entry for the root, node 0
    level = levels[depth]
    rows = rows_by_depth[depth]
    slot = np.searchsorted(shape.levels[depth], node)
    logits: Floats = level.logits[rows, level.nodes[rows, slot]][:, None]  # [rows, 1, vocab_size]
    return compute_distribution(
        sequence.plan.guidance.mix_logits(logits, [next_code_index + depth])[0], sequence.plan.sampling
    )
