"""Which settings draw the very same pictures: all that a host may choose among.

The bundle decides the picture. `strict` is any exact method, as all of them draw the pictures of plain decoding;
`balanced` and `fast` are a method each, written into the manifest by `lantern-rt eval --write-presets`.
"""

from __future__ import annotations

from ..bundle.manifest import Manifest
from ..methods import Ar, Eagle, MethodConfig, RowParallel, Sjd
from ..runtime.tree_names import named_tree

WINDOWS = (3, 7, 15, 31)
TREES = ("chain-3", "dynamic-8-4-2", "dynamic-16-6-4", "dynamic-32-6-6")
ROW_DRAFTS = (0, 1, 2, 3)

Ladder = tuple[MethodConfig, ...]


def same_pictures(
    manifest: Manifest, method: MethodConfig, tree_invariant: bool, max_nodes: int
) -> tuple[MethodConfig, tuple[Ladder, ...]]:
    """Settings that draw the pictures of `method`, to be raced.

    Args:
        manifest: of the bundle.
        method: what a quality stands for.
        tree_invariant: whether a token's logits do not depend on the nodes that share its pass: float32 on a CPU, and
            products of integers. Elsewhere other settings may draw other pictures, and there is nothing to race.
        max_nodes: of a pass.

    Returns:
        The baseline, and ladders of rivals, each from the smallest pass to the largest.
    """
    if not tree_invariant:
        return method, ()
    if isinstance(method, RowParallel):
        baseline, *rivals = [method.model_copy(update={"drafts": drafts}) for drafts in ROW_DRAFTS]
        return baseline, (tuple(rivals),)
    if not method.exact:
        return method, ()
    windows = tuple(Sjd(window=window) for window in WINDOWS if window < max_nodes)
    if manifest.drafter is None:
        return Ar(), (windows,)
    trees = tuple(Eagle(tree=tree) for tree in TREES if named_tree(tree).nodes <= max_nodes)
    return Ar(), (windows, trees)
