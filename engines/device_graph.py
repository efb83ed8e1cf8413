"""Decoder graphs for accelerators, made from a bundle's own when they are loaded: other nodes over the same weights.

A bundle's graph is laid out for CPUs: embeddings, a mask and the past go in, new keys and values come out. Here token
ids go in and embeddings are looked up; the mask is made from a few bits a node; keys and values of new nodes are
written into the caches, outputs that are bound to the memory of inputs; attention, norms and rotation are one node
each. Weights stay in the bundle's files, whose names for them are those of `export/graph/decoder_graph.py`.

A row's cache columns may be filled in any order: whoever runs the graph says where new nodes go and which columns a
node sees. Committing nodes is then bookkeeping, and moves nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..bundle.manifest import DecoderSpec, DrafterSpec
from ..bundle.onnx_scan import Weight, graph_weights
from ..errors import BundleError
from ..inputs import reading
from .contracts import Tensor
from .decoder_tensors import device_tensors, rows_dtype
from .graph_writer import HEAD_EPSILON, DecoderWriter, GraphWriter
from .kv_cache import round_up

WORD = 16  # columns of a mask per number
_AGAIN = "export the bundle again"
MASKED = {"float32": -1e9, "bfloat16": -1e9, "float16": -6e4}  # added to scores of columns that are not seen; finite


class DeviceGraph(NamedTuple):
    """A model as bytes, what goes in and comes out, and the type of its caches and hidden states."""

    model: bytes
    inputs: list[Tensor]
    outputs: list[Tensor]
    dtype: str


def device_graph(
    path: Path, spec: DecoderSpec | DrafterSpec, drafts: bool, plain: bool = False, capacity: int | None = None
) -> DeviceGraph:
    """The device layout of the target or drafter graph in a file, whose folder holds its weights.

    Inputs: `token_ids` int32 `[rows, nodes]`, rows of `embeddings [entries, hidden_size]` (of a target; a drafter has
    its own) and, of a drafter, `hidden_ids` int32, rows of `hidden [any, any, hidden_size]`, its first axes taken as
    one; `position_ids` int64 `[rows, nodes]`; `seen` int32 `[rows, nodes, words]`, bit c of word w: whether a node sees
    column 16 w + c; `write`; and `past_key_values.{i}.key/.value`. Outputs: `logits` float32, `hidden_states`, and
    `present_key_values` with the new nodes written, to be bound to the memory of the past.

    capacity None: columns are written in any order. `write` int64 `[rows, nodes, 2]`, row and column of each node;
    `seen` has all columns; caches `[rows, columns, num_kv_heads * head_dim]`. A capacity: nodes stand side by side.
    `write` int64 `[rows]`, the first one's column; `seen` ends where it likes; caches
    `[rows, num_kv_heads, capacity, head_dim]`.

    plain: without the op Attention and without bfloat16, and without float16 tables where float32 is computed with.
    Raises: BundleError if the file is not one that this version exports.
    """
    with reading(path, "an ONNX graph", BundleError, _AGAIN):
        weights = graph_weights(path)
        try:
            writer = _DeviceWriter(path.parent, weights, spec, plain, capacity)
            graph = writer.write(drafts)
        except KeyError as error:
            raise BundleError(f"has no weight {error}", field=str(path), remedy=_AGAIN) from error
        others = re.compile(r"eps_|rotary\.swap|.*\.(value_units|step)$")  # of the bundle's own graph
        names = (name for name in weights if "." in name and not others.match(name))
        unread = next((name for name in names if name not in writer.graph.weights), None)
        if unread is not None:
            what = f"the weight {unread}, which the decoder in bundle.json does not have"
            raise BundleError(field=str(path), found=what, remedy=_AGAIN)
        return graph


class _DeviceWriter(DecoderWriter):
    def __init__(
        self,
        folder: Path,
        weights: dict[str, Weight],
        spec: DecoderSpec | DrafterSpec,
        plain: bool,
        capacity: int | None,
    ) -> None:
        names = (f"layers.0.attention.out.weight{kind}" for kind in ("", ".bfloat16", ".scales"))
        out = next((weights[name] for name in names if name in weights), None)  # half where the graph computes in it
        graph = GraphWriter({"": 23, "com.microsoft": 1} if capacity is None else {"": 24})
        heads = spec.hidden_size // spec.head_dim
        dtype = out.dtype if out is not None and out.dtype in ("float16", "" if plain else "bfloat16") else "float32"
        super().__init__(graph, weights, dtype, heads, heads // spec.num_kv_heads)
        self.spec, self.plain, self.capacity, self.decoded = spec, plain, capacity, dict[str, str]()
        self.has_plain_attention = plain or (
            capacity is not None and not self.half
        )  # TensorRT's Attention takes float16 only
        epsilons = {float(name.removeprefix("eps_")) for name in weights if name.startswith("eps_")}
        self.epsilon = next(iter(epsilons - {HEAD_EPSILON}), HEAD_EPSILON)
        swap = weights["rotary.swap" if "rotary.swap" in weights else "rotary.swap.half"].array(folder)
        self.interleaved = int(swap[0].argmax() == 1)  # the number that is the first one's partner

    def write(self, drafts: bool) -> DeviceGraph:
        """The whole decoder."""
        graph, spec = self.graph, self.spec
        if drafts:
            states = graph.op("Reshape", "hidden", graph.ints(-1, spec.hidden_size))
            joint = [self.look_up_embeddings(), self.from_input(graph.op("Gather", states, "hidden_ids"))]
            x = self.linear(graph.op("Concat", *joint, axis=-1), "fc")
        else:
            x = self.from_input(graph.op("Gather", "embeddings", "token_ids"))
        self.attention_mask, self.rotation = self.write_mask(), self.write_rotation()
        self.decoder(x, spec.num_layers)
        inputs, outputs = device_tensors(spec, drafts, (self.dtype,), self.capacity)
        return DeviceGraph(graph.to_bytes(inputs, outputs), inputs, outputs, self.dtype)

    def rotate(self, joint: str, at: str) -> tuple[str, str, str]:
        """As `DecoderWriter`, each `[rows, nodes, heads * head_dim]`."""
        graph, shared = self.graph, self.spec.num_kv_heads
        each, parts = shared * self.spec.head_dim, self.group + 2
        if f"{at}.attention.head_norm.weight" in self.weights:
            sizes = graph.ints((parts - 1) * each, each)
            own, value = graph.add_node("Split", [joint, sizes], [f"{at}.unturned", f"{at}.value"], axis=-1)
            own = self.norm_heads(own, f"{at}.attention.head_norm", self.heads + shared)
            joint = graph.op("Concat", own, value, axis=-1)
        apart = graph.reshape(joint, 0, -1, each)  # every part in turn, values by no angle
        turned = graph.op("RotaryEmbedding", apart, *self.rotation, interleaved=self.interleaved, num_heads=shared)
        turned = graph.reshape(turned, 0, -1, parts * each)
        sizes = graph.ints((parts - 2) * each, each, each)
        names = [f"{at}.query", f"{at}.new_key", f"{at}.new_value"]
        query, key, value = graph.add_node("Split", [turned, sizes], names, axis=-1)
        return query, key, value

    def attend(self, query: str, key: str, value: str, at: str) -> str:
        """As `DecoderWriter`; new nodes are written into the cache, side by side in what TensorRT has kernels for.

        Its Attention copies the cache where it has a `scale`; without, it divides by the root of the heads' width.
        """
        graph, spec, width = self.graph, self.spec, self.spec.head_dim
        presents = list[str]()
        cache = at.replace("layers", "key_values")
        for name, new in ((f"{cache}.key", key), (f"{cache}.value", value)):
            if self.capacity is None:
                presents.append(graph.op("ScatterND", f"past_{name}", "write", new, name=f"present_{name}"))
            else:
                places = f"past_{name}", self.split_heads(new, spec.num_kv_heads), "write"
                present = graph.op("TensorScatter", *places, name=f"present_{name}", axis=2)
                presents.append(graph.op("Slice", present, graph.ints(0), "span", graph.ints(2)))
        scale = width**-0.5 if "attention_scale" in self.weights else 1.0  # elsewhere weights have it
        if self.has_plain_attention:
            return self.plain_attention(query, presents[0], presents[1], scale)
        if self.capacity is None:
            return self.fused_attention(query, presents, scale)
        query = self.split_heads(query, self.heads)
        if scale == 1.0:
            query = graph.op("Mul", query, self.scalar(width**0.5))
        return self.join_heads(graph.op("Attention", query, *presents, self.attention_mask))

    def fused_attention(self, query: str, presents: list[str], scale: float) -> str:
        """The op Attention, with queries that share a head of keys as further nodes: else CUDA copies keys for each."""
        graph, shared, group, width = self.graph, self.spec.num_kv_heads, self.group, self.spec.head_dim
        if group > 1:
            query = graph.transpose(graph.reshape(query, 0, 0, shared, group, width), 0, 3, 1, 2, 4)
            query = graph.reshape(query, 0, -1, shared * width)
        inputs = query, *presents, self.attention_mask
        mixed = graph.op("Attention", *inputs, q_num_heads=shared, kv_num_heads=shared, scale=scale)
        if group == 1:
            return mixed
        mixed = graph.transpose(graph.reshape(mixed, 0, group, -1, shared, width), 0, 2, 3, 1, 4)
        return graph.reshape(mixed, 0, 0, self.heads * width)

    def plain_attention(self, query: str, keys: str, values: str, scale: float) -> str:
        """What the op Attention gives, in products: queries that share a head of keys stand one after the other."""
        graph, shared = self.graph, self.spec.num_kv_heads
        query = self.split_heads(query, self.heads)
        if scale != 1.0:
            query = graph.op("Mul", query, self.scalar(scale))
        if self.capacity is None:
            keys, values = self.split_heads(keys, shared), self.split_heads(values, shared)
        query = graph.reshape(query, 0, shared, -1, self.spec.head_dim)
        scores = graph.op("MatMul", query, graph.transpose(keys, 0, 1, 3, 2))
        mixed = graph.op("MatMul", graph.op("Softmax", graph.op("Add", scores, self.attention_mask), axis=-1), values)
        return self.join_heads(graph.reshape(mixed, 0, self.heads, -1, self.spec.head_dim))

    def split_heads(self, x: str, heads: int) -> str:
        """`x` as `[rows, heads, nodes, head_dim]`."""
        return self.graph.transpose(self.graph.reshape(x, 0, 0, heads, self.spec.head_dim), 0, 2, 1, 3)

    def join_heads(self, x: str) -> str:
        """All heads `[rows, heads, nodes, head_dim]` of queries as `[rows, nodes, hidden_size]`."""
        return self.graph.reshape(self.graph.transpose(x, 0, 2, 1, 3), 0, 0, self.heads * self.spec.head_dim)

    def norm_heads(self, x: str, prefix: str, heads: int) -> str:
        """Every head of queries and keys normed by itself, in float32."""
        graph, spec = self.graph, self.spec
        x = self.to_float32(graph.reshape(x, 0, 0, heads, spec.head_dim))
        ones = graph.constant(np.ones(spec.head_dim, np.float32))  # scales differ from head to head
        normed = graph.op("LayerNormalization", x, ones, axis=-1, epsilon=HEAD_EPSILON)
        scaled = graph.op("Mul", normed, self.weight(f"{prefix}.weight"))
        scaled = graph.op("Add", scaled, self.weight(f"{prefix}.bias"))
        return self.to_dtype(graph.reshape(scaled, 0, 0, heads * spec.head_dim))

    def norm(self, x: str, added: str | None, weight: str, name: str | None) -> tuple[str, str]:
        graph, scale = self.graph, self.to_dtype(self.weight(weight))
        if added is not None and "com.microsoft" in graph.domains:
            operands, names = [x, added, scale], [name or f"{weight}.normed", "", "", f"{weight}.total"]
            op = "com.microsoft.SkipSimplifiedLayerNormalization"
            normed, *_, total = graph.add_node(op, operands, names, epsilon=self.epsilon)
        else:
            total = x if added is None else graph.op("Add", x, added)
            normed = graph.op("RMSNormalization", total, scale, name=name, axis=-1, epsilon=self.epsilon, stash_type=1)
        return total, normed

    def gelu(self, x: str) -> str:
        return self.graph.op("Gelu", x)

    def look_up_embeddings(self) -> str:
        """Rows of the drafter's embedding table, in the type it computes in."""
        if self.plain and not self.half:
            return self.graph.op("Gather", self.weight("embed.weight"), "token_ids")
        self.add_weight(stored := self.stored_name("embed.weight"))
        rows = self.graph.op("Gather", stored, "token_ids")
        return rows if self.weights[stored].dtype == self.dtype else self.graph.cast(rows, self.dtype)

    def from_input(self, x: str) -> str:
        """What the graph is given, in the type it computes in."""
        return x if rows_dtype(self.dtype) == self.dtype else self.to_dtype(x)

    def scalar(self, value: float) -> str:
        """A number in the type it computes in."""
        return self.to_dtype(self.graph.constant(np.array(value, np.float32)))

    def matmul(self, x: str, weight: str, output: str | None) -> str:
        return self.graph.op("MatMul", x, self.weight(weight), name=output)

    def weight(self, name: str) -> str:
        """As `DecoderWriter`, whatever it is stored as; what is stored as float32 stays that."""
        if (stored := self.stored_name(name)) == name:
            return self.add_weight(name)
        if stored not in self.decoded:
            if stored.endswith(("half", "bfloat16")):
                self.decoded[stored] = self.decode_floats(stored)
            else:
                self.decoded[stored] = self.dequantize(stored, f"{name}.scales")
        return self.decoded[stored]

    def dequantize(self, stored: str, scale: str) -> str:
        """Integers times their scales, one for each block of inputs, or for each output.

        The latter ONNX Runtime turns back when it loads the graph, if by ops other than DequantizeLinear.
        """
        (inputs, _), (count, *blocks) = self.weights[stored].shape, self.weights[scale].shape
        integers, scales = self.add_weight(stored), self.decode_floats(scale)
        if blocks:
            return self.graph.op("DequantizeLinear", integers, scales, axis=0, block_size=inputs // count)
        if self.capacity is None:
            return self.graph.op("Mul", self.graph.cast(integers, self.dtype), scales)
        return self.graph.op("DequantizeLinear", integers, scales, axis=1)

    def decode_floats(self, name: str) -> str:
        """A weight of floats in the type it computes in."""
        own = self.add_weight(name)
        return own if self.weights[name].dtype == self.dtype else self.graph.cast(own, self.dtype)

    def stored_name(self, name: str) -> str:
        """What the file calls a weight, which says how it is stored."""
        names = (name, *(f"{name}.{kind}" for kind in ("half", "bfloat16", "int8", "int4")))
        return next((own for own in names if own in self.weights), name)

    def add_weight(self, name: str) -> str:
        """A weight as it is stored."""
        self.graph.weights[name] = self.weights[name].message
        return name

    def write_rotation(self) -> list[str]:
        """Cosines and sines `[angles, head_dim / 2]`, and which of them parts of nodes take, `[rows, parts * nodes]`.

        From tables that have each twice, the first sine negated. A node's parts are as wide as its keys: queries, keys,
        values. The latter take an angle behind the others, which changes nothing. There are as many angles as parts in
        the longest pass, as ONNX Runtime wants it.
        """
        graph, width = self.graph, self.spec.head_dim
        second = (1, width, 2) if self.interleaved else (width // 2, width, 1)  # columns of each pair's second number
        place = [graph.ints(number) for number in second]
        positions, parts = self.weights[self.stored_name("rotary.cos")].shape[0], self.group + 2
        tables = []
        for name, rest in (("rotary.cos", 1), ("rotary.sin", 0)):
            table = graph.op("Slice", self.to_float32(self.weight(name)), *place[:2], graph.ints(1), place[2])
            pads = graph.ints(0, 0, parts * round_up(positions) - positions, 0)
            tables.append(self.to_dtype(graph.op("Pad", table, pads, graph.constant(np.array(rest, np.float32)))))
        values, still = graph.constant(np.arange(parts) == parts - 1), graph.ints(positions)
        angles = graph.op("Where", values, still, graph.op("Unsqueeze", "position_ids", graph.ints(-1)))
        return [*tables, graph.reshape(angles, 0, -1)]

    def write_mask(self) -> str:
        """What is added to scores, `[rows, 1, nodes, columns]`, again for all queries that share keys; not in plans."""
        graph, powers = self.graph, 0.5 ** np.arange(WORD, dtype=np.float32)
        half, one, two, masked = (
            graph.constant(np.array(number, np.float32)) for number in (0.5, 1, 2, MASKED[self.dtype])
        )
        words = graph.op("Unsqueeze", graph.cast("seen", "float32"), graph.ints(-1))
        shifted = graph.op("Floor", graph.op("Mul", words, graph.constant(powers)))
        even = graph.op("Mul", graph.op("Floor", graph.op("Mul", shifted, half)), two)
        seen = graph.reshape(graph.op("Sub", shifted, even), 0, 0, -1)  # the lowest bit of each word first
        if self.capacity is not None:
            graph.op("Shape", seen, name="span", start=2, end=3)
        hidden = graph.op("Mul", graph.op("Sub", one, seen), masked)
        mask = self.to_dtype(graph.op("Unsqueeze", hidden, graph.ints(1)))
        return self.tile_mask(mask) if self.has_plain_attention or self.capacity is None else mask
