"""Graph that samples tokens on a device: guidance, temperature, filters, noise, and the tokens of highest score.

The graph computes the same as `runtime/sampler.py`. With the graph, only a few numbers per node are copied to the host,
instead of all logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..methods import Sampling
from .contracts import Array, TensorSpec
from .graph_writer import GraphWriter, choose_column_part_shape

MAX_SETTINGS = 3  # maximum number of sampling settings that are inputs of a graph
FILTERED_OUT = -1e30  # score of excluded tokens; finite, as TopK of some providers does not accept infinity


class SamplingHead(NamedTuple):
    """Settings of a sampling graph."""

    vocab_size: int
    num_best: int  # number of tokens of highest score to return per node
    top_k: int  # maximum number of tokens to sample from; 0: no limit
    has_top_p: bool  # whether top-p limits the tokens to sample from
    has_min_p: bool  # whether min-p limits the tokens to sample from
    add_noise: bool  # whether Gumbel noise is added to the logits; False: sampling is greedy

    @classmethod
    def from_sampling(cls, sampling: Sampling, vocab_size: int, num_best: int, add_noise: bool) -> SamplingHead:
        """Return the settings of the sampling graph for a request; greedy sampling omits filters."""
        num_best = min(num_best, vocab_size)
        if sampling.greedy:
            return cls(vocab_size, num_best, 0, False, False, add_noise)
        top_k = sampling.top_k if sampling.top_k < vocab_size else 0
        return cls(vocab_size, num_best, top_k, sampling.top_p < 1, bool(sampling.min_p), add_noise)

    @staticmethod
    def supports(sampling: Sampling) -> bool:
        """Return whether a graph can sample with these settings.

        Repetition penalties, filters of users, and top-p before top-k, are computed on the host instead.
        """
        if sampling.has_repetition_penalty or sampling.own_settings:
            return False
        has_two_filters = not sampling.greedy and sampling.top_k > 0 and sampling.top_p < 1
        return not has_two_filters or sampling.filter_order.startswith("top-k")

    @property
    def setting_names(self) -> list[str]:
        """Sampling settings that are inputs of the graph."""
        return ["temperature", *["top_p"] * self.has_top_p, *["min_p"] * self.has_min_p]

    def make_setting_inputs(self, settings: Sequence[Sampling]) -> dict[str, Array]:
        """Return the sampling settings of the images as inputs, float32 `[images, 1, 1]` each."""
        # The temperature 0 of greedy sampling becomes 1, as the graph divides by it.
        numbers = {name: [getattr(each, name) or 1.0 for each in settings] for name in self.setting_names}
        return {name: np.array(values, np.float32)[:, None, None] for name, values in numbers.items()}

    def write_graph(self, graph: GraphWriter) -> tuple[list[TensorSpec], list[TensorSpec]]:
        """Write the graph and return its inputs and outputs.

        The inputs are:
            logits: logits of a pass, float32 `[rows, all, vocab_size]`; `all` is the number of nodes with padding.
            conditional, unconditional: indices of the logits of each node in the flattened axes `rows` and `all`, int32
                `[images, nodes]`. Without guidance, both inputs are equal.
            cfg_scale: guidance scales, float32 `[images, nodes, 1]`.
            temperature, top_p, min_p: sampling settings, float32 `[images, 1, 1]`.
            noise: noise table, float32 `[groups, positions, parts, part]`. A position of a group has a number for each
                token, divided into parts as `choose_column_part_shape` says.
            noise_ids: index of the noise of each node in the flattened axes `groups` and `positions`, int32
                `[images, nodes]`.

        The output `drawn` is float32 `[2, images, nodes, num_best]`, with the token of highest score first. `drawn[0]`
        are tokens, which float32 represents exactly. `drawn[1]` are scores: log-probabilities after adding noise. The
        score of an excluded token is about `FILTERED_OUT`.
        """
        flat = graph.op("Reshape", "logits", graph.int_vector(-1, self.vocab_size))
        unconditional = graph.op("Gather", flat, "unconditional")
        difference = graph.op("Sub", graph.op("Gather", flat, "conditional"), unconditional)
        guided = graph.op("Add", graph.op("Mul", difference, "cfg_scale"), unconditional)
        values = self._write_logit_filters(graph, graph.op("Div", guided, "temperature"))
        if self.add_noise:
            noise = graph.op("Reshape", "noise", graph.int_vector(-1, self.vocab_size))
            values = graph.op("Add", values, graph.op("Gather", noise, "noise_ids"))
        best, codes = graph.add_node("TopK", [values, graph.int_vector(self.num_best)], ["best", "codes"])
        # Scores are a log-softmax. Subtracting the highest value first prevents an overflow of Exp.
        highest = graph.op("Slice", best, graph.int_vector(0), graph.int_vector(1), graph.int_vector(-1))
        weights = graph.op("Exp", graph.op("Sub", values, highest))
        sums = graph.op("Log", graph.op("ReduceSum", weights, graph.int_vector(-1), keepdims=1))
        parts = graph.cast(codes, "float32"), graph.op("Sub", graph.op("Sub", best, highest), sums)
        graph.op("Concat", *(graph.op("Unsqueeze", part, graph.int_vector(0)) for part in parts), name="drawn", axis=0)
        nodes = ("images", "nodes")
        scalar = ("images", 1, 1)
        inputs = [
            TensorSpec("logits", ("float32",), ("rows", "all", self.vocab_size)),
            *(TensorSpec(name, ("int32",), nodes) for name in ("conditional", "unconditional")),
            TensorSpec("cfg_scale", ("float32",), (*nodes, 1)),
            *(TensorSpec(name, ("float32",), scalar) for name in self.setting_names),
        ]
        if self.add_noise:
            inputs.append(
                TensorSpec("noise", ("float32",), ("groups", "positions", *choose_column_part_shape(self.vocab_size)))
            )
            inputs.append(TensorSpec("noise_ids", ("int32",), nodes))
        return inputs, [TensorSpec("drawn", ("float32",), (2, *nodes, self.num_best))]

    def _write_logit_filters(self, graph: GraphWriter, scaled_logits: str) -> str:
        thresholds: list[str] = []
        if self.top_k or self.has_top_p:
            thresholds.append(self._write_top_threshold(graph, scaled_logits))
        if self.has_min_p:
            highest = graph.op("ReduceMax", scaled_logits, graph.int_vector(-1), keepdims=1)
            thresholds.append(graph.op("Add", highest, graph.op("Log", "min_p")))
        values = scaled_logits
        filtered_out = graph.add_constant(np.array(FILTERED_OUT, np.float32))
        for lowest in thresholds:
            # A NaN is not less than `lowest`. It therefore stays in the output, where the host detects it.
            values = graph.op("Where", graph.op("Less", scaled_logits, lowest), filtered_out, values)
        return values

    def _write_top_threshold(self, graph: GraphWriter, scaled_logits: str) -> str:
        """Write the smallest logit that top-k and top-p include."""
        num_tokens = self.top_k or self.vocab_size
        ordered, _ = graph.add_node("TopK", [scaled_logits, graph.int_vector(num_tokens)], ["ordered", "order"])
        if not self.has_top_p:
            return graph.op(
                "Slice", ordered, graph.int_vector(num_tokens - 1), graph.int_vector(num_tokens), graph.int_vector(-1)
            )
        sums = graph.op("CumSum", graph.op("Softmax", ordered, axis=-1), graph.int_vector(-1))
        within = graph.cast(graph.op("LessOrEqual", sums, "top_p"), "float32")
        count = graph.op("ReduceSum", within, graph.int_vector(-1), keepdims=1)
        # The token at index `count` is the first whose cumulative probability exceeds top-p. It is kept.
        last = graph.op("Min", count, graph.add_constant(np.array([num_tokens - 1], np.float32)))
        return graph.op("GatherElements", ordered, graph.cast(last, "int64"), axis=-1)
