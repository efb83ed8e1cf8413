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
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ...engines.graph_writer import DecoderWriter
from ..checkpoints.deferred import computed, deferred
from ..models.decoder import Attention, DeepHead, Layer, LayerStack, RMSNorm
from .onnx_ops import Ops

_EXACT = 24  # bits of integers that float32 holds, and sums of them must keep to
_SHARES, _VALUES = 4096, 2047  # attention's weights are in units of 1 / 4096, values up to 2047 of their own units
_MOST_NODES = 128  # of a pass, beside the positions of an image
_LEAST_WEIGHT = 70.0  # in nats below the largest


class _Shared(NamedTuple):
    """Values that all layers read: the two halves of the rotation, the mask, and how to part past from new."""

    cos: str  # [rows, nodes, 1, head_dim], each number twice
    sin: str  # the same, negative at the first number of each pair
    swap: str  # [head_dim, head_dim]: exchanges the two numbers of each pair
    mask: str  # [rows, 1, group * nodes, past + nodes]
    sizes: str  # int64 [2]: past, nodes
    columns: int  # past and nodes, at the most


class PastFirstWriter(DecoderWriter):
    """The layout of CPUs: embeddings, mask and past go in, new keys and values come out.

    Args:
        ops: what is written to.
        stack: a target or drafter whose weights have the names of the graph's.
    """

    def __init__(self, ops: Ops, stack: LayerStack) -> None:
        super().__init__(ops, ops.half)
        self.ops, self.stack = ops, stack

    def write(self, x: str) -> None:
        """All outputs, of what goes into the first layer `[rows, nodes, hidden_size]`."""
        config = self.stack.config
        first = cast(Layer, self.stack.layers[0]).attention
        self.shared = _write_shared(self.ops, self.stack.rope, first, config.positions + _MOST_NODES)
        self.head(self.layers(x, config.num_layers), deep=isinstance(self.stack.head, DeepHead))

    def linear(self, x: str, name: str, output: str | None = None) -> str:
        linear = cast(nn.Linear, self.stack.get_submodule(name))
        return self.ops.linear(x, name, linear.weight, linear.bias, output)

    def normed(self, x: str, added: str | None, weight: str, name: str | None = None) -> tuple[str, str]:
        x = x if added is None else self.ops.op("Add", x, added)
        prefix = weight.removesuffix(".weight")
        norm = dict(self.stack.named_modules()).get(prefix)
        if isinstance(norm, RMSNorm):
            return x, write_rms_norm(self.ops, x, prefix, norm.weight, norm.eps, name)
        return x, x if name is None else self.ops.op("Identity", x, name=name)

    def gelu(self, x: str) -> str:
        ops = self.ops
        root, one, half = (ops.number(*n) for n in (("root_half", 0.5**0.5), ("one", 1.0), ("half", 0.5)))
        erf = ops.op("Add", ops.op("Erf", ops.op("Mul", x, root)), one)
        return ops.op("Mul", ops.op("Mul", x, erf), half)  # x / 2 * (1 + erf(x / sqrt(2)))

    def attention(self, x: str, at: str) -> str:
        return _write_attention(self, x, at, cast(Layer, self.stack.get_submodule(at)))


def write_rms_norm(ops: Ops, x: str, prefix: str, weight: Tensor, eps: float, name: str | None = None) -> str:
    """x / rms(x), scaled, in float32."""
    if ops.half:
        x = ops.cast(x, "float32")
    normed, scale = ops.op("Div", x, _write_rms(ops, x, eps)), ops.weight(prefix + ".weight", weight, wide=True)
    if ops.half:
        return ops.cast(ops.op("Mul", normed, scale), "float16", name)
    return ops.op("Mul", normed, scale, name=name)


def _write_rms(ops: Ops, x: str, eps: float) -> str:
    square = ops.op("Pow", x, ops.number("two", 2.0, wide=True))
    mean = ops.op("ReduceMean", square, ops.ints(-1), keepdims=1)
    return ops.op("Sqrt", ops.op("Add", mean, ops.number(f"eps_{eps}", eps, wide=True)))


def _write_head_norms(writer: PastFirstWriter, x: str, prefix: str, attention: Attention, scale: float) -> str:
    """Each head of queries (then times `scale`) and keys `[rows, nodes, heads + num_kv_heads, width]`, in float32."""
    ops, query, key = writer.ops, attention.query_norm, attention.key_norm
    x = writer.wide(x)
    centred = ops.op("Sub", x, ops.op("ReduceMean", x, ops.ints(-1), keepdims=1))
    normed = ops.op("Div", centred, _write_rms(ops, centred, key.eps))
    weight = torch.cat([query.weight.float() * scale, key.weight.float()])
    bias = torch.cat([query.bias.float() * scale, key.bias.float()])
    scaled = ops.op("Mul", normed, ops.weight(prefix + ".weight", weight, wide=True))
    return writer.narrow(ops.op("Add", scaled, ops.weight(prefix + ".bias", bias, wide=True)))


