"""Exact acceptance: a draft is accepted if and only if it is the target's choice.

The target's choice after a node is a function of its distribution there and of the noise of the position, see
`noise.py`; so are all choices of plain decoding. Whatever was drafted, a walk therefore ends on the tokens that plain
decoding gives: a draft decides how many passes it takes, never what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .sampling import Probabilities
from .tree import DraftTree


class Acceptance(NamedTuple):
    """Outcome of one walk.

    path: accepted nodes, the root first. bonus: the token drawn after them. realised_tvd: total variation distance that
    relaxed acceptance gave away, see `relaxation.py`. remainder: the distribution that it drew the bonus from, None
    where the bonus is the target's choice. relaxed: nodes of the path that the exact rule would have refused.
    """

    path: list[int]
    bonus: int
    realised_tvd: float = 0.0
    remainder: Probabilities | None = None
    relaxed: Sequence[int] = ()


def follow(tree: DraftTree, choice: Callable[[int], int]) -> Acceptance:
    """Walk down the tree for as long as the target's `choice(node)` is among the children of the node."""
    path, children = [0], tree.structure.children
    while True:
        token = choice(path[-1])
        for child in children[path[-1]]:
            if tree.tokens[child] == token:
                path.append(child)
                break
        else:
            return Acceptance(path, token)
