"""The drafter of every method, and the number of nodes of its drafts. A new method has its row in `DRAFTERS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..methods import Ar, Groups, MethodConfig, RowParallel, Sjd, TreeMethod
from .drafting import Drafter
from .eagle import EagleDrafter
from .group_drafts import GroupDrafter
from .head_drafter import HeadDrafter
from .jacobi import JacobiDrafter
from .raster import MAX_BATCH_NODES
from .rows import RowDrafter
from .state import ImageSequence, LoadedModel
from .statistics import Clock
from .tree_drafts import TreeDrafter
from .tree_names import parse_tree


class DraftingRule(NamedTuple):
    """Describes how a method drafts."""

    drafter: Callable[[LoadedModel, Any, Clock], Drafter]  # makes a drafter from model, method, and the drafter's clock
    nodes: Callable[[Any, int], int]  # `count_nodes`


def _make_window_drafter(model: LoadedModel, method: MethodConfig, clock: Clock) -> Drafter:
    return HeadDrafter(model.heads, model.max_nodes) if model.heads else JacobiDrafter(model.max_nodes)


def _make_tree_drafter(model: LoadedModel, method: TreeMethod, clock: Clock) -> Drafter:
    if not method.uses_draft_heads:
        return EagleDrafter(model, method, clock)
    assert model.heads is not None, "requests check that the bundle has draft heads"
    return HeadDrafter(model.heads, model.max_nodes)


# Keys are methods or their base classes.
DRAFTERS: dict[type[MethodConfig], DraftingRule] = {
    Ar: DraftingRule(lambda model, method, clock: TreeDrafter(model.max_nodes), lambda method, limit: 1),
    Sjd: DraftingRule(_make_window_drafter, lambda method, limit: 1 + method.window),
    TreeMethod: DraftingRule(_make_tree_drafter, lambda method, limit: parse_tree(method.tree).nodes),
    RowParallel: DraftingRule(
        lambda model, method, clock: RowDrafter(model.max_nodes), lambda method, limit: min(limit, MAX_BATCH_NODES)
    ),
    Groups: DraftingRule(lambda model, method, clock: GroupDrafter(), lambda method, limit: 1),
}


def _find_drafting_rule(method: MethodConfig) -> DraftingRule:
    drafting = next((DRAFTERS[kind] for kind in type(method).mro() if kind in DRAFTERS), None)
    if drafting is None:
        raise TypeError(f"method {method.method}: add how it drafts to `drafters.DRAFTERS`")
    return drafting


def count_nodes(method: MethodConfig, limit: int = MAX_BATCH_NODES) -> int:
    """Return the number of nodes of a method's draft, the root included.

    Args:
        limit: maximum number of nodes of the engines, which methods whose drafts vary stay within.

    Raises:
        TypeError: the method is unknown. A default would let a new method bypass the limits on nodes.
    """
    return _find_drafting_rule(method).nodes(method, limit)


class BatchDrafters:
    """The drafters of a batch. Sequences of one method share a drafter, but not greedy with sampled sequences.

    Args:
        model: engines and tables.
        clock: clock of drafter passes.

    Attributes:
        with_sequences: drafters, each with its sequences.
    """

    def __init__(self, model: LoadedModel, clock: Clock) -> None:
        self._model = model
        self._clock = clock
        self._drafters: dict[tuple[MethodConfig, bool], tuple[Drafter, list[ImageSequence]]] = {}
        self.with_sequences = self._drafters.values()

    def add(self, sequences: Sequence[ImageSequence]) -> None:
        """Add sequences to the drafters of their methods, and make drafters that are missing."""
        for sequence in sequences:
            key = sequence.method, sequence.greedy
            if key not in self._drafters:
                self._drafters[key] = (
                    _find_drafting_rule(sequence.method).drafter(self._model, sequence.method, self._clock),
                    [],
                )
            self._drafters[key][1].append(sequence)

    def remove(self, sequences: Sequence[ImageSequence]) -> None:
        """Remove sequences, and drafters without sequences."""
        for key, (drafter, drafting) in [*self._drafters.items()]:
            drafter.remove(sequences)
            drafting[:] = [sequence for sequence in drafting if sequence not in sequences]
            if not drafting:
                del self._drafters[key]
