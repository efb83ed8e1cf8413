"""Drawing codes where the logits are: a graph for guidance, temperature, filters, noise and the best codes.

What `runtime/sampling.py` does in NumPy; from the device come a few numbers a node instead of a vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..methods import Sampling
from .contracts import Tensor
from .graph_writer import GraphWriter

FILTERED_OUT = -1e30  # for codes that filters leave out; finite, as not every provider's TopK takes infinity


class SamplingHead(NamedTuple):
    """What a graph is made for. most: codes a node. top_k: 0 for none. top_p: if there is a bound. noisy: if drawn."""

    vocab_size: int
    most: int
    top_k: int
    top_p: bool
    noisy: bool

    @classmethod
    def from_sampling(cls, sampling: Sampling, vocab_size: int, most: int, noisy: bool) -> SamplingHead:
        """The head for these settings; greedy ones know no filters."""
        top_k = sampling.top_k if sampling.filtered and sampling.top_k < vocab_size else 0
        return cls(vocab_size, min(most, vocab_size), top_k, sampling.filtered and sampling.top_p < 1, noisy)

    @staticmethod
    def supports(sampling: Sampling) -> bool:
        """Whether there is a graph for these settings: top-p before top-k and penalties are left to the host."""
        if sampling.penalised:
            return False
        both = sampling.filtered and sampling.top_k > 0 and sampling.top_p < 1
        return not both or sampling.filter_order.startswith("top-k")

    def write(self, graph: GraphWriter) -> tuple[list[Tensor], list[Tensor]]:
        """Write the graph; its inputs and outputs. Of each image's nodes, `[images, nodes]`:

        Inputs: `logits` float32 `[rows, all, vocab_size]`; `conditional` and `unconditional` int32 `[images, nodes]`:
        where their logits are, rows and nodes taken as one, the same without guidance; `cfg_scale`, `temperature`,
        `top_p` float32 `[images, 1, 1]`; `noise` float32 `[groups, any, vocab_size]`, its first axes taken as one;
        `noise_ids` int32 `[images, nodes]`.
        Output: `drawn` float32 `[2, images, nodes, most]`, best first: codes, which float32 holds exactly; and
        logarithms of probabilities after the noise, about `FILTERED_OUT` for what filters leave out.
        """
        flat = graph.op("Reshape", "logits", graph.ints(-1, self.vocab_size))
        unconditional = graph.op("Gather", flat, "unconditional")
        apart = graph.op("Sub", graph.op("Gather", flat, "conditional"), unconditional)
        guided = graph.op("Add", graph.op("Mul", apart, "cfg_scale"), unconditional)
        values = self._filtered(graph, graph.op("Div", guided, "temperature"))
        if self.noisy:
            noise = graph.op("Reshape", "noise", graph.ints(-1, self.vocab_size))
            values = graph.op("Add", values, graph.op("Gather", noise, "noise_ids"))
        best, codes = graph.many("TopK", [values, graph.ints(self.most)], ["best", "codes"])
        highest = graph.op("Slice", best, graph.ints(0), graph.ints(1), graph.ints(-1))
        weights = graph.op("Exp", graph.op("Sub", values, highest))
        sums = graph.op("Log", graph.op("ReduceSum", weights, graph.ints(-1), keepdims=1))
        parts = graph.cast(codes, "float32"), graph.op("Sub", graph.op("Sub", best, highest), sums)
        graph.op("Concat", *(graph.op("Unsqueeze", part, graph.ints(0)) for part in parts), name="drawn", axis=0)
        nodes, scalar = ("images", "nodes"), ("images", 1, 1)
        inputs = [
            Tensor("logits", ("float32",), ("rows", "all", self.vocab_size)),
            *(Tensor(name, ("int32",), nodes) for name in ("conditional", "unconditional")),
            *(Tensor(name, ("float32",), scalar) for name in ("cfg_scale", "temperature", "top_p")[: 2 + self.top_p]),
        ]
        if self.noisy:
            inputs.append(Tensor("noise", ("float32",), ("groups", "positions", self.vocab_size)))
            inputs.append(Tensor("noise_ids", ("int32",), nodes))
        return inputs, [Tensor("drawn", ("float32",), (2, *nodes, self.most))]

    def _filtered(self, graph: GraphWriter, scaled: str) -> str:
        if not (self.top_k or self.top_p):
            return scaled
        kept = self.top_k or self.vocab_size
        ordered, _ = graph.many("TopK", [scaled, graph.ints(kept)], ["ordered", "order"])
        if self.top_p:
            sums = graph.op("CumSum", graph.op("Softmax", ordered, axis=-1), graph.ints(-1))
            within = graph.cast(graph.op("LessOrEqual", sums, "top_p"), "float32")
            count = graph.op("ReduceSum", within, graph.ints(-1), keepdims=1)
            place = graph.op("Min", count, graph.constant(np.array([kept - 1], np.float32)))
            lowest = graph.op("GatherElements", ordered, graph.cast(place, "int64"), axis=-1)
        else:
            lowest = graph.op("Slice", ordered, graph.ints(kept - 1), graph.ints(kept), graph.ints(-1))
        left_out = graph.constant(np.array(FILTERED_OUT, np.float32))
        return graph.op("Where", graph.op("Less", scaled, lowest), left_out, scaled)  # NaN stays, to be refused
