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
from .sampler import Sampler
from .sampling import Probabilities, find_top_codes, make_invalid_logits_error
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

    def store_committed_tokens(self, commits: Sequence[CommittedTokens]) -> None:
        self.slots.store_committed_tokens(commits)

    def remove(self, sequences: Sequence[ImageSequence]) -> None:
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
        drafted = dict(zip(self.slots.sequences, trees, strict=True))
        for sequence, tree in drafted.items():
            if tree.num_nodes == 1:  # NaN after the root, which is an accepted token; other slots may have NaN
                sequence.error = make_invalid_logits_error()
        return [drafted[sequence] for sequence in sequences]

    def _choose_children(
        self, level: TreeLevelOutput, depth: int, count: int, add_noise: bool
    ) -> list[tuple[Ints, Floats]]:
        """Return the best children of every slot at `depth`: their tokens and scores, both `[slots, count]`.

        A child has the score -inf (on a device maybe NaN) if a filter excludes it, or if the slot's logits are NaN.
        """
        logits = level.logits
        num_slots = level.nodes.shape[1]
        on_device = isinstance(logits, DeviceLogits) and all(
            logits.supports_sampling(sequence.plan.sampling) for sequence in self.slots.sequences
        )
        best: list[tuple[Ints, Floats]] = []
        requests: list[SamplingRequest] = []
        for sequence, rows in zip(self.slots.sequences, self.slots.batch_rows, strict=True):
            sampler = sequence.plan.sampler
            noise = sequence.noise if add_noise else None
            # Children of the root (depth 0) are candidates for the next code. All slots sample the same code.
            code = len(sequence.codes) + depth
            if on_device:
                requests.append(sampler.make_request(rows, level.nodes[rows], [code] * num_slots, noise))
            else:
                guided = _read_guided_logits(level, rows, slice(None), sampler, code)
                best.append(find_top_codes(sampler.score(guided, code, noise), count))
        if not isinstance(logits, DeviceLogits) or not requests:
            return best
        best = logits.sample_top_codes(requests, count)
        if not all(np.isfinite(scores[:, 0]).all() for _, scores in best):
            self.slots.cache.forbid_memory_reuse()  # the slots with NaN stay in the device's memory
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
        for sequence, rows, builder in zip(self.slots.sequences, self.slots.batch_rows, builders, strict=True):
            sampler = sequence.plan.sampler
            proposal = (
                partial(_compute_child_distribution, shape, levels, rows, sampler, len(sequence.codes))
                if self.relaxed
                else no_proposal_distribution
            )
            trees.append(builder.build(proposal, sampler.greedy))
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


def _read_guided_logits(
    level: TreeLevelOutput, rows: Ints, slots: slice | list[int], sampler: Sampler, code_index: int
) -> Floats:
    """Return the guided logits of a code at some slots of a sequence with these batch rows, `[slots, vocab_size]`."""
    logits: Floats = level.logits[rows[:, None], level.nodes[rows][:, slots]]
    return sampler.guidance.mix_logits(logits, [code_index] * logits.shape[1])


def _compute_child_distribution(
    shape: StaticTreeShape,
    levels: list[TreeLevelOutput],
    rows: Ints,
    sampler: Sampler,
    next_code_index: int,
    node: int,
) -> Probabilities:
    """Compute the drafter's distribution from which the children of a node of one sequence were sampled."""
    depth, slot = shape.find_inner_node(node)
    logits = _read_guided_logits(levels[depth], rows, [slot], sampler, next_code_index + depth)
    return sampler.compute_distribution(logits[0])
