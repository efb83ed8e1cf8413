"""Drafts that are trees, and the base class of their drafters. A chain or window is a tree without branches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .acceptance import Acceptance, RelaxationSettings, verify_tree_exact, verify_tree_greedy, verify_tree_relaxed
from .drafting import AcceptedDraft, Drafter, SequenceStep
from .engine import Ints
from .raster import MAX_BATCH_NODES
from .state import ImageSequence, LoadedModel
from .target import TargetOutput
from .tree import DraftTree, Proposal, no_proposal_distribution


class TreeDraft:
    """Draft of one sequence that is a tree of draft tokens; the root is the last token of the sequence."""

    def __init__(self, sequence: ImageSequence, tree: DraftTree) -> None:
        self.sequence = sequence
        self.tree = tree
        self.tokens = tree.tokens
        self.tree_structure = tree.tree_structure
        self.first_code_index = len(sequence.codes)  # index of the code that is sampled after the root
        self.next_code_indices: Sequence[int] = (self.first_code_index + self.tree_structure.depths).tolist()
        # Relaxed acceptance needs distributions, and exact acceptance only tokens.
        self.sampled_nodes = None if sequence.plan.method.relaxed else range(len(self.tokens))
        if not sequence.codes:  # a prefill, whose root stands for the last token of the prefix
            self.layout = sequence.plan.layout.lay_out_prefix_end()
        else:
            self.layout = sequence.plan.raster_layout.lay_out_tree(tree, self.first_code_index - 1)
            preserved, _ = sequence.next_preserved_codes()
            count = tree.num_preserved_tokens
            expected = [sequence.codes[-1], *preserved[:count].tolist()]
            assert tree.tokens[: 1 + count].tolist() == expected, (
                "a draft begins with the last token and, if it has preserved tokens, the next preserved codes"
            )
            assert count or not len(preserved), "without the next preserved codes, a pass would commit nothing"

    def preceding_codes(self, node: int) -> Ints:
        """Return the codes that precede the code sampled after `node`: committed codes, then the path in the tree."""
        path = self.tree.path_to(node)[1:]  # the root is already among the committed codes
        return np.array([*self.sequence.codes[: self.first_code_index], *self.tree.tokens[path].tolist()], np.int64)

    def accept(self, output: TargetOutput, model: LoadedModel) -> AcceptedDraft:
        sequence = self.sequence
        tree = self.tree
        accepted = self._verify_tree(output, model)
        sequence.statistics.realised_tvd += accepted.realised_tvd
        # The root and preserved tokens are not drafts.
        sequence.record_draft(
            len(self.tokens) - 1 - tree.num_preserved_tokens, len(accepted.path) - 1 - tree.num_preserved_tokens
        )
        tokens = tree.tokens[accepted.path[1:]].tolist()
        # Without a bonus token, the last accepted node is the next root. The next pass caches the keys of its root.
        path = accepted.path[:-1]
        if accepted.bonus_token is not None:
            path = accepted.path
            tokens.append(accepted.bonus_token)
        codes = np.array(tokens, np.int64)
        step = SequenceStep.append_codes(sequence, codes)
        if sequence.plan.method.drafts_tokens:
            step = step._replace(tree=tree, acceptance=accepted)
        return AcceptedDraft(step, codes, self.layout.find_path_nodes(path))

    def _verify_tree(self, output: TargetOutput, model: LoadedModel) -> Acceptance:
        tree = self.tree
        remaining = tree.num_preserved_tokens + self.sequence.count_codes_until_preserved(tree.num_preserved_tokens)
        plan = self.sequence.plan
        if not plan.method.relaxed:
            return verify_tree_exact(tree, output.choose_token, remaining)
        relaxation = RelaxationSettings.from_method(plan.method, model.neighbors)
        if plan.sampler.greedy:
            return verify_tree_greedy(tree, output.distribution, relaxation, remaining)
        return verify_tree_relaxed(
            tree, output.distribution, output.choose_token, relaxation, output.acceptance_rng, remaining
        )


class TreeDrafter(Drafter):
    """Base class of drafters whose drafts are trees, and the drafter of autoregressive decoding (no draft tokens).

    Override `draft_tree`, or `draft_trees` to draft for all sequences at once. Drafts are compared with the target's
    own samples, so the image of an exact method does not depend on what is drafted. Preserved codes need no
    verification. One pass commits consecutive preserved codes as a chain below the last token.

    Args:
        max_nodes: maximum number of nodes of a sequence in a forward pass.

    Attributes:
        needs_new_codes: whether the drafter can draft after generated codes, but not after preserved codes. If True, a
            draft contains preserved codes or draft tokens, never both. If False, the drafter's trees begin with the
            preserved codes that come next.
    """

    needs_new_codes = True

    def __init__(self, max_nodes: int = MAX_BATCH_NODES) -> None:
        self.max_nodes = min(max_nodes, MAX_BATCH_NODES)

    def draft(self, sequences: Sequence[ImageSequence]) -> list[TreeDraft]:
        without_drafts = {
            sequence: make_preserved_chain(sequence, self.max_nodes)
            for sequence in sequences
            if self.needs_new_codes and len(sequence.next_preserved_codes()[0])
        }
        drafting = [sequence for sequence in sequences if sequence not in without_drafts]
        trees = without_drafts | dict(zip(drafting, self.draft_trees(drafting) if drafting else (), strict=True))
        return [TreeDraft(sequence, trees[sequence]) for sequence in sequences]

    def draft_trees(self, sequences: Sequence[ImageSequence]) -> Sequence[DraftTree]:
        """Return a draft tree for each of these sequences; the root is the last token of the sequence.

        A tree has at most `sequence.max_nodes` nodes. `sequences` have at least one committed code, and are not empty.
        """
        return [self.draft_tree(sequence) for sequence in sequences]

    def draft_tree(self, sequence: ImageSequence) -> DraftTree:
        """Return a draft tree for one sequence; here it is the root alone."""
        return make_chain(sequence.codes[-1:])

    def count_min_nodes_per_pass(self, sequence: ImageSequence, num_images: int) -> int:
        """Return the number of nodes of the largest draft of a sequence, which may depend on the number of images.

        Smaller passes are padded to this number, so that passes have few different shapes.
        """
        sequence.adapt_window(num_images)
        return sequence.max_nodes


def make_preserved_chain(sequence: ImageSequence, max_nodes: int) -> DraftTree:
    preserved_tokens = next_preserved_tokens(sequence, max_nodes)
    return make_chain([sequence.codes[-1], *preserved_tokens], len(preserved_tokens))


def next_preserved_tokens(sequence: ImageSequence, max_nodes: int) -> list[int]:
    """Return the next preserved codes of a sequence, at most `max_nodes` - 1 because the root is a node, too."""
    tokens: list[int] = sequence.next_preserved_codes()[0][: max_nodes - 1].tolist()
    return tokens


def make_chain(
    tokens: Sequence[int], num_preserved_tokens: int = 0, proposal: Proposal = no_proposal_distribution
) -> DraftTree:
    """Return a draft tree without branches.

    Args:
        tokens: tokens from the root down.
        num_preserved_tokens: number of preserved tokens directly below the root, which are not verified.
        proposal: function from a node to the distribution from which its child was sampled, see `DraftTree`.
    """
    parents = np.arange(-1, len(tokens) - 1, dtype=np.int64)
    return DraftTree(np.array(tokens, np.int64), parents, proposal, num_preserved_tokens=num_preserved_tokens)
