"""Draft trees below the last token of a sequence, and the base of their drafters; chains and windows are trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .acceptance import Acceptance, RelaxationSettings, verify_tree_exact, verify_tree_greedy, verify_tree_relaxed
from .drafting import AcceptedDraft, Drafter, SequenceStep
from .engine import Ints
from .layout import PassLayout
from .raster import MAX_BATCH_NODES
from .state import ImageSequence, LoadedModel
from .target import TargetOutput
from .tree import DraftTree, Proposal, TreeStructure, no_proposal_distribution


@dataclass(eq=False)
class TreeDraft:
    """A tree of draft tokens as a `Draft`, its root the last token of the sequence."""

    sequence: ImageSequence
    tree: DraftTree
    first_code_index: int = field(init=False)  # the code that is sampled after the root
    tokens: Ints = field(init=False)  # tokens of the nodes, int64 `[nodes]`
    tree_structure: TreeStructure = field(init=False)  # depths, children and ancestor mask of the nodes
    next_code_indices: Sequence[int] = field(init=False)  # the code that is sampled after each node

    def __post_init__(self) -> None:
        self.first_code_index = len(self.sequence.codes)
        self.tokens = self.tree.tokens
        self.tree_structure = self.tree.tree_structure
        is_chain = self.tree_structure.is_chain
        self.next_code_indices = (
            range(self.first_code_index, self.first_code_index + len(self.tokens))
            if is_chain
            else (self.first_code_index + self.tree_structure.depths).tolist()
        )

    @property
    def sampled_nodes(self) -> Sequence[int] | None:
        """All nodes; None for relaxed acceptance, which asks for distributions."""
        return None if self.sequence.relaxed else range(len(self.tokens))

    def make_pass_layout(self) -> PassLayout:
        """Return the tokens, positions and ancestor mask of the nodes in a forward pass."""
        return self.sequence.raster_layout.lay_out_tree(self.tree, self.first_code_index - 1)

    def preceding_codes(self, node: int) -> Ints:
        """Return the codes that precede the code sampled after `node`: committed codes, then the path in the tree."""
        path = self.tree.path_to(node)[1:]
        return np.array([*self.sequence.codes[: self.first_code_index], *self.tree.tokens[path].tolist()], np.int64)

    def accept(self, output: TargetOutput, model: LoadedModel) -> AcceptedDraft:
        """Walk down the tree as far as the target accepts, and append the codes of the path and the next code.

        Args:
            output: outputs of the target for the nodes of the tree.
            model: model with the neighbour table.
        """
        sequence = self.sequence
        tree = self.tree
        accepted = self._verify_tree(output, model)
        sequence.statistics.realised_tvd += accepted.realised_tvd
        sequence.record_draft(
            len(self.tokens) - 1 - tree.num_preserved_tokens, len(accepted.path) - 1 - tree.num_preserved_tokens
        )
        tokens = tree.tokens[accepted.path[1:]].tolist()
        path = accepted.path[:-1]  # the last node is the next root
        if accepted.bonus_token is not None:
            path = accepted.path
            tokens.append(accepted.bonus_token)
        codes = np.array(tokens, np.int64)
        step = SequenceStep.append_codes(sequence, codes)
        if sequence.method.method != "ar":
            step = step._replace(tree=tree, acceptance=accepted)
        return AcceptedDraft(step, codes, output.layout.find_path_nodes(path))

    def _verify_tree(self, output: TargetOutput, model: LoadedModel) -> Acceptance:
        tree = self.tree
        remaining = tree.num_preserved_tokens + self.sequence.count_codes_until_preserved(tree.num_preserved_tokens)
        if not self.sequence.relaxed:
            return verify_tree_exact(tree, output.choose_token, remaining)
        relaxation = RelaxationSettings.from_method(self.sequence.method, model.neighbors)
        if self.sequence.greedy:
            return verify_tree_greedy(tree, output.distribution, relaxation, remaining)
        return verify_tree_relaxed(
            tree, output.distribution, output.choose_token, relaxation, output.acceptance_rng, remaining
        )


class TreeDrafter(Drafter):
    """Base of drafters whose drafts are trees; by itself plain decoding's, which drafts nothing.

    Codes that a sequence preserves are no drafts: a run of them stands in one pass, below the last token.

    Args:
        max_nodes: maximum number of nodes of a sequence in a forward pass.

    Attributes:
        needs_new_codes: whether the drafter cannot draft directly after preserved codes, where it drafts nothing.
    """

    needs_new_codes = False

    def __init__(self, max_nodes: int = MAX_BATCH_NODES) -> None:
        self.max_nodes = min(max_nodes, MAX_BATCH_NODES)

    def draft(self, sequences: Sequence[ImageSequence]) -> list[TreeDraft]:
        """Return a draft for every sequence."""
        plain = {
            sequence: make_preserved_chain(sequence, self.max_nodes)
            for sequence in sequences
            if self.needs_new_codes and len(sequence.next_preserved_codes()[0])
        }
        drafting = [sequence for sequence in sequences if sequence not in plain]
        trees = plain | dict(zip(drafting, self.draft_trees(drafting) if drafting else (), strict=True))
        return [TreeDraft(sequence, trees[sequence]) for sequence in sequences]

    def draft_trees(self, sequences: Sequence[ImageSequence]) -> Sequence[DraftTree]:
        """Return a tree below the last token of each of these sequences, which are not empty."""
        return [make_preserved_chain(sequence, self.max_nodes) for sequence in sequences]

    def min_pass_nodes(self, sequence: ImageSequence, num_images: int) -> int:
        """Return the maximum number of nodes of the next draft, see `Drafter.min_pass_nodes`."""
        return sequence.max_nodes


def make_preserved_chain(sequence: ImageSequence, max_nodes: int) -> DraftTree:
    """Return the last token of a sequence and the codes that it preserves next, as many as a pass takes."""
    preserved_codes = () if sequence.preserved_codes is None else next_preserved_tokens(sequence, max_nodes)
    return make_chain([sequence.codes[-1], *preserved_codes])


def next_preserved_tokens(sequence: ImageSequence, max_nodes: int) -> list[int]:
    """Return the codes that a sequence preserves next, as many as a pass takes below their root."""
    return [] if sequence.preserved_codes is None else sequence.next_preserved_codes()[0][: max_nodes - 1].tolist()


def make_chain(
    tokens: Sequence[int], num_preserved_tokens: int | None = None, proposal: Proposal = no_proposal_distribution
) -> DraftTree:
    """Return a tree of tokens one below the other.

    Args:
        tokens: the root first.
        num_preserved_tokens: number of preserved tokens below the root, which are not drafts; None: all.
        proposal: distributions that children were sampled from.
    """
    parents = np.arange(-1, len(tokens) - 1, dtype=np.int64)
    num_preserved_tokens = len(tokens) - 1 if num_preserved_tokens is None else num_preserved_tokens
    return DraftTree(np.array(tokens, np.int64), parents, proposal, num_preserved_tokens=num_preserved_tokens)
