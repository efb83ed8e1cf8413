"""Draft heads: small matrix products on the target's hidden states, which compute drafts without a drafter model.

A target pass computes logits after every draft token. If another code replaces a draft token, the logits after it were
computed for the wrong previous code. `DraftHeads.compute_logit_correction` returns the change of the logits for the new
code, `((change[new] - change[old]) * gate(state)) @ correct`. Here `state` is the target's hidden state from which the
logits were computed. A position that no pass has reached has no logits. `DraftHeads.predict_logits` predicts them from
the previous code, and from the hidden states that predicted the cell above and the cell to the right of the cell above.

`lantern-rt train-drafter heads` trains both functions on images that the target generated, to match the target's guided
distributions. This form is the simplest of several forms that were tried, see benchmarks/NOTES.md.

The products use `np.einsum`, which runs loops of NumPy and not BLAS. BLAS took 1 to 3 ms per product instead of at most
0.3 ms, because the threads of BLAS waited for the spinning threads of ONNX Runtime.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .engine import Floats, Ints


@dataclass(frozen=True)
class DraftHeads:
    """Weights of the draft heads, float32. Training chooses the sizes `rank` and `units`."""

    change: Floats  # embeddings of the previous code for corrections, `[codes, rank]`
    gate: Floats  # weights from a hidden state to the gates of a correction, `[hidden_size, rank]`
    gate_bias: Floats  # bias of the gates, `[rank]`
    correct: Floats  # weights from a gated change of embeddings to a change of logits, `[rank, codes]`
    left: Floats  # embeddings of the previous code for predictions, `[codes, units]`
    # Weights for the hidden states that predicted the cell above, and the cell after the cell above,
    # `[2, hidden_size, units]`.
    states: Floats
    output: Floats  # weights from hidden units to predicted logits, `[units, codes]`
    output_bias: Floats  # bias of the predicted logits, `[codes]`

    def compute_gates(self, hidden: Floats) -> Floats:
        """Return the gates of corrections, `[n, rank]`, for guided hidden states `[n, hidden_size]`."""
        return _sigmoid(np.einsum("nh,hr->nr", hidden, self.gate) + self.gate_bias)

    def compute_logit_correction(self, gate: Floats, old_code: int, new_codes: Ints) -> Floats:
        """Return the change of the logits of a position if the previous code is replaced, `[n, codes]`.

        Args:
            gate: output of `compute_gates` for the state from which the logits were computed, `[rank]`, or for each new
                code, `[n, rank]`.
            old_code: previous code for which the logits were computed.
            new_codes: codes that replace the previous code, int64 `[n]`.
        """
        return np.asarray(np.einsum("nr,rc->nc", (self.change[new_codes] - self.change[old_code]) * gate, self.correct))

    def compute_context(self, hidden: Floats) -> Floats:
        """Return the terms that guided hidden states add to predictions in the next grid row, `[n, 2, units]`.

        The first term is for the cell below, and the second term is for the cell to the left of the cell below.
        """
        return np.asarray(np.einsum("nh,shu->nsu", hidden, self.states))

    def predict_logits(self, previous_codes: Ints, cell_above: int, context: Floats) -> Floats:
        """Return predicted guided logits of a cell for each possible previous code, `[n, codes]`.

        Args:
            previous_codes: possible codes of the previous cell, int64 `[n]`.
            cell_above: index of the cell above, negative in the first row of a grid.
            context: output of `compute_context` for the hidden state that predicted each cell, `[cells, 2, units]`;
                zeros for cells without a known state.
        """
        sums: Floats = self.left[previous_codes]  # [n, units]; indexing makes a copy, so the weights do not change
        if cell_above >= 0:
            # The two weights in `states` were trained for two cells: the cell above, and the next cell in raster order.
            sums += context[cell_above, 0]
            sums += context[cell_above + 1, 1]
        logits: Floats = np.einsum("nu,uc->nc", sums * _sigmoid(sums), self.output) + self.output_bias
        return logits


def draft_head_shapes(codebook_size: int, hidden_size: int, rank: int, units: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array in `DraftHeads`, by field name."""
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
