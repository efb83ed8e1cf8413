"""Writer of the target and drafter graphs, which compute `Decoder.forward` in few ops that runtimes can fuse.

These graphs run hundreds of times per image, so they are written op by op instead of traced. Reshapes need no shape
arithmetic. Query weights include the attention scale if it is a power of two. ONNX Runtime folds the transposes into
its matrix products, so that past keys and values are not copied.

With int8 matmul (`ExportGraphWriter.int8_matmul`), activations are rounded to 8 bits. Rounding turns a difference in
the last bit into a difference in the first three digits. So the result of a node must not depend on the other nodes of
its forward pass. Attention weights and values are rounded to multiples of fixed steps, which float32 adds without
rounding, in any sequence. Products of queries and keys are always added in the same sequence (`_write_query_slices`).

ONNX allows an empty past, but ONNX Runtime 1.31 divides by zero in the fused product over an empty past. So engines
pass at least one past column, which the attention mask hides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ...engines.graph_writer import DecoderGraphWriter
from ..checkpoints.deferred import compute_deferred_tensor, defer_tensor
from ..models.decoder import LayerStack
from .onnx_ops import MAX_INT8_ACTIVATION, ExportGraphWriter

_ORDERED_SUM = 128  # number of products that ONNX Runtime's MatMul adds in a fixed sequence for any number of columns
_EXACT_BITS = 24  # float32 represents all integers of this many bits, so sums of fewer bits are exact
_WEIGHT_STEPS = 4096  # attention weights are multiples of 1 / 4096
_VALUE_STEPS = 2047  # maximum absolute value, in steps of the value's channel
_MAX_NODES = 128  # maximum number of nodes in a forward pass, in addition to the positions of an image
_MAX_LOG_GAP = 70.0  # maximum difference in nats between the largest and another attention weight


class CPUDecoderWriter(DecoderGraphWriter):
    """Writer of decoder graphs in the layout for CPUs.

    Past keys and values are inputs. The new ones are outputs, which the engine adds to the KV cache.
    """

    graph: ExportGraphWriter
    weights: Mapping[str, Tensor]

    def __init__(self, ops: ExportGraphWriter, stack: LayerStack) -> None:
        config = stack.config
        super().__init__(ops, stack.make_spec(), stack.state_dict(), "float16" if ops.is_float16 else "float32")
        self.config = config
        self.stack = stack
        self.columns = config.max_sequence_length + _MAX_NODES  # maximum number of past columns and nodes together
        self.scale = config.head_dim**-0.5  # attention scale of softmax(q k / sqrt(head_dim))
        self.folds_scale = config.attention_scale == 1 and not config.query_key_norm

    def write_graph(self, embeddings: str) -> None:
        ops = self.graph
        x = ops.transpose(embeddings, 1, 0, 2)  # [nodes, rows, hidden_size], as in the cache
        self.position_ids = ops.transpose("position_ids", 1, 0)
        self.rotation = None if self.config.rotary == "learned" else self._write_rotary_lookup()
        past = ops.op("Shape", "past_key_values.0.key", start=0, end=1)
        nodes = ops.op("Shape", "position_ids", start=1, end=2)
        self.mask = self.write_tiled_mask("attention_mask")  # [rows, 1, group * nodes, past + nodes]
        self.past_and_new = ops.op("Concat", past, nodes, axis=0)
        self.write_decoder(x)

    def write_sum_and_norm(
        self, x: str, addend: str | None, weight: str | None, name: str | None = None
    ) -> tuple[str, str]:
        if name is not None:  # this is the last norm; outputs of the graph have batch rows as first axis
            total = x if addend is None else self.graph.op("Add", x, addend)
            x = self.graph.transpose(total, 1, 0, 2, name=name if weight is None else None)
            return (x, x) if weight is None else self.write_norm(x, None, weight, name)
        return super().write_sum_and_norm(x, addend, weight, name)

    def write_matmul(self, x: str, weight: str, output: str | None) -> str:
        return self.graph.write_linear(x, weight, self._scale_weight(weight), output)

    def write_weight(self, name: str) -> str:
        return self.graph.add_weight(name, self._scale_weight(name))

    def _scale_weight(self, name: str) -> Tensor:
        weight = self.weights[name]
        config = self.config
        if not (self.folds_scale and ".qkv." in name):
            return weight
        factors = torch.tensor([self.scale] * config.num_heads + [1.0] * 2 * config.num_kv_heads)
        rows = factors.repeat_interleave(config.head_dim).view(-1, *[1] * (weight.ndim - 1))
        return defer_tensor(lambda: compute_deferred_tensor(weight).float() * rows, weight.shape, torch.float32)

    def write_norm(self, x: str, addend: str | None, weight: str, name: str | None) -> tuple[str, str]:
        x = x if addend is None else self.graph.op("Add", x, addend)
        return x, write_rms_norm(self.graph, x, weight, self.weights[weight], self.config.norm_eps, name)

    def write_layer_norm(self, x: str) -> str:
        y = _write_normalization(self.graph, self.graph.cast_for_norm(x), self.config.norm_eps, centred=True)
        return self.to_dtype(self.graph.cast(y, "float32") if self.graph.int8_matmul else y)

    def write_gelu(self, x: str) -> str:
        ops = self.graph
        root = ops.add_number("root_half", 0.5**0.5)
        unit = ops.add_number("one", 1.0)
        half = ops.add_number("half", 0.5)
        erf = ops.op("Add", ops.op("Erf", ops.op("Mul", x, root)), unit)
        return ops.op("Mul", ops.op("Mul", x, erf), half)  # x / 2 * (1 + erf(x / sqrt(2)))

    def _write_rotary_lookup(self) -> tuple[str, str, str]:
        """Write the look-up of rotary tables by position.

        A pair (a, b) is rotated to (a cos - b sin, b cos + a sin). The graph computes this as `pair * cos +
        swapped_pair * sin`, so the sine of the first number of a pair is stored with the opposite sign. Returns cosines
        and sines, `[nodes, rows, 1, head_dim]`, and the matrix that swaps the numbers of each pair.
        """
        ops = self.graph
        rope = self.stack.rope
        width = 2 * rope.shape[1]
        halves = self.config.rope_style == "half"
        order = torch.arange(width).view(2, -1).t() if halves else torch.arange(width).view(-1, 2)  # [pairs, 2]
        index = order.flatten().argsort()  # index of each number in `order`
        partner = order.flip(1).flatten()[index]
        sign = torch.tensor([-1.0, 1.0]).repeat(width // 2)[index]
        tables = {"cos": rope[:, index // 2, 0], "sin": rope[:, index // 2, 1] * sign}

        def look_up_rotary_tables(rows: str) -> list[str]:
            gathered = (
                ops.op("Gather", ops.add_weight(f"rotary.{part}", table), rows) for part, table in tables.items()
            )
            return [ops.op("Unsqueeze", numbers, ops.int_vector(2)) for numbers in gathered]

        swap = ops.add_weight("rotary.swap", torch.eye(width)[partner])
        if self.config.rotary != "grids":
            cos, sin = look_up_rotary_tables(self.position_ids)
            return cos, sin, swap
        # With two grids, a position also encodes a shift, by which it is moved back (`LayerStack.look_up_positions`).
        shift = ops.op("Div", self.position_ids, ops.int_vector(len(rope)))
        cos, sin = look_up_rotary_tables(
            ops.op("Sub", self.position_ids, ops.op("Mul", shift, ops.int_vector(len(rope))))
        )
        back_cos, back_sin = look_up_rotary_tables(shift)
        moved_cos = ops.op("Add", ops.op("Mul", cos, back_cos), ops.op("Mul", sin, back_sin))
        moved_sin = ops.op("Sub", ops.op("Mul", sin, back_cos), ops.op("Mul", cos, back_sin))
        return moved_cos, moved_sin, swap

    def split_and_rotate_qkv(self, qkv: str, layer_name: str) -> tuple[str, str, str]:
        ops = self.graph
        config = self.config
        heads = config.num_heads
        num_kv_heads = config.num_kv_heads
        qkv = ops.reshape(qkv, 0, 0, heads + 2 * num_kv_heads, config.head_dim)
        sizes = ops.int_vector(heads + num_kv_heads, num_kv_heads)
        new_key, new_value = (f"new_{layer_name.replace('layers', 'key_values')}.{part}" for part in ("key", "value"))
        exact = self._needs_exact_sums(layer_name)
        outputs = [f"{layer_name}.query_key", f"{layer_name}.value" if exact else new_value]
        both, value = ops.add_node("Split", [qkv, sizes], outputs, axis=2)
        if exact:
            value = self._write_rounded_values(value, layer_name, new_value)
        if config.query_key_norm:
            both = self._write_query_key_norms(both, f"{layer_name}.attention")
        if self.rotation is not None:
            cos, sin, swap = self.rotation
            swapped = ops.op("MatMul", both, swap)
            both = ops.op("Add", ops.op("Mul", both, cos), ops.op("Mul", swapped, sin))
        query, key = ops.add_node(
            "Split", [both, ops.int_vector(heads, num_kv_heads)], [f"{layer_name}.query", new_key], axis=2
        )
        return query, key, value

    def _needs_exact_sums(self, layer_name: str) -> bool:
        """A drafter's sums over cache columns need not be exact, because a drafter only proposes tokens."""
        has_norm = f"{layer_name}.attention_norm.weight" in self.weights or self.config.conditions > 0
        return self.graph.int8_matmul and has_norm

    def _write_query_key_norms(self, x: str, layer_name: str) -> str:
        ops = self.graph
        rms = self.config.rms_head_norm
        assert self.architecture.head_norm_eps is not None
        y = _write_normalization(ops, ops.cast_for_norm(x), self.architecture.head_norm_eps, centred=not rms)
        y = ops.cast(y, "float32") if ops.int8_matmul else y
        for op, part in (("Mul", "weight"), ("Add", "bias"))[: 1 if rms else 2]:
            query, key = (self.weights[f"{layer_name}.{kind}_norm.{part}"].float() for kind in ("query", "key"))
            numbers = torch.cat([query * self.scale, key])
            y = ops.op(op, y, ops.add_weight(f"{layer_name}.head_norm.{part}", numbers, keep_float32=True))
        return self.to_dtype(y)

    def write_attention(self, query: str, key: str, value: str, layer_name: str) -> str:
        ops = self.graph
        width = self.config.head_dim
        num_kv_heads = self.config.num_kv_heads
        exact = self._needs_exact_sums(layer_name)
        cache = layer_name.replace("layers", "key_values")
        past_key = f"past_{cache}.key"
        past_value = f"past_{cache}.value"

        if self.config.attention_scale != 1:
            query = ops.op("Mul", query, ops.add_number("attention_scale", self.config.attention_scale))
        query = ops.transpose(query, 1, 2, 0, 3)  # [rows, heads, nodes, width]
        if self.kv_group_size > 1:  # queries that share a key head are stacked along the nodes, so keys are not copied
            query = ops.reshape(query, 0, num_kv_heads, -1, width)
        scores = self.mask
        for part in self._write_query_slices(query) if exact else [query]:
            products = [ops.op("MatMul", part, ops.transpose(k, 1, 2, 3, 0)) for k in (past_key, key)]
            scores = ops.op("Add", ops.op("Concat", *products, axis=-1), scores)
        weights = _write_fixed_point_softmax(ops, scores, self.columns) if exact else _write_softmax(ops, scores)
        parts = ops.add_node(
            "Split", [weights, self.past_and_new], [f"{layer_name}.on_past", f"{layer_name}.on_new"], axis=-1
        )
        values = zip(parts, (past_value, value), strict=True)
        mixed = ops.op("Add", *(ops.op("MatMul", part, ops.transpose(v, 1, 2, 0, 3)) for part, v in values))
        if exact:  # [rows, num_kv_heads, group * nodes, width]
            mixed = ops.op("Mul", mixed, ops.add_number("share", 1 / _WEIGHT_STEPS))
        if self.kv_group_size > 1:
            nodes = ops.op("Shape", "position_ids", start=1, end=2)
            shape = ops.op("Concat", ops.int_vector(0, self.num_heads), nodes, ops.int_vector(width), axis=0)
            mixed = ops.op("Reshape", mixed, shape)
        return ops.reshape(ops.transpose(mixed, 2, 0, 1, 3), 0, 0, self.num_heads * width)

    def _write_query_slices(self, query: str) -> list[str]:
        """Write copies of queries with at most `_ORDERED_SUM` nonzero numbers; the sum of all copies is the query.

        ONNX Runtime cuts longer sums into pieces at a multiple of `_ORDERED_SUM` and rounds the sum of each piece. The
        cuts depend on the number of columns and threads. A copy is zero on one side of every cut, and zeros do not
        change a sum. So scores have the same bits for every head width, sequence length and number of batch rows.
        """
        part_of = torch.arange(self.config.head_dim) // _ORDERED_SUM
        parts = range(int(part_of[-1]) + 1)
        if len(parts) == 1:
            return [query]
        ops = self.graph
        return [ops.op("Mul", query, ops.add_weight(f"query_part_{i}", (part_of == i).float())) for i in parts]

    def _write_rounded_values(self, value: str, layer_name: str, name: str) -> str:
        """Write the rounding of values `[nodes, rows, num_kv_heads, width]` to multiples of a step for each channel.

        Every sum of values weighted by attention must be exact in float32. A step is a power of two, and a value has at
        most `max_steps` steps. The step follows from the largest value that a normalised input and the bias can give.
        If rounding makes a value larger, the value is clipped. Rounded attention weights add up to at most
        `_WEIGHT_STEPS`, plus half a step for each column. So the sums stay below `2**_EXACT_BITS`.
        """
        ops = self.graph
        shape = (self.config.num_kv_heads, self.config.head_dim)
        max_steps = min(_VALUE_STEPS, (2**_EXACT_BITS - 1) // (_WEIGHT_STEPS + self.columns // 2))
        projection = self.weights[f"{layer_name}.attention.qkv.weight"]
        bias = self.weights.get(f"{layer_name}.attention.qkv.bias", torch.zeros(1))

        def compute_value_units() -> Tensor:
            rows = compute_deferred_tensor(projection)[-math.prod(shape) :].float()
            largest = self.stack.bound_projection(layer_name, rows)
            largest += compute_deferred_tensor(bias)[-len(rows) :].float().abs()
            return torch.exp2(torch.ceil(torch.log2(largest.clamp(1e-30) / max_steps))).view(shape)

        step = ops.add_weight(f"{layer_name}.value_units", defer_tensor(compute_value_units, shape, torch.float32))
        limits = (ops.add_number("least_value", -float(max_steps)), ops.add_number("most_value", float(max_steps)))
        return ops.op("Mul", ops.op("Clip", ops.op("Round", ops.op("Div", value, step)), *limits), step, name=name)


def write_rms_norm(
    ops: ExportGraphWriter, x: str, name: str, weight: Tensor, eps: float, output_name: str | None = None
) -> str:
    """Write an RMS norm: `x / sqrt(mean(x ** 2) + eps) * weight`."""
    cast = ops.is_float16 or ops.int8_matmul
    x = ops.cast_for_norm(x)
    normed = _write_normalization(ops, x, eps)
    scale = ops.add_norm_weight(name, weight)
    scaled = ops.op("Mul", normed, scale, name=None if cast else output_name)
    scaled = ops.cast(scaled, "float16" if ops.is_float16 else "float32", output_name) if cast else scaled
    if ops.int8_matmul:  # a normalised number is at most sqrt(width) times its weight, which gives a fixed step
        ops.steps[scaled] = (
            compute_deferred_tensor(weight).float().abs().max() * len(weight) ** 0.5 / MAX_INT8_ACTIVATION
        )
    return scaled


def _write_normalization(ops: ExportGraphWriter, x: str, eps: float, centred: bool = False) -> str:
    """Write the division of `x`, from which its mean is subtracted if `centred`, by its root mean square."""
    x = ops.op("Sub", x, ops.op("ReduceMean", x, ops.int_vector(-1), keepdims=1)) if centred else x
    square = ops.op("Pow", x, ops.add_norm_weight("two", torch.tensor(2.0)))
    mean = ops.op("ReduceMean", square, ops.int_vector(-1), keepdims=1)
    root = ops.op("Sqrt", ops.op("Add", mean, ops.add_norm_weight(f"eps_{eps}", torch.tensor(eps))))
    return ops.op("Div", x, root)


def _write_softmax(ops: ExportGraphWriter, scores: str) -> str:
    """Write a softmax over the last axis in which every weight is at least e^-70 times the largest.

    This includes the weights of masked columns. Smaller weights would not change a sum in float32. But processors take
    a hundred times as long for numbers below 1e-38: forward passes of the model `scenes` with 8 nodes took 30 % longer.
    """
    largest = ops.op("ReduceMax", scores, ops.int_vector(-1), keepdims=1)
    lowest = ops.op("Sub", largest, ops.add_number("least_weight", _MAX_LOG_GAP))
    return ops.op("Softmax", ops.op("Max", scores, lowest), axis=-1)


def _write_fixed_point_softmax(ops: ExportGraphWriter, scores: str, max_columns: int) -> str:
    """Write a softmax over the last axis whose weights are integers in units of 1 / `_WEIGHT_STEPS`.

    The exponentials are scaled and rounded to integers, so that float32 computes their sum exactly. The scale is the
    largest with which the sum over `max_columns` columns stays exact.
    """
    finest = float(2 ** (_EXACT_BITS - math.ceil(math.log2(max_columns))))
    largest = ops.op("ReduceMax", scores, ops.int_vector(-1), keepdims=1)
    shifted = ops.op("Sub", scores, ops.op("Sub", largest, ops.add_number("log_finest", math.log(finest))))
    numerators = _write_round(ops, ops.op("Exp", ops.op("Max", shifted, ops.add_number("no_share", -1.0))))
    total = ops.op("ReduceSum", numerators, ops.int_vector(-1), keepdims=1)
    return _write_round(
        ops, ops.op("Mul", numerators, ops.op("Div", ops.add_number("shares", float(_WEIGHT_STEPS)), total))
    )


def _write_round(ops: ExportGraphWriter, x: str) -> str:
    """Write the rounding of numbers in 0 .. 2^22 to integers, with the same results as `Round`.

    Adding 1.5 * 2^23 removes the fraction, because float32 has no fractions at this size. ONNX Runtime's `Round` uses
    only one thread: a forward pass of SimpleAR-0.5B with 8 nodes took 5 % longer after 2,048 tokens and 32 % longer
    after 4,096 tokens.
    """
    whole = ops.add_number("whole", 1.5 * 2**23)
    return ops.op("Sub", ops.op("Add", x, whole), whole)
