"""Cache blocks on a device, reused by later caches of the same shape, and forward passes that are bound to them.

When the shape of a pass recurs, the pass keeps the addresses of its inputs and outputs. Nothing is bound or allocated
again, and a provider that can record passes as graphs replays the recording.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...runtime.device import SamplingRequest
from ...runtime.engine import Floats, Ints
from ..columns import padded_node_count
from ..contracts import Array, ExecutableGraph, TensorView
from ..graph_writer import choose_column_parts
from ..kv_cache import round_up
from ..sampling_head import FILTERED_OUT, SamplingHead
from .device import OrtDevice

MAX_BOUND_PASSES = 32  # per cache block, as outputs and recordings take memory
_ALIGNMENT = 256  # alignment of arrays in a buffer, in bytes
_MAX_UNUSED = 2  # maximum number of unused cache blocks
_MAX_SAMPLERS = 8  # sampling graphs per bound pass


class UploadBuffer:
    """A buffer that uploads several arrays in one copy; in one copy each if the device has no views into memory.

    Args:
        size: size in bytes, the `count_bytes` all arrays.
    """

    def __init__(self, device: OrtDevice, size: int) -> None:
        self.device = device
        self._bytes = np.zeros(size, np.uint8)
        self._value = device.upload(self._bytes) if device.supports_views else None

    @staticmethod
    def count_bytes(*arrays: Array) -> int:
        """Return the number of bytes that arrays take in a buffer."""
        return sum(round_up(array.nbytes, _ALIGNMENT) for array in arrays)

    def allocate_tensors(self, arrays: Mapping[str, Array], byte_offset: int = 0) -> dict[str, Any]:
        """Return tensors on the device, usable as inputs of graphs, with the shapes and types of `arrays`.

        Args:
            arrays: arrays by name, as they will be uploaded.
            byte_offset: offset of the first tensor in the buffer, in bytes.
        """
        if self._value is None:
            return {name: self.device.upload(array) for name, array in arrays.items()}
        tensors: dict[str, Any] = {}
        for name, array in arrays.items():
            tensors[name] = TensorView(self._value, byte_offset, list(array.shape), array.dtype.name)
            byte_offset += self.count_bytes(array)
        return tensors

    def stage_arrays(self, tensors: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Write arrays to be uploaded to their `tensors`, which `allocate_tensors` returned."""
        for name, tensor in tensors.items():
            if isinstance(tensor, TensorView):
                self._bytes[tensor.byte_offset :][: arrays[name].nbytes] = arrays[name].ravel().view(np.uint8)
            else:
                tensor.update_inplace(np.ascontiguousarray(arrays[name]))

    def upload_staged(self) -> None:
        """Copy the arrays that `stage_arrays` wrote to the device, after all work of this thread."""
        if self._value is not None:
            self._value.update_inplace(self._bytes)


class BoundSampler(NamedTuple):
    """A sampling graph bound to logits.

    Attributes:
        noise_table: noise table on the device, an input.
        inputs: tensors of the uploaded inputs on the device.
        samples: output of the graph: sampled tokens and their scores.
        run: function that runs the graph and waits for the device.
    """

    noise_table: Any
    inputs: dict[str, Any]
    samples: Any
    run: Callable[[], None]


