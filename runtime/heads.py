"""Draft heads: small matrix products on the target's hidden states, which draft without a drafter model.

A pass computes logits after every draft token. Where a draft token is replaced, the next logits were computed for
another previous code. `DraftHeads.compute_logit_correction` returns the change for the new code, `((change[new] -
change[old]) * gate(state)) @ correct`, where `state` is the target's hidden state from which the logits were computed.
Positions that no pass has reached have no logits. `DraftHeads.predict_logits` predicts them from the previous code, and
from the target's states that predicted the cell above and the cell after that.

`lantern-rt train-drafter heads` trains both on images that the target generated, towards its guided distributions.
This form is the simplest among the forms that were tried; docs/drafters.md has the figures. Products use `np.einsum`,
which runs loops of NumPy and not BLAS. Threads of BLAS waited for the spinning threads of ONNX Runtime, which took 1 to
3 ms per product instead of at most 0.3 ms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .engine import Floats, Ints


@dataclass(frozen=True)
class DraftHeads:
    """Weights of the draft heads, float32. Training chooses the sizes `rank` and `units`."""

    change: Floats  # `[codes, rank]`, embeddings of the previous code in corrections
    gate: Floats  # `[hidden_size, rank]`
    gate_bias: Floats  # `[rank]`
    correct: Floats  # `[rank, codes]`
    left: Floats  # `[codes, units]`, embeddings of the previous code in predictions
    # `[2, hidden_size, units]`, applied to the states that predicted the cell above and the cell after that
    states: Floats
    output: Floats  # `[units, codes]`
    output_bias: Floats  # `[codes]`

    def compute_gates(self, hidden: Floats) -> Floats:
        """Return the gates of corrections, `[n, rank]`, for guided hidden states `[n, hidden_size]`."""
        return _sigmoid(np.einsum("nh,hr->nr", hidden, self.gate) + self.gate_bias)

    def compute_logit_correction(self, gate: Floats, old_code: int, new_codes: Ints) -> Floats:
        """Return the change in the logits of a position for other previous codes, `[n, codes]`.

        Args:
            gate: gates of the position's hidden state, `[rank]`, or one row for each new code, `[n, rank]`.
            old_code: previous code for which the logits were computed.
            new_codes: new previous codes, int64 `[n]`.
        """
        return np.asarray(np.einsum("nr,rc->nc", (self.change[new_codes] - self.change[old_code]) * gate, self.correct))

    def compute_context(self, hidden: Floats) -> Floats:
        """Return the inputs of predictions in the next row, `[n, 2, units]`, for guided states `[n, hidden_size]`."""
        return np.asarray(np.einsum("nh,shu->nsu", hidden, self.states))

    def predict_logits(self, previous_codes: Ints, cell_above: int, context: Floats) -> Floats:
        """Return predicted guided logits of a cell after each previous code, `[n, codes]`.

        Args:
            previous_codes: previous codes, int64 `[n]`.
            cell_above: index of the cell above, negative in the first row of a grid.
            context: output of `compute_context` for the state that predicted each cell, `[cells, 2, units]`; zeros if
                unknown.
        """
        sums: Floats = self.left[previous_codes]
        if cell_above >= 0:
            # The two weights in `states` were trained for these two cells: above, and the one after it in raster order.
            sums += context[cell_above, 0]
            sums += context[cell_above + 1, 1]
        logits: Floats = np.einsum("nu,uc->nc", sums * _sigmoid(sums), self.output) + self.output_bias
        return logits


def draft_head_shapes(codebook_size: int, hidden_size: int, rank: int, units: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array of `DraftHeads`.

    Args:
        codebook_size: number of codes.
        hidden_size: size of the target's hidden states.
        units: number of hidden units of predictions.
    """
    return {
        "change": (codebook_size, rank),
        "gate": (hidden_size, rank),
        "gate_bias": (rank,),
        "correct": (rank, codebook_size),
        "left": (codebook_size, units),
        "states": (2, hidden_size, units),
        "output": (units, codebook_size),
        "output_bias": (codebook_size,),
    }


def _sigmoid(values: Floats) -> Floats:
    sigmoid: Floats = np.float32(1) / (np.float32(1) + np.exp(-values))
    return sigmoid
