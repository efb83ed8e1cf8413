"""TensorRT plans as engines of the decode loop; keys, values, logits and hidden states stay on the device.

Translates passes into the shapes a plan was built for: the smallest profile that fits, and a number of nodes rounded
up to a few fixed ones, so that shapes repeat. Nobody sees the nodes added. Per pass, ids,
positions and a few bits a node go to the device; back come only the rows that the decode loop looks at.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...bundle.manifest import DecoderSpec, DrafterSpec
from ...runtime.engine import Cache, Floats, Pass, PassOutput
from ..columns import read_by_nodes
from ..contracts import Array, Tensor
from ..decoder_tensors import past_length_of
from ..device_graph import device_tensors
from ..profiles import capacity_of
from .cuda import Block
from .device_cache import BlockCache, DeviceRows, Layout
from .plan import Plan


class TensorRTEngine:
    """A decoder plan. With a table of code embeddings it is a target; without, a drafter.

    One engine may serve several threads, each with caches of its own.
    """

    def __init__(self, plan: Plan, spec: DecoderSpec | DrafterSpec, code_embeddings: Floats | None = None) -> None:
        self.spec, self._plan, self._table, columns = spec, plan, None, capacity_of(plan.profiles)
        dtypes = (spec.dtype,) if isinstance(spec, DecoderSpec) else ("float32", "float16")
        inputs, outputs = device_tensors(spec, code_embeddings is None, dtypes, columns)
        plan.check_tensors(inputs, outputs)
        self._past = [tensor.name for tensor in inputs if tensor.name.startswith("past_")]
        kind = np.dtype(plan.dtypes["hidden_states"])
        self._dtype, self._states = kind.name, max(profile.rows[2] * profile.nodes[2] for profile in plan.profiles)
        self._layout = Layout(len(self._past), spec.num_kv_heads, columns, spec.head_dim * kind.itemsize)
        if code_embeddings is not None:
            table = np.ascontiguousarray(code_embeddings, kind)
            self._rows = Block(plan.memory, table.nbytes)
            plan.memory.upload(self._rows.address, table)
            plan.memory.synchronise()
            self._table = (table.shape, self._rows.address)

    def new_cache(self, rows: int, capacity: int) -> BlockCache:
        """An empty cache on the device. Raises: EngineError if the plan was built for fewer rows or columns."""
        self._check("rows", rows)
        largest = max(profile.nodes[2] for profile in self._plan.profiles)
        self._check("columns", capacity - largest - 2)  # what comes after the largest pass is never read
        return BlockCache(self._plan.memory, rows, capacity, self._layout)

    def next_past_length(self, cache: Cache, nodes: int) -> int:
        """The longest row, rounded up. Raises: EngineError if the plan has no profile for such a pass."""
        own = BlockCache.own(cache)
        self._fit(own, nodes)
        return own.past_length()

    def run(self, batch: Pass, cache: Cache) -> PassOutput:
        """Run one pass. Counts itself in `cache.passes` and `cache.seconds`."""
        own, plan = BlockCache.own(cache), self._plan
        past_length_of(batch, own)
        rows, nodes = batch.positions.shape
        profile, padded = self._fit(own, nodes)
        start = time.perf_counter()
        arrays, placed = own.encode(batch, padded), dict[str, Any]()
        for name, value in read_by_nodes(batch, padded, self._table, self._dtype, plan.memory).items():
            (arrays if isinstance(value, np.ndarray) else placed)[name] = value
        tensor = (rows, self._layout.heads, own.columns, self.spec.head_dim)
        for name, address in zip(self._past, own.addresses(), strict=True):
            placed[name] = placed[name.replace("past", "present", 1)] = tensor, address  # written in place
        results = []
        for name, dtype, width, count in (
            ("logits", "float32", self.spec.vocab_size, rows * padded),
            ("hidden_states", self._dtype, self.spec.hidden_size, self._states),  # drafters read from one shape only
        ):
            block = Block(plan.memory, count * width * np.dtype(dtype).itemsize)
            placed[name] = shape, _ = (rows, padded, width), block.address
            results.append(DeviceRows(plan.memory, block, dtype, shape, nodes))
        plan.run(profile, arrays, placed)
        own.seconds += time.perf_counter() - start
        own.passes += 1
        logits, hidden = results
        return PassOutput(logits, hidden, own.written)

    def _fit(self, cache: BlockCache, nodes: int) -> tuple[int, int]:
        """The profile for a pass, by number, and the nodes to run. Raises: EngineError if it was not built for so many.

        Nodes are rounded up to the next power of two, within bounds.
        """
        for name, wanted in (("rows", len(cache.lengths)), ("nodes", nodes), ("columns", cache.span(nodes))):
            self._check(name, wanted)
        most, number = min((one.nodes[2], i) for i, one in enumerate(self._plan.profiles) if one.nodes[2] >= nodes)
        padded = 1 << max(1, (nodes - 1).bit_length())
        return number, min(padded, most, cache.columns - int(cache.lengths.max(initial=0)))

    def _check(self, name: str, wanted: int) -> None:
        """Raises: EngineError unless a profile takes so many."""
        if wanted > (most := max(getattr(profile, name)[2] for profile in self._plan.profiles)):
            what = {"rows": "rows", "nodes": "nodes in one pass", "columns": "columns of a cache"}[name]
            expected, option = f"at most {most}, which it was built for", name.replace("columns", "past")
            raise self._plan.other(f"{wanted} {what}", expected, f" --max-{option} {wanted}")


class TensorRTFunction:
    """A plan that is one call over rows, such as the image decoder; more rows than it was built for go in turns."""

    def __init__(self, plan: Plan, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        plan.check_tensors(inputs, outputs)
        self._plan, self._outputs = plan, outputs

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs, in the order in which they were declared."""
        memory, dtypes, most = self._plan.memory, self._plan.dtypes, self._plan.profiles[0].rows[2]
        rows = len(next(iter(feeds.values())))
        results = {
            tensor.name: np.empty([rows if size is None else size for size in tensor.shape], dtypes[tensor.name])
            for tensor in self._outputs
        }
        for start in range(0, rows, most):
            part = slice(start, start + most)
            arrays = {name: array[part] for name, array in feeds.items()}
            blocks = {name: Block(memory, array[part].nbytes) for name, array in results.items()}
            self._plan.run(0, arrays, {name: (results[name][part].shape, blocks[name].address) for name in results})
            for name, array in results.items():
                memory.download(array[part], blocks[name].address)
            memory.synchronise()
        return list(results.values())
