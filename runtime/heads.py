"""What drafts without a drafter: small products on the target's own states.

A draft that a pass left undecided has logits of that pass, made where the code before it, on its left, was still
another. They are corrected by what this change makes of them, `((change[new] - change[old]) * gate(state)) @ correct`,
where the state is the target's own there; no change, no correction. Of a position that no pass has seen there are none
yet: they are guessed from the code to its left, and from the target's states above it and to the right of that.

Both are trained on the target's own pictures, towards its guided distributions (`lantern-rt train-drafter heads`). The
form is the simplest of those that were tried: docs/drafters.md has the figures. Products are made by NumPy's own loops:
threads of a BLAS wait for ONNX Runtime's, which spin; that took 1 to 3 ms a product, instead of 0.3 at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .engine import Floats, Ints


@dataclass(frozen=True)
class DraftHeads:
    """Weights, float32; `rank` and `units` are theirs to choose."""

    change: Floats  # `[codes, rank]`, of the code on the left
    gate: Floats  # `[hidden_size, rank]`
    gate_bias: Floats  # `[rank]`
    correct: Floats  # `[rank, codes]`
    left: Floats  # `[codes, units]`
    # `[2, hidden_size, units]`, of the states that the code above, and the one to its right, were drawn from
    states: Floats
    output: Floats  # `[units, codes]`
    output_bias: Floats  # `[codes]`

    def gates(self, hidden: Floats) -> Floats:
        """How much each change counts, `[n, rank]`, by guided hidden states `[n, hidden_size]`."""
        return _sigmoid(np.einsum("nh,hr->nr", hidden, self.gate) + self.gate_bias)

    def correction(self, gate: Floats, old: int, new: Ints) -> Floats:
        """What to add to logits that were made after `old` where other codes `[n]` stand: `[n, codes]`."""
        return np.asarray(np.einsum("nr,rc->nc", (self.change[new] - self.change[old]) * gate, self.correct))

    def context(self, hidden: Floats) -> Floats:
        """What guided states `[n, hidden_size]` say about the row below, `[n, 2, units]`, to be kept."""
        return np.asarray(np.einsum("nh,shu->nsu", hidden, self.states))

    def predict(self, previous: Ints, above: int, context: Floats) -> Floats:
        """Guessed logits of a code after each of some codes `[n]`: `[n, codes]`.

        above: the cell above, below 0 in the first row. context: `[cells, 2, units]` of the states that codes were
        drawn from, zeros where they are not known.
        """
        sums: Floats = self.left[previous]
        if above >= 0:
            sums += context[above, 0]
            sums += context[above + 1, 1]
        logits: Floats = np.einsum("nu,uc->nc", sums * _sigmoid(sums), self.output) + self.output_bias
        return logits


def head_shapes(codes: int, hidden_size: int, rank: int, units: int) -> dict[str, tuple[int, ...]]:
    """The shape of every array of `DraftHeads`."""
    return {
        "change": (codes, rank),
        "gate": (hidden_size, rank),
        "gate_bias": (rank,),
        "correct": (rank, codes),
        "left": (codes, units),
        "states": (2, hidden_size, units),
        "output": (units, codes),
        "output_bias": (codes,),
    }


def _sigmoid(values: Floats) -> Floats:
    shares: Floats = np.float32(1) / (np.float32(1) + np.exp(-values))
    return shares
