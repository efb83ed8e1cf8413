"""Pool of cache blocks (device memory for KV caches), and forward passes that are bound to the tensors of a block.

Later caches of the same shape reuse a block. When the shape of a pass recurs, its inputs and outputs keep their
addresses. Then nothing is bound or allocated again, and a provider that can record passes replays a recording.
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
from ..columns import compute_padded_node_count
from ..contracts import Array, ExecutableGraph, TensorView
from ..graph_writer import choose_column_part_shape
from ..kv_cache import round_up
from ..sampling_head import FILTERED_OUT, MAX_SETTINGS, SamplingHead
from .device import OrtDevice

MAX_BOUND_PASSES = 32  # per cache block, as outputs and recordings take memory
_ALIGNMENT = 256  # alignment of arrays in a buffer, in bytes
_MAX_UNUSED = 2  # maximum number of unused cache blocks
_MAX_SAMPLERS = 8  # maximum number of bound sampling graphs per bound pass


class UploadBuffer:
    """Buffer of `size` bytes that uploads several arrays at once if the device supports views, otherwise one by one."""

    def __init__(self, device: OrtDevice, size: int) -> None:
        self.device = device
        self._bytes = np.zeros(size, np.uint8)
        self._value = device.upload(self._bytes) if device.supports_views else None

    @staticmethod
    def count_bytes(*arrays: Array) -> int:
        return sum(round_up(array.nbytes, _ALIGNMENT) for array in arrays)

    def allocate_tensors(self, arrays: Mapping[str, Array], byte_offset: int = 0) -> dict[str, Any]:
        """Allocate tensors on the device with the shapes and types of `arrays`, from `byte_offset` in the buffer on."""
        if self._value is None:
            return {name: self.device.upload(array) for name, array in arrays.items()}
        tensors: dict[str, Any] = {}
        for name, array in arrays.items():
            tensors[name] = TensorView(self._value, byte_offset, list(array.shape), array.dtype.name)
            byte_offset += self.count_bytes(array)
        return tensors

    def stage_arrays(self, tensors: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Copy arrays to the host buffer for `upload_staged`; without views, upload them at once."""
        for name, tensor in tensors.items():
            if isinstance(tensor, TensorView):
                self._bytes[tensor.byte_offset :][: arrays[name].nbytes] = arrays[name].ravel().view(np.uint8)
            else:
                tensor.update_inplace(np.ascontiguousarray(arrays[name]))

    def upload_staged(self) -> None:
        """Upload the arrays that `stage_arrays` copied. The device first finishes earlier work of this thread."""
        if self._value is not None:
            self._value.update_inplace(self._bytes)


class BoundSampler(NamedTuple):
    """Sampling graph bound to the logits of a forward pass."""

    noise_table: Any  # noise table on the device, an input of the graph; None: greedy sampling
    inputs: dict[str, Any]  # all other inputs of the graph, tensors on the device
    samples: Any  # output of the graph: sampled tokens and their scores, `[2, images, nodes, num_best]`
    run: Callable[[], None]