def _write_shared(ops: Ops, rope: Tensor, attention: Attention, columns: int) -> _Shared:
    width = 2 * rope.shape[1]
    halves = attention.rope_style == "half"
    order = torch.arange(width).view(2, -1).t() if halves else torch.arange(width).view(-1, 2)  # [pairs, 2]
    place = order.flatten().argsort()  # where each number stands in `order`
    pairs, sign = order.flip(1).flatten()[place], torch.tensor([-1.0, 1.0]).repeat(width // 2)[place]
    tables = {"cos": rope[:, place // 2, 0], "sin": rope[:, place // 2, 1] * sign}
    group = attention.num_heads // attention.num_kv_heads
    cos, sin = (
        ops.op("Unsqueeze", ops.op("Gather", ops.weight(f"rotary.{part}", table), "position_ids"), ops.ints(2))
        for part, table in tables.items()
    )
    past = ops.op("Shape", "past_key_values.0.key", start=0, end=1)
    nodes = ops.op("Shape", "position_ids", start=1, end=2)
    mask = ops.op("Tile", "attention_mask", ops.ints(1, 1, group, 1)) if group > 1 else "attention_mask"
    swap = ops.weight("rotary.swap", torch.eye(width)[pairs])
    return _Shared(cos, sin, swap, mask, ops.op("Concat", past, nodes, axis=0), columns)


def _write_attention(writer: PastFirstWriter, x: str, at: str, layer: Layer) -> str:
    ops, shared, attention = writer.ops, writer.shared, layer.attention
    heads, num_kv_heads, width = attention.num_heads, attention.num_kv_heads, attention.head_dim
    scale = width**-0.5  # softmax(q k / sqrt(width)); where queries are normed, the root goes into the norm
    # A power of two goes into the query weights without rounding them; any other is a multiplication of its own.
    folds = not attention.normed and math.log2(scale).is_integer()
    weight = attention.qkv.weight
    if folds:
        factors = torch.tensor([scale] * heads + [1.0] * 2 * num_kv_heads).repeat_interleave(width)[:, None]
        weight = deferred(lambda: computed(attention.qkv.weight).float() * factors, weight.shape, torch.float32)
    joint = ops.reshape(ops.linear(x, f"{at}.attention.qkv", weight), 0, 0, heads + 2 * num_kv_heads, width)
    sizes = ops.ints(heads + num_kv_heads, num_kv_heads)
    rotated, value = ops.many("Split", [joint, sizes], [f"{at}.query_key", f"{at}.value"], axis=2)
    if exact := ops.integers and isinstance(layer.attention_norm, RMSNorm):  # drafters only propose: any sum will do
        value = _write_multiples(ops, value, f"{at}.value_units", layer, shared.columns)
    if attention.normed:  # the root goes into the norm
        rotated = _write_head_norms(writer, rotated, f"{at}.attention.head_norm", attention, width**-0.5)
    swapped = ops.op("MatMul", rotated, shared.swap)
    rotated = ops.op("Add", ops.op("Mul", rotated, shared.cos), ops.op("Mul", swapped, shared.sin))
    query, key = ops.many("Split", [rotated, ops.ints(heads, num_kv_heads)], [f"{at}.query", f"{at}.key"], axis=2)
    cache = at.replace("layers", "key_values")
    new_key = ops.transpose(key, 1, 0, 2, 3, name=f"new_{cache}.key")  # [nodes, rows, num_kv_heads, width]
    new_value = ops.transpose(value, 1, 0, 2, 3, name=f"new_{cache}.value")
    past_key, past_value = f"past_{cache}.key", f"past_{cache}.value"

    if not folds and not attention.normed:
        query = ops.op("Mul", query, ops.number("attention_scale", scale))
    query = ops.transpose(query, 0, 2, 1, 3)  # [rows, heads, nodes, width]
    if heads > num_kv_heads:  # queries of one group share a key head: stack them along the nodes
        query = ops.reshape(query, 0, num_kv_heads, -1, width)
    scores = [ops.op("MatMul", query, ops.transpose(k, 1, 2, 3, 0)) for k in (past_key, new_key)]
    seen = ops.op("Add", ops.op("Concat", *scores, axis=-1), shared.mask)
    weights = _write_shares(ops, seen, shared.columns) if exact else _write_softmax(ops, seen)
    parts = ops.many("Split", [weights, shared.sizes], [f"{at}.on_past", f"{at}.on_new"], axis=-1)
    values = zip(parts, (past_value, new_value), strict=True)
    mixed = [ops.op("MatMul", part, ops.transpose(v, 1, 2, 0, 3)) for part, v in values]
    together = ops.op("Add", *mixed)  # [rows, num_kv_heads, group * nodes, width]
    if exact:
        together = ops.op("Mul", together, ops.number("share", 1 / _SHARES))
    if heads > num_kv_heads:
        nodes = ops.op("Shape", "position_ids", start=1, end=2)
        shape = ops.op("Concat", ops.ints(0, heads), nodes, ops.ints(width), axis=0)
        together = ops.op("Reshape", together, shape)
    joined = ops.reshape(ops.transpose(together, 0, 2, 1, 3), 0, 0, heads * width)
    return writer.linear(joined, f"{at}.attention.out")


def _write_multiples(ops: Ops, value: str, name: str, layer: Layer, columns: int) -> str:
    """Values `[rows, nodes, num_kv_heads, width]`, rounded to multiples of powers of two, at most 2047 times these.

    The power of each follows from the longest vector that the norm before it gives, so that no value lies beyond; what
    rounding adds to that is cut off.
    """
    attention, most = layer.attention, min(_VALUES, (2**_EXACT - 1) // (_SHARES + columns // 2))

    def units() -> Tensor:
        rows = computed(attention.qkv.weight)[-attention.num_kv_heads * attention.head_dim :].float()
        norm = cast(RMSNorm, layer.attention_norm).weight
        longest = rows.shape[1] ** 0.5 * torch.linalg.vector_norm(rows * computed(norm), dim=1)
        return torch.exp2(torch.ceil(torch.log2(longest.clamp(1e-30) / most))).view(shape)

    shape = (attention.num_kv_heads, attention.head_dim)
    unit = ops.weight(name, deferred(units, shape, torch.float32))
    limits = (ops.number("least_value", -float(most)), ops.number("most_value", float(most)))
    return ops.op("Mul", ops.op("Clip", ops.op("Round", ops.op("Div", value, unit)), *limits), unit)


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
