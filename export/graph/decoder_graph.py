"""The target and drafter graphs, op by op: what `Decoder.forward` computes, in the fewest ops that runtimes fuse.

Written by hand rather than traced because these graphs run hundreds of times an image: reshapes need no shape
arithmetic, query weights carry the attention scale where it is a power of two, and the order of transposes is the
one that ONNX Runtime folds into its matrix products, so that the past is read where it lies.

With products of integers (`Ops.integers`), a difference in the last bit of what is rounded to 8 bits becomes one in the
first three digits. So nothing may depend on how nodes share passes: all sums over columns are sums of integers that
float32 holds, exact in any order, and attention draws on values that are multiples of a power of two.

Past tensors may be empty as far as ONNX goes, but ONNX Runtime 1.31 divides by zero in the fused product on an empty
past: an engine on it feeds at least one column and hides it with the mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...engines.graph_writer import HEAD_EPSILON, DecoderWriter
from ..checkpoints.deferred import computed, deferred
from ..models.decoder import LayerStack
from .onnx_ops import LARGEST_NODE, Ops

_EXACT = 24  # bits of integers that float32 holds, and sums of them must keep to
_SHARES, _VALUES = 4096, 2047  # attention's weights are in units of 1 / 4096, values up to 2047 of their own units
_MOST_NODES = 128  # of a pass, beside the positions of an image
_LEAST_WEIGHT = 70.0  # in nats below the largest


class PastFirstWriter(DecoderWriter):
    """The layout of CPUs: embeddings, mask and past go in, new keys and values come out.

    Args:
        ops: what is written to.
        stack: a target or drafter.
    """

    graph: Ops

    def __init__(self, ops: Ops, stack: LayerStack) -> None:
        config = stack.config
        super().__init__(
            ops,
            stack.state_dict(),
            "float16" if ops.half else "float32",
            config.num_heads,
            config.num_heads // config.num_kv_heads,
        )
        self.config, self.rope = config, stack.rope
        self.columns = config.positions + _MOST_NODES  # past and nodes, at the most
        self.scale = config.head_dim**-0.5  # softmax(q k / sqrt(head_dim))
        # A power of two goes into the query weights without rounding them; where queries are normed, the root goes into
        # the norm; any other is a multiplication of its own.
        self.folds = not config.query_key_norm and math.log2(self.scale).is_integer()

    def write(self, x: str) -> None:
        """All outputs, of what goes into the first layer `[rows, nodes, hidden_size]`."""
        ops = self.graph
        self.cos, self.sin, swap = self.rotation()
        past = ops.op("Shape", "past_key_values.0.key", start=0, end=1)
        nodes = ops.op("Shape", "position_ids", start=1, end=2)
        self.mask = self.for_groups("attention_mask")  # [rows, 1, group * nodes, past + nodes]
        self.swap = ops.weight("rotary.swap", swap)
        self.past_and_new = ops.op("Concat", past, nodes, axis=0)
        self.decoder(x, self.config.num_layers)

    def product(self, x: str, weight: str, output: str | None) -> str:
        return self.graph.linear(x, weight, self.scaled(weight), output)

    def weight(self, name: str) -> str:
        return self.graph.weight(name, self.scaled(name))

    def scaled(self, name: str) -> Tensor:
        """A weight or bias; those of queries times `scale`, if that goes into them."""
        own, config = self.weights[name], self.config
        if not (self.folds and ".qkv." in name):
            return own  # type: ignore[no-any-return]
        factors = torch.tensor([self.scale] * config.num_heads + [1.0] * 2 * config.num_kv_heads)
        rows = factors.repeat_interleave(config.head_dim).view(-1, *[1] * (own.ndim - 1))
        return deferred(lambda: computed(own).float() * rows, own.shape, torch.float32)

    def norm(self, x: str, added: str | None, weight: str, name: str | None) -> tuple[str, str]:
        x = x if added is None else self.graph.op("Add", x, added)
        return x, write_rms_norm(self.graph, x, weight, self.weights[weight], self.config.norm_eps, name)

    def gelu(self, x: str) -> str:
        ops = self.graph
        root, one, half = (ops.number(*n) for n in (("root_half", 0.5**0.5), ("one", 1.0), ("half", 0.5)))
        erf = ops.op("Add", ops.op("Erf", ops.op("Mul", x, root)), one)
        return ops.op("Mul", ops.op("Mul", x, erf), half)  # x / 2 * (1 + erf(x / sqrt(2)))

    def rotation(self) -> tuple[str, str, Tensor]:
        """Two halves of the rotation `[rows, nodes, 1, head_dim]`, and a matrix that swaps the numbers of a pair.

        Cosines have each number twice; so have sines, negative at the first number of a pair.
        """
        ops, rope = self.graph, self.rope
        width = 2 * rope.shape[1]
        halves = self.config.rope_style == "half"
        order = torch.arange(width).view(2, -1).t() if halves else torch.arange(width).view(-1, 2)  # [pairs, 2]
        place = order.flatten().argsort()  # where each number stands in `order`
        pairs, sign = order.flip(1).flatten()[place], torch.tensor([-1.0, 1.0]).repeat(width // 2)[place]
        tables = {"cos": rope[:, place // 2, 0], "sin": rope[:, place // 2, 1] * sign}
        cos, sin = (
            ops.op("Unsqueeze", ops.op("Gather", ops.weight(f"rotary.{part}", table), "position_ids"), ops.ints(2))
            for part, table in tables.items()
        )
        return cos, sin, torch.eye(width)[pairs]

    def rotated(self, joint: str, at: str) -> tuple[str, str, str]:
        """As `DecoderWriter`, each `[rows, nodes, heads or num_kv_heads, head_dim]`."""
        ops, config = self.graph, self.config
        heads, num_kv_heads = config.num_heads, config.num_kv_heads
        joint = ops.reshape(joint, 0, 0, heads + 2 * num_kv_heads, config.head_dim)
        sizes = ops.ints(heads + num_kv_heads, num_kv_heads)
        both, value = ops.many("Split", [joint, sizes], [f"{at}.query_key", f"{at}.value"], axis=2)
        if self.exact(at):
            value = self.multiples(value, at)
        if config.query_key_norm:
            both = self.head_norms(both, f"{at}.attention")
        swapped = ops.op("MatMul", both, self.swap)
        both = ops.op("Add", ops.op("Mul", both, self.cos), ops.op("Mul", swapped, self.sin))
        query, key = ops.many("Split", [both, ops.ints(heads, num_kv_heads)], [f"{at}.query", f"{at}.key"], axis=2)
        return query, key, value

    def exact(self, at: str) -> bool:
        """Whether a layer's sums over columns are exact; drafters only propose: any sum will do."""
        return self.graph.integers and f"{at}.attention_norm.weight" in self.weights

    def head_norms(self, x: str, at: str) -> str:
        """Each head of queries (then times `scale`) and keys `[rows, nodes, heads + num_kv_heads, width]`."""
        ops, x = self.graph, self.graph.wide_value(x)
        centred = ops.op("Sub", x, ops.op("ReduceMean", x, ops.ints(-1), keepdims=1))
        y = ops.op("Div", centred, _write_rms(ops, centred, HEAD_EPSILON))
        y = ops.cast(y, "float32") if ops.integers else y
        for op, part in (("Mul", "weight"), ("Add", "bias")):
            query, key = (self.weights[f"{at}.{own}_norm.{part}"].float() for own in ("query", "key"))
            numbers = torch.cat([query * self.scale, key])
            y = ops.op(op, y, ops.weight(f"{at}.head_norm.{part}", numbers, wide=True))
        return self.narrow(y)

    def attend(self, query: str, key: str, value: str, at: str) -> str:
        ops, width, num_kv_heads = self.graph, self.config.head_dim, self.config.num_kv_heads
        cache = at.replace("layers", "key_values")
        new_key = ops.transpose(key, 1, 0, 2, 3, name=f"new_{cache}.key")  # [nodes, rows, num_kv_heads, width]
        new_value = ops.transpose(value, 1, 0, 2, 3, name=f"new_{cache}.value")
        past_key, past_value = f"past_{cache}.key", f"past_{cache}.value"

        if not self.folds and not self.config.query_key_norm:
            query = ops.op("Mul", query, ops.number("attention_scale", self.scale))
        query = ops.transpose(query, 0, 2, 1, 3)  # [rows, heads, nodes, width]
        if self.group > 1:  # queries of one group share a key head: stack them along the nodes
            query = ops.reshape(query, 0, num_kv_heads, -1, width)
        scores = [ops.op("MatMul", query, ops.transpose(k, 1, 2, 3, 0)) for k in (past_key, new_key)]
        seen = ops.op("Add", ops.op("Concat", *scores, axis=-1), self.mask)
        shares = _write_shares(ops, seen, self.columns) if self.exact(at) else _write_softmax(ops, seen)
        parts = ops.many("Split", [shares, self.past_and_new], [f"{at}.on_past", f"{at}.on_new"], axis=-1)
        values = zip(parts, (past_value, new_value), strict=True)
        mixed = ops.op("Add", *(ops.op("MatMul", part, ops.transpose(v, 1, 2, 0, 3)) for part, v in values))
        if self.exact(at):  # [rows, num_kv_heads, group * nodes, width]
            mixed = ops.op("Mul", mixed, ops.number("share", 1 / _SHARES))
        if self.group > 1:
            nodes = ops.op("Shape", "position_ids", start=1, end=2)
            shape = ops.op("Concat", ops.ints(0, self.heads), nodes, ops.ints(width), axis=0)
            mixed = ops.op("Reshape", mixed, shape)
        return ops.reshape(ops.transpose(mixed, 0, 2, 1, 3), 0, 0, self.heads * width)

    def multiples(self, value: str, at: str) -> str:
        """Values `[rows, nodes, num_kv_heads, width]`, rounded to multiples of powers of two, at most 2047 times these.

        The power of each follows from the longest vector that the norm before it gives, and the bias, so that no value
        lies beyond; what rounding adds to that is cut off.
        """
        ops, shape = self.graph, (self.config.num_kv_heads, self.config.head_dim)
        most = min(_VALUES, (2**_EXACT - 1) // (_SHARES + self.columns // 2))
        projection, norm = self.weights[f"{at}.attention.qkv.weight"], self.weights[f"{at}.attention_norm.weight"]
        bias = self.weights.get(f"{at}.attention.qkv.bias", torch.zeros(1))

        def units() -> Tensor:
            rows = computed(projection)[-math.prod(shape) :].float()
            longest = rows.shape[1] ** 0.5 * torch.linalg.vector_norm(rows * computed(norm), dim=1)
            longest += computed(bias)[-len(rows) :].float().abs()
            return torch.exp2(torch.ceil(torch.log2(longest.clamp(1e-30) / most))).view(shape)

        unit = ops.weight(f"{at}.value_units", deferred(units, shape, torch.float32))
        limits = (ops.number("least_value", -float(most)), ops.number("most_value", float(most)))
        return ops.op("Mul", ops.op("Clip", ops.op("Round", ops.op("Div", value, unit)), *limits), unit)


def write_rms_norm(ops: Ops, x: str, name: str, weight: Tensor, eps: float, output: str | None = None) -> str:
    """x / rms(x), scaled by the weight of that name; output: name of the result."""
    x, cast = ops.wide_value(x), ops.half or ops.integers
    normed, scale = ops.op("Div", x, _write_rms(ops, x, eps)), ops.wide_weight(name, weight)
    scaled = ops.op("Mul", normed, scale, name=None if cast else output)
    scaled = ops.cast(scaled, "float16" if ops.half else "float32", output) if cast else scaled
    if ops.integers:  # no number is larger than the root of as many, times its weight
        ops.steps[scaled] = computed(weight).float().abs().max() * len(weight) ** 0.5 / LARGEST_NODE
    return scaled


def _write_rms(ops: Ops, x: str, eps: float) -> str:
    square = ops.op("Pow", x, ops.wide_weight("two", torch.tensor(2.0)))
    mean = ops.op("ReduceMean", square, ops.ints(-1), keepdims=1)
    return ops.op("Sqrt", ops.op("Add", mean, ops.wide_weight(f"eps_{eps}", torch.tensor(eps))))


def _write_softmax(ops: Ops, scores: str) -> str:
    """Softmax over the last axis in which nothing weighs less than e^-70 of the largest, hidden columns included.

    That is nothing to a sum in float32. But numbers below 1e-38, and what makes them, cost a processor a hundred times
    as much: passes of `scenes` with 8 nodes took 30 % longer (measured here).
    """
    largest = ops.op("ReduceMax", scores, ops.ints(-1), keepdims=1)
    least = ops.op("Sub", largest, ops.number("least_weight", _LEAST_WEIGHT))
    return ops.op("Softmax", ops.op("Max", scores, least), axis=-1)


def _write_shares(ops: Ops, scores: str, columns: int) -> str:
    """Softmax over the last axis in units of 1 / 4096: whole numbers, whose sums with values float32 holds exactly.

    Numerators are whole as well, as large as sums over all columns allow, so that the denominator is exact.
    """
    finest = float(2 ** (_EXACT - math.ceil(math.log2(columns))))
    largest = ops.op("ReduceMax", scores, ops.ints(-1), keepdims=1)
    shifted = ops.op("Sub", scores, ops.op("Sub", largest, ops.number("log_finest", math.log(finest))))
    numerators = ops.op("Round", ops.op("Exp", ops.op("Max", shifted, ops.number("no_share", -1.0))))
    total = ops.op("ReduceSum", numerators, ops.ints(-1), keepdims=1)
    return ops.op("Round", ops.op("Mul", numerators, ops.op("Div", ops.number("shares", float(_SHARES)), total)))