class BoundForwardPass:
    """Forward pass of a fixed shape with preallocated tensors. A queued pass runs when its outputs are first used.

    Each run overwrites `outputs`. If tokens are sampled first, one copy uploads the inputs of the pass and of sampling.
    `feeds` are arrays, for which device memory is allocated, or values on the device; `device_tensors` are caches and
    outputs. With `capture_graph`, the pass and its sampling graphs may be recorded.
    """

    def __init__(
        self,
        graph: ExecutableGraph,
        device: OrtDevice,
        feeds: Mapping[str, Any],
        device_tensors: Mapping[str, Any],
        capture_graph: bool,
    ) -> None:
        self.device = device
        self.outputs = device_tensors  # caches and outputs by name
        self._capture_graph = capture_graph
        # Objects that refer to the outputs. While an owner exists, `queue_inputs` must not be called, as a run would
        # overwrite the outputs.
        self.output_owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._samplers: dict[tuple[Any, ...], BoundSampler] = {}
        self._queued_inputs: list[tuple[Mapping[str, Any], object]] = []
        rows, self._nodes = feeds["token_ids"].shape
        arrays = _select_host_arrays(feeds)
        self._sampler_offset = UploadBuffer.count_bytes(*arrays.values())  # inputs of sampling follow in the buffer
        # A sampling graph has up to four inputs with a number per node, and sampling settings of each row.
        per_node = np.zeros((rows, compute_padded_node_count(self._nodes)), np.int32)
        size = 4 * UploadBuffer.count_bytes(per_node) + MAX_SETTINGS * UploadBuffer.count_bytes(per_node[:, 0])
        self._buffer = UploadBuffer(device, self._sampler_offset + size)
        self._inputs = self._buffer.allocate_tensors(arrays)
        self._run = graph.bind_tensors({**feeds, **self._inputs, **device_tensors}, capture_graph)

    def queue_inputs(self, feeds: Mapping[str, Any], input_owner: object = None) -> None:
        """Store the inputs of the next run, which `run_queued_pass` or `sample` starts.

        `input_owner` owns device memory that the pass reads, and is referenced until the pass has run.
        """
        self._queued_inputs = [(feeds, input_owner)]

    def run_queued_pass(self) -> None:
        """Run the queued pass, if any, and wait for the device."""
        if self._queued_inputs:
            with self.device.lock:
                self._upload_and_run()
                self.device.wait()

    def sample(self, head: SamplingHead, requests: Sequence[SamplingRequest]) -> tuple[Ints, Floats]:
        """Run the pass if it is queued, and sample tokens from its logits.

        Returns:
            Tokens and scores, both `[requests, nodes, num_best]`. `nodes` is the largest number of nodes of a request,
            plus padding.
        """
        with self.device.lock:
            feeds = self.device.make_sampling_inputs(head, self._nodes, requests)
            sampler = self._get_sampler(head, feeds)
            self._buffer.stage_arrays(sampler.inputs, feeds)
            self._upload_and_run()
            sampler.run()
            codes, scores = sampler.samples.numpy().copy()  # for provider `cpu`, `numpy()` is a view of the output
        scores[scores <= FILTERED_OUT / 2] = -np.inf  # the graph gives excluded tokens a finite score
        return codes.astype(np.int64), scores

    def _upload_and_run(self) -> None:
        waiting = self._queued_inputs.pop() if self._queued_inputs else None
        if waiting is not None:
            self._buffer.stage_arrays(self._inputs, waiting[0])
        self._buffer.upload_staged()  # also uploads inputs of sampling, which `sample` staged
        if waiting is not None:
            self._run()

    def _get_sampler(self, head: SamplingHead, feeds: Mapping[str, Any]) -> BoundSampler:
        """Return the sampling graph bound to the logits of this pass; it is bound at first use."""
        shape = feeds["conditional"].shape
        sampler = self._samplers.pop((head, shape), None)
        noise_table = feeds.get("noise")
        # A larger noise table may have replaced the table.
        if sampler is None or sampler.noise_table is not noise_table:
            inputs = self._buffer.allocate_tensors(_select_host_arrays(feeds), self._sampler_offset)
            drawn = self.device.empty((2, *shape, head.num_best), "float32")
            values = {**feeds, **inputs, "logits": self.outputs["logits"], "drawn": drawn}
            run = self.device.get_helper_graph(head, head.write_graph, allow_graph_capture=True).bind_tensors(
                values, self._capture_graph, wait=True
            )
            sampler = BoundSampler(noise_table, inputs, drawn, run)
        self._samplers[head, shape] = sampler
        if len(self._samplers) > _MAX_SAMPLERS:  # the first key is the least recently used
            del self._samplers[next(iter(self._samplers))]
        return sampler


def _select_host_arrays(feeds: Mapping[str, Any]) -> dict[str, Array]:
    return {name: value for name, value in feeds.items() if isinstance(value, np.ndarray)}


