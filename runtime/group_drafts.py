"""Drafts for generation in groups of cells (`groups.py`): every pass generates the next group, without draft tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .drafting import AcceptedDraft, Drafter, SequenceStep
from .engine import Ints
from .groups import GroupLayout
from .state import ImageSequence, LoadedModel
from .target import TargetOutput
from .tree_drafts import make_chain


class GroupDraft:
    """Draft for the next group of cells of one sequence, with one node for each cell and no draft tokens."""

    def __init__(self, sequence: ImageSequence, group_layout: GroupLayout) -> None:
        self.sequence = sequence
        first = self.first_code_index = len(sequence.codes)
        group = group_layout.find_group_index(first)
        self.layout = group_layout.lay_out_groups(range(group, group + 1), sequence.codes)
        self.tokens = self.layout.tokens
        count = len(group_layout.groups[group])
        self.tree_structure = make_chain([0] * count).tree_structure  # a chain, so all tokens are sampled together
        self.next_code_indices: Sequence[int] = range(first, first + count)
        # None if a code is sampled from logits of two nodes, which devices do not support.
        self.sampled_nodes: Sequence[int] | None = range(count) if self.layout.nodes_match_draft else None

    def preceding_codes(self, node: int) -> Ints:
        """Return the codes of all earlier groups, because the codes of a group do not depend on each other."""
        return np.array(self.sequence.codes[: self.first_code_index], np.int64)

    def accept(self, output: TargetOutput, model: LoadedModel) -> AcceptedDraft:
        """Append the sampled codes of the group; preserved cells get their preserved codes."""
        sequence = self.sequence
        known = [-1] * len(self.next_code_indices)
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
