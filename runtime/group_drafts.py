"""Drafts for generation in groups of cells (`groups.py`): every pass generates the next group, without draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .drafting import AcceptedDraft, Drafter, SequenceStep
from .engine import Ints
from .groups import GroupLayout
from .layout import PassLayout
from .state import ImageSequence, LoadedModel
from .target import TargetOutput
from .tree import TreeStructure
from .tree_drafts import make_chain


@dataclass(eq=False)
class GroupDraft:
    """Draft for the next group of cells of one sequence, with one node for each cell and no draft tokens."""

    sequence: ImageSequence
    group_layout: GroupLayout
    first_code_index: int = field(init=False)  # number of codes before the group
    tokens: Ints = field(init=False)  # tokens of the pass nodes
    tree_structure: TreeStructure = field(init=False)  # a chain, so that all tokens are sampled together

    def __post_init__(self) -> None:
        self.first_code_index = len(self.sequence.codes)
        group = self.group_layout.find_group_index(self.first_code_index)
        self._layout = self.group_layout.lay_out_groups(range(group, group + 1), self.sequence.codes)
        self.tokens = self._layout.tokens
        self.tree_structure = make_chain([0] * len(self.group_layout.groups[group])).tree_structure

    @property
    def next_code_indices(self) -> Sequence[int]:
        return range(self.first_code_index, self.first_code_index + len(self.tree_structure.depths))

    @property
    def sampled_nodes(self) -> Sequence[int] | None:
        """All nodes; None if a code is sampled from logits of two nodes, which devices do not support."""
        return range(len(self.tree_structure.depths)) if self._layout.nodes_match_draft else None

    def make_pass_layout(self) -> PassLayout:
        return self._layout

    def preceding_codes(self, node: int) -> Ints:
        """Return the codes of all earlier groups, because the codes of a group do not depend on each other."""
        return np.array(self.sequence.codes[: self.first_code_index], np.int64)

    def accept(self, output: TargetOutput, model: LoadedModel) -> AcceptedDraft:
        """Append the sampled codes of the group; preserved cells get their preserved codes."""
        sequence = self.sequence
        known = [-1] * len(self.tree_structure.depths)
        if sequence.preserved_codes is not None:
            known = sequence.preserved_codes[self.first_code_index :][: len(known)].tolist()
        codes = np.array([output.choose_token(node) if code < 0 else code for node, code in enumerate(known)], np.int64)
        sequence.record_draft(len(codes) - 1, len(codes) - 1)
        return AcceptedDraft(SequenceStep.append_codes(sequence, codes), codes, np.arange(len(self.tokens)))


class GroupDrafter(Drafter):
    """Drafter of images that are generated in groups of cells; this drafter has no state."""

    def draft(self, sequences: Sequence[ImageSequence]) -> list[GroupDraft]:
        drafts = []
        for sequence in sequences:
            assert isinstance(sequence.plan.layout, GroupLayout), "requests check that the bundle generates groups"
            drafts.append(GroupDraft(sequence, sequence.plan.layout))
        return drafts