@dataclass(eq=False)
class CacheBlock:
    """Device memory for the keys and values of a cache, and the forward passes that are bound to this memory."""

    # Number of batch rows, number of columns, and shape of a column. If heads are stored separately, the number of
    # columns is the sum over all heads.
    shape: tuple[int, ...]
    # OrtValues for keys of layer 0, values of layer 0, keys of layer 1, ...; a single OrtValue with all of these if
    # heads are stored separately.
    device_tensors: list[Any]
    # Bound passes. A key is the shape of a pass, followed by its number among passes of this shape.
    bound_passes: dict[tuple[int, ...], BoundForwardPass] = field(default_factory=dict)
    # Whether other caches may use the block later. False: the block may contain NaN, which masks do not hide.
    is_reusable: bool = True


class CachePool:
    """Pool of the cache blocks of an engine, which reuses a block after its cache is released.

    Without `num_cache_heads`, a column contains all heads, and each tensor of keys or values is an OrtValue
    `[rows, columns, parts, part]`. Otherwise heads are stored separately, and `column_width` is the width of one. All
    tensors are then one OrtValue `[tensors, rows, num_cache_heads * columns, width]`, so that one operation moves the
    entries of all tensors.
    """

    def __init__(
        self, device: OrtDevice, num_tensors: int, dtype: str, column_width: int, num_cache_heads: int | None
    ) -> None:
        self.device = device
        self._tensors = num_tensors
        self._dtype = dtype
        self._column = (column_width,) if num_cache_heads else choose_column_part_shape(column_width)
        self._heads = num_cache_heads
        self._unused: OrderedDict[int, CacheBlock] = OrderedDict()  # the block released first comes first
        self._lock = threading.RLock()  # a block may be released while another is acquired, even on one thread

    def acquire_block(self, num_rows: int, num_columns: int) -> BlockHandle:
        """Return a handle of a block that has only finite numbers, as masks do not hide NaN."""
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
        """Return all tensors of a block; those of separate heads are views `[rows, heads, columns, width]`."""
        if self._heads is None:
            return block.device_tensors
        rows, lines, width = block.shape
        size = [rows, self._heads, lines // self._heads, width]
        bytes_each = prod(size) * np.dtype(self._dtype).itemsize
        # One OrtValue contains all tensors, one after another.
        starts = [number * bytes_each for number in range(self._tensors)]
        return [TensorView(value, start, size, self._dtype) for value in block.device_tensors for start in starts]

    def gather_rows(self, sources: Sequence[tuple[CacheBlock, Ints]], target: CacheBlock) -> None:
        for i, value in enumerate(target.device_tensors):
            rows_of = [(block.device_tensors[i], rows) for block, rows in sources]
            self.device.gather_rows(rows_of, value, axis=0 if self._heads is None else 1)

    def move_entries(self, block: CacheBlock, sources: Ints, targets: Ints, column_offsets: Ints) -> None:
        """Copy entries to other columns of a block, in all tensors. Heads must be stored separately.

        `sources` and `targets` are row and column of each entry, `[entries, 2]`. The copy is repeated for each head,
        whose columns begin at `column_offsets`.
        """
        # Indices are tensor, row and column: [tensors, heads, 3].
        offsets = np.zeros((self._tensors, len(column_offsets), 3), np.int64)
        offsets[..., 0] = np.arange(self._tensors)[:, None]
        offsets[..., 2] = column_offsets
        first_sources, first_targets = (np.pad(entries, ((0, 0), (1, 0))) for entries in (sources, targets))
        for value in block.device_tensors:
            self.device.move_vectors(value, first_sources, first_targets, offsets.reshape(-1, 3))

    def get_bound_pass(
        self, block: CacheBlock, shape: tuple[int, ...], make_bound_pass: Callable[[], BoundForwardPass]
    ) -> BoundForwardPass:
        """Return a pass of a shape that is bound to a block, and whose outputs nothing refers to."""
        # While outputs of earlier passes are referenced, several passes of one shape are bound, numbered from 0.
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
    """Handle of a cache block. When the handle is garbage-collected, the block returns to its pool."""

    block: CacheBlock
