"""Table of the drafters of all methods, and the drafters of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..methods import Autoregressive, GroupDecoding, MethodConfig, RowParallel, SpeculativeJacobi, TreeMethod
from .drafting import Drafter
from .eagle import EagleDrafter
from .group_drafts import GroupDrafter
from .head_drafter import HeadDrafter
from .jacobi import JacobiDrafter
from .raster import MAX_BATCH_NODES
from .rows import RowParallelDrafter
from .state import ImageSequence, LoadedModel
from .statistics import EngineTimer
from .tree_drafts import TreeDrafter
from .tree_names import parse_tree


class DrafterFactory(NamedTuple):
    """Functions that make the drafter of a method and count the nodes of its drafts."""

    # Makes a drafter from the model, the method, and the timer of drafter passes.
    make_drafter: Callable[[LoadedModel, Any, EngineTimer], Drafter]
    # Returns the number of nodes of a draft from the method and the engines' maximum number of nodes.
    count_draft_nodes: Callable[[Any, int], int]


def _make_window_drafter(model: LoadedModel, method: MethodConfig, timer: EngineTimer) -> Drafter:
    return HeadDrafter(model.heads, model.max_nodes, None) if model.heads else JacobiDrafter(model.max_nodes)


def _make_tree_drafter(model: LoadedModel, method: TreeMethod, timer: EngineTimer) -> Drafter:
    if not method.uses_draft_heads:
        return EagleDrafter(model, method, timer)
    assert model.heads is not None, "requests check that the bundle has draft heads"
    return HeadDrafter(model.heads, model.max_nodes, parse_tree(method.tree))


# Keys are method classes or their base classes; the most specific class counts.
DRAFTERS: dict[type[MethodConfig], DrafterFactory] = {
    Autoregressive: DrafterFactory(
        lambda model, method, timer: TreeDrafter(model.max_nodes), lambda method, max_nodes: 1
    ),
    SpeculativeJacobi: DrafterFactory(_make_window_drafter, lambda method, max_nodes: 1 + method.window),
    TreeMethod: DrafterFactory(_make_tree_drafter, lambda method, max_nodes: parse_tree(method.tree).num_nodes),
    RowParallel: DrafterFactory(
        lambda model, method, timer: RowParallelDrafter(model.max_nodes),
        lambda method, max_nodes: min(max_nodes, MAX_BATCH_NODES),
    ),
    GroupDecoding: DrafterFactory(lambda model, method, timer: GroupDrafter(), lambda method, max_nodes: 1),
}


def _find_drafter_factory(method: MethodConfig) -> DrafterFactory:
    drafting = next((DRAFTERS[kind] for kind in type(method).mro() if kind in DRAFTERS), None)
    if drafting is None:
        raise TypeError(f"method {method.method}: call `register_method`")
    return drafting


def count_draft_nodes(method: MethodConfig, max_nodes: int = MAX_BATCH_NODES) -> int:
    """Return the number of nodes of a method's draft, the root included.

    Args:
        max_nodes: maximum number of nodes that the engines allow, which methods without a fixed draft size use.

    Raises:
        TypeError: the method has no entry in `DRAFTERS`. A default number would let a method bypass node limits.
    """
    return _find_drafter_factory(method).count_draft_nodes(method, max_nodes)


class BatchDrafters:
    """Drafters of the sequences of a batch, one for each method; greedy and sampled sequences have separate ones."""

    def __init__(self, model: LoadedModel, timer: EngineTimer) -> None:
        self._model = model
        self._timer = timer
        self._drafters: dict[tuple[MethodConfig, bool], tuple[Drafter, list[ImageSequence]]] = {}
        self.drafters_with_sequences = self._drafters.values()

    def add(self, sequences: Sequence[ImageSequence]) -> None:
        for sequence in sequences:
            method = sequence.plan.method
            key = method, sequence.plan.sampling.greedy
            if key not in self._drafters:
                drafter = _find_drafter_factory(method).make_drafter(self._model, method, self._timer)
                self._drafters[key] = drafter, []
            self._drafters[key][1].append(sequence)

    def remove(self, sequences: Sequence[ImageSequence]) -> None:
        """Remove sequences from their drafters, and delete drafters that have no sequences left."""
        # All drafters get the call: a drafter also drops the batch rows of sequences whose guidance ended.
        for key, (drafter, drafting) in [*self._drafters.items()]:
            drafter.remove(sequences)
            drafting[:] = [sequence for sequence in drafting if sequence not in sequences]
            if not drafting:
                del self._drafters[key]