class BoundForwardPass:
    """A forward pass of one shape with preallocated tensors, which runs when its outputs are first used.

    Each run overwrites `outputs`. If tokens are sampled first, the pass and the sampling graph run together.

    Args:
        graph: decoder to run.
        device: device that the decoder runs on.
        feeds: inputs by name: arrays, for which device memory is allocated, or values on the device.
        device_values: caches and outputs by name, values on the device.
        capture_graph: whether the pass and its sampling graphs may be recorded.

    Attributes:
        output_owners: objects that refer to the outputs; while there are any, `begin` must not be called.
    """

    def __init__(
        self,
        graph: ExecutableGraph,
        device: OrtDevice,
        feeds: Mapping[str, Any],
        device_values: Mapping[str, Any],
        capture_graph: bool,
    ) -> None:
        self.device = device
        self.outputs = device_values
        self._capture_graph = capture_graph
        self.output_owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._samplers: dict[tuple[Any, ...], BoundSampler] = {}
        self._queued_inputs: list[tuple[Mapping[str, Any], object]] = []
        rows, self._nodes = feeds["token_ids"].shape
        arrays = _select_arrays(feeds)
        self._start = UploadBuffer.count_bytes(*arrays.values())
        # A sampling graph has up to four inputs with a number per node, and two with a number per row.
        per_node = np.zeros((rows, padded_node_count(self._nodes)), np.int32)
        size = 4 * UploadBuffer.count_bytes(per_node) + 2 * UploadBuffer.count_bytes(per_node[:, 0])
        self._buffer = UploadBuffer(device, self._start + size)
        self._inputs = self._buffer.allocate_tensors(arrays)
        self._run = graph.bind_tensors({**feeds, **self._inputs, **device_values}, capture_graph)

    def queue_inputs(self, feeds: Mapping[str, Any], input_owner: object = None) -> None:
        """Store the inputs of the next run, which `finish` or `sample` starts.

        Args:
            feeds: inputs by name, of the same shapes as before.
            input_owner: owner of device memory that the pass reads, to be kept until the pass has run.
        """
        self._queued_inputs = [(feeds, input_owner)]

    def run_queued_pass(self) -> None:
        """Run the queued pass, if any, and wait for the device."""
        if self._queued_inputs:
            with self.device.lock:
                self._upload_and_run()
                self.device.wait()

    def sample(self, head: SamplingHead, requests: Sequence[SamplingRequest]) -> tuple[Ints, Floats]:
        """Return tokens and scores of requests, `[requests, nodes, num_best]`, padded to the largest number of nodes.

        The inputs of a queued pass are uploaded by the same copy.
        """
        with self.device.lock:
            feeds = self.device.make_sampling_inputs(head, self._nodes, requests)
            sampler = self._get_sampler(head, feeds)
            self._buffer.stage_arrays(sampler.inputs, feeds)
            self._upload_and_run()
            sampler.run()
            codes, scores = sampler.samples.numpy().copy()  # on the host, `numpy()` is the output's memory
        scores[scores <= FILTERED_OUT / 2] = -np.inf
        return codes.astype(np.int64), scores

    def _upload_and_run(self) -> None:
        waiting = self._queued_inputs.pop() if self._queued_inputs else None
        if waiting is not None:
            self._buffer.stage_arrays(self._inputs, waiting[0])
        self._buffer.upload_staged()
        if waiting is not None:
            self._run()

    def _get_sampler(self, head: SamplingHead, feeds: Mapping[str, Any]) -> BoundSampler:
        shape = feeds["conditional"].shape
        sampler = self._samplers.pop((head, shape), None)
        noise_table = feeds.get("noise")
        if sampler is None or sampler.noise_table is not noise_table:  # a larger table may have replaced it
            inputs = self._buffer.allocate_tensors(_select_arrays(feeds), self._start)
            drawn = self.device.empty((2, *shape, head.num_best), "float32")
            values = {**feeds, **inputs, "logits": self.outputs["logits"], "drawn": drawn}
            run = self.device.get_helper_graph(head, head.write_graph, allow_graph_capture=True).bind_tensors(
                values, self._capture_graph, wait=True
            )
            sampler = BoundSampler(noise_table, inputs, drawn, run)
        self._samplers[head, shape] = sampler
        if len(self._samplers) > _MAX_SAMPLERS:
            del self._samplers[next(iter(self._samplers))]
        return sampler


def _select_arrays(feeds: Mapping[str, Any]) -> dict[str, Array]:
    return {name: value for name, value in feeds.items() if isinstance(value, np.ndarray)}


@dataclass(eq=False)
class CacheBlock:
    """Device memory for key 0, value 0, key 1, ... of a cache, and the forward passes bound to it.

    Attributes:
        shape: batch rows, columns (of all heads, if heads are separate), shape of a column.
        device_values: values on the device.
        bound_passes: bound passes by shape.
        is_reusable: whether other caches may use the block later; False: it may contain NaN, which masks do not hide.
    """

    shape: tuple[int, ...]
    device_values: list[Any]
    bound_passes: dict[tuple[int, ...], BoundForwardPass] = field(default_factory=dict)
    is_reusable: bool = True


class CachePool:
    """Reuses the cache blocks of an engine after their caches are released.

    Args:
        num_tensors: number of tensors, two per layer.
        dtype: type of the tensors.
        column_width: width of a column, of one head if heads are separate, else of all heads.
        num_cache_heads: number of separate heads, each with all columns; all tensors are then one value
            `[tensors, rows, num_cache_heads * columns, width]`, which one operation moves. None: columns contain all
            heads, and every tensor is a value `[rows, columns, parts, part]`.
    """

    def __init__(
        self, device: OrtDevice, num_tensors: int, dtype: str, column_width: int, num_cache_heads: int | None
    ) -> None:
        self.device = device
        self._tensors = num_tensors
        self._dtype = dtype
        self._column = (column_width,) if num_cache_heads else choose_column_parts(column_width)
        self._heads = num_cache_heads
        self._unused: OrderedDict[int, CacheBlock] = OrderedDict()  # the block released first comes first
        self._lock = threading.RLock()  # a block may be released while another is acquired, even on one thread

    def acquire_block(self, num_rows: int, num_columns: int) -> BlockHandle:
        """Return a handle of a block for `num_rows` rows of `num_columns` columns, which contains finite numbers."""
        shape = num_rows, num_columns * (self._heads or 1), *self._column
        with self._lock:
            block = next((block for block in list(self._unused.values()) if block.shape == shape), None)
            self._unused.pop(id(block), None)
        if block is None:
            if self._heads is None:
                values = [self.device.zeros(shape, self._dtype) for _ in range(self._tensors)]
            else:
                values = [self.device.zeros((self._tensors, *shape), self._dtype)]
            block = CacheBlock(shape, values)
        handle = BlockHandle(block)
        weakref.finalize(handle, self._release, block).atexit = False
        return handle

    def get_block_tensors(self, block: CacheBlock) -> list[Any]:
        """Return all tensors of a block: values, or views `[rows, heads, columns, width]` if heads are separate."""
        if self._heads is None:
            return block.device_values
        rows, lines, width = block.shape
        size = [rows, self._heads, lines // self._heads, width]
        bytes_each = prod(size) * np.dtype(self._dtype).itemsize
        # All tensors are one value, one after another.
        starts = [number * bytes_each for number in range(self._tensors)]
        return [TensorView(value, start, size, self._dtype) for value in block.device_values for start in starts]

    def gather_rows(self, sources: Sequence[tuple[CacheBlock, Ints]], target: CacheBlock) -> None:
        """Copy rows of other blocks to a block, in their order.

        Args:
            sources: blocks, and the rows to copy.
            target: block with as many rows as are copied.
        """
        for i, value in enumerate(target.device_values):
            rows_of = [(block.device_values[i], rows) for block, rows in sources]
            self.device.gather_rows(rows_of, value, axis=0 if self._heads is None else 1)

    def move_entries(self, block: CacheBlock, sources: Ints, targets: Ints, column_offsets: Ints) -> None:
        """Copy entries within all tensors of a block with separate heads.

        Args:
            sources: entries to copy, `[entries, 2]`, row and column.
            targets: entries to overwrite.
            column_offsets: offsets of columns for which the copy is repeated, `[column_offsets]`.
        """
        offsets = np.zeros((self._tensors, len(column_offsets), 3), np.int64)
        offsets[..., 0] = np.arange(self._tensors)[:, None]
        offsets[..., 2] = column_offsets
        first_sources, first_targets = (np.pad(entries, ((0, 0), (1, 0))) for entries in (sources, targets))
        for value in block.device_values:
            self.device.move_vectors(value, first_sources, first_targets, offsets.reshape(-1, 3))

    def get_bound_pass(
        self, block: CacheBlock, shape: tuple[int, ...], make_bound_pass: Callable[[], BoundForwardPass]
    ) -> BoundForwardPass:
        """Return a bound pass of a shape whose outputs are unused; drop the least recently used above a maximum.

        Args:
            make_bound_pass: function that makes a new bound pass.
        """
        # Several passes of one shape are bound, numbered from 0, while earlier outputs are still referenced.
        keys = ((*shape, number) for number in itertools.count())
        key = next(key for key in keys if key not in block.bound_passes or not block.bound_passes[key].output_owners)
        bound = block.bound_passes.pop(key, None) or make_bound_pass()
        block.bound_passes[key] = bound  # now the last key, so the first is the least recently used
        if len(block.bound_passes) > MAX_BOUND_PASSES:
            del block.bound_passes[next(iter(block.bound_passes))]
        return bound

    def _release(self, block: CacheBlock) -> None:
        if not block.is_reusable:
            return
        with self._lock:
            self._unused[id(block)] = block
            while len(self._unused) > _MAX_UNUSED:
                self._unused.popitem(last=False)


@dataclass(eq=False)
class BlockHandle:
    """Ownership of a cache block, which returns to its pool when the handle is deleted."""

    block: CacheBlock
