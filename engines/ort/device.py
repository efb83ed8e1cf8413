"""Memory of a device, and small graphs (helper graphs) that ONNX Runtime runs there besides decoders.

Helper graphs copy and move vectors, and sample tokens. Values are OrtValues of ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ...runtime.device import SamplingRequest
from ...runtime.engine import Floats, Ints
from ...runtime.noise import GROUP_SIZE, Noise
from ..columns import compute_padded_node_count
from ..contracts import Array, TensorSpec
from ..gpu import find_gpu
from ..graph_writer import GraphWriter, choose_column_part_shape
from ..host import count_usable_cores, import_onnxruntime
from ..sampling_head import SamplingHead
from .providers import DEVICE_LOCKS, find_available_provider
from .session import GraphSession

_DTYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}
_CUDNN_CAPABILITY = 90  # minimum compute capability, times 10, for which ONNX Runtime prefers cuDNN for attention
_MIN_GROUPS = 32  # minimum number of groups of positions in a noise table
_MAX_THREADS = 4  # maximum number of threads that generate noise
GraphTensors = tuple[list[TensorSpec], list[TensorSpec]]  # inputs and outputs of a graph


class OrtDevice:
    """Device of an execution provider, on which ONNX Runtime allocates memory and runs helper graphs.

    A thread must hold `lock` while it uses the device.
    """

    def __init__(self, provider: str) -> None:
        chosen = find_available_provider(provider, import_onnxruntime())
        self.provider = provider
        self.name = chosen.memory_device
        self.basic_ops_only = chosen.basic_ops_only
        self.supports_views = chosen.supports_views
        self.lock = DEVICE_LOCKS[provider]
        self._graphs: dict[object, GraphSession] = {}
        self._noise: dict[int, NoiseTable] = {}  # keys are vocabulary sizes
        self._wait_value: Any = None

    def get_helper_graph(
        self, key: object, write_graph: Callable[[GraphWriter], GraphTensors], allow_graph_capture: bool = False
    ) -> GraphSession:
        if key not in self._graphs:
            writer = GraphWriter()
            where = Path(f"helper graph {key}")
            inputs, outputs = write_graph(writer)
            model = writer.to_bytes(inputs, outputs)
            self._graphs[key] = GraphSession(where, inputs, outputs, 1, self.provider, model, allow_graph_capture)
        return self._graphs[key]

    def run_helper_graph(
        self,
        key: object,
        write_graph: Callable[[GraphWriter], GraphTensors],
        values: Mapping[str, Any],
        wait: bool = True,
        allow_graph_capture: bool = False,
    ) -> None:
        """Run the helper graph of a key, on OrtValues by name; inputs may also be NumPy arrays."""
        with self.lock:
            self.get_helper_graph(key, write_graph, allow_graph_capture).bind_tensors(values)()
            if wait:
                self.wait()

    def has_cudnn_attention(self) -> bool:
        """Return whether MultiHeadAttention runs with cuDNN in half precision, up to 4 times as fast as without."""
        gpu = find_gpu() if self.provider == "cuda" else None
        return gpu is not None and int(gpu.compute_capability.removeprefix("SM")) >= _CUDNN_CAPABILITY

    def upload(self, array: Array) -> Any:
        with self.lock:
            return import_onnxruntime().OrtValue.ortvalue_from_numpy(array, self.name, 0)

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """Allocate an OrtValue on the device without initializing it."""
        values = import_onnxruntime().OrtValue
        with self.lock:
            return values.ortvalue_from_shape_and_type(list(shape), np.dtype(dtype).type, self.name, 0)

    def zeros(self, shape: Sequence[int], dtype: str) -> Any:
        """Return an OrtValue of zeros. They are written on the device, without an upload."""

        def write_graph(graph: GraphWriter) -> GraphTensors:
            graph.op("Expand", graph.add_constant(np.zeros(1, dtype)), "shape", name="out")
            return [TensorSpec("shape", ("int64",), (len(shape),))], [TensorSpec("out", (dtype,), (None,) * len(shape))]

        out = self.empty(shape, dtype)
        self.run_helper_graph(
            ("zeros", len(shape), dtype), write_graph, {"shape": np.array(shape, np.int64), "out": out}
        )
        return out

    def read_vectors(self, value: Any, indices: Ints) -> Floats:
        """Copy vectors of `value [rows, nodes, width]` to the host, float32 `[*indices.shape, width]`.

        `indices` are those in the flattened first two axes of `value`.
        """
        dtype = get_value_dtype(value)
        width = value.shape()[2]

        def write_graph(graph: GraphWriter) -> GraphTensors:
            graph.op("Gather", graph.reshape("data", -1, width), "indices", name="out")
            inputs = [TensorSpec("data", (dtype,), (None, None, width)), TensorSpec("indices", ("int64",), (None,))]
            return inputs, [TensorSpec("out", (dtype,), (None, width))]

        with self.lock:
            out = self.empty((indices.size, width), dtype)
            self.run_helper_graph(
                ("read", dtype, width), write_graph, {"data": value, "indices": indices.ravel(), "out": out}, wait=False
            )
            rows: Floats = out.numpy().reshape(*indices.shape, width).astype(np.float32)
        return rows

    def gather_rows(self, sources: Sequence[tuple[Any, Ints]], target: Any, axis: int) -> None:
        """Copy rows of several OrtValues to `target`. Columns that a source does not have become zeros.

        `sources` are OrtValues and the rows to copy from each, in the order of the rows of `target`. A source has the
        number of axes and the type of `target`, and at most as many columns. The axis of columns follows `axis`, that
        of rows.
        """
        dtype = get_value_dtype(target)
        shape = target.shape()
        free: list[int | None] = [None if i in (axis, axis + 1) else size for i, size in enumerate(shape)]

        def write_graph(graph: GraphWriter) -> GraphTensors:
            inputs = []
            padded = []
            for i in range(len(sources)):
                padded.append(graph.op("Pad", graph.op("Gather", f"data_{i}", f"rows_{i}", axis=axis), f"pads_{i}"))
                inputs.append(TensorSpec(f"data_{i}", (dtype,), tuple(free)))
                inputs.append(TensorSpec(f"rows_{i}", ("int64",), (None,)))
                inputs.append(TensorSpec(f"pads_{i}", ("int64",), (2 * len(shape),)))
            graph.op("Concat", *padded, name="out", axis=axis)
            return inputs, [TensorSpec("out", (dtype,), tuple(free))]

        values: dict[str, Any] = {"out": target}
        for i, (value, rows) in enumerate(sources):
            pads = np.zeros((2, len(shape)), np.int64)
            pads[1, axis + 1] = shape[axis + 1] - value.shape()[axis + 1]
            values |= {f"data_{i}": value, f"rows_{i}": rows, f"pads_{i}": pads.ravel()}
        self.run_helper_graph(("gather", dtype, tuple(free), len(sources)), write_graph, values)

    def write_noise(self, table: Any, group_index: int, noise: Floats) -> None:
        parts, part = table.shape()[2:]

        def write_graph(graph: GraphWriter) -> GraphTensors:
            indices = graph.write_column_part_indices("places", parts)
            graph.scatter_column_parts("table", indices, "noise", (parts, part), "out")
            shape = (None, GROUP_SIZE, parts, part)
            inputs = [TensorSpec("table", ("float32",), shape), TensorSpec("places", ("int64",), (1, GROUP_SIZE, 1, 3))]
            inputs.append(TensorSpec("noise", ("float32",), (1, GROUP_SIZE, parts * part)))
            return inputs, [TensorSpec("out", ("float32",), shape)]

        places = np.zeros((1, GROUP_SIZE, 1, 3), np.int64)
        places[..., 0] = group_index
        places[0, :, 0, 1] = np.arange(GROUP_SIZE)  # indices of group, position and first part (0)
        values = {"table": table, "places": places, "noise": noise[None], "out": table}
        # `allow_graph_capture` is set because WebGPU computes int64 only in sessions that may record.
        self.run_helper_graph(("noise", parts, part), write_graph, values, wait=False, allow_graph_capture=True)

    def move_vectors(self, value: Any, sources: Ints, targets: Ints, index_offsets: Ints) -> None:
        """Copy vectors of `value [tensors, rows, columns, width]`; all are read before the first is overwritten.

        `sources` and `targets` are indices (tensor, row, column), int64 `[vectors, 3]`. The copy is repeated for each
        of the `index_offsets`, int64 `[offsets, 3]`, which are added to them.
        """
        dtype = get_value_dtype(value)
        width = value.shape()[3]

        def write_graph(graph: GraphWriter) -> GraphTensors:
            offsets = graph.add_constant(index_offsets[:, None])  # [offsets, 1, 3]
            moved = graph.op("GatherND", "data", graph.op("Add", offsets, "sources"))
            graph.op("ScatterND", "data", graph.op("Add", offsets, "targets"), moved, name="out")
            cache = (None, None, None, width)
            ids = ("int64",)
            inputs = [
                TensorSpec("data", (dtype,), cache),
                *(TensorSpec(n, ids, (None, 3)) for n in ("sources", "targets")),
            ]
            return inputs, [TensorSpec("out", (dtype,), cache)]

        values = {"data": value, "sources": sources, "targets": targets, "out": value}
        self.run_helper_graph(("move", dtype, width, index_offsets.tobytes()), write_graph, values)

    def make_sampling_inputs(
        self, head: SamplingHead, nodes_per_row: int, requests: Sequence[SamplingRequest]
    ) -> dict[str, Any]:
        """Return the inputs of a sampling graph by name, except the logits. The caller must hold `lock`."""
        nodes = compute_padded_node_count(max(len(request.positions) for request in requests))
        logit_ids = np.zeros((2, len(requests), nodes), np.int32)  # [conditional or unconditional, images, nodes]
        guidance_scales = np.ones((len(requests), nodes, 1), np.float32)
        for i, request in enumerate(requests):
            count = len(request.positions)
            # indices in the logits of the pass, flattened to [rows * nodes_per_row, vocab_size]
            logit_ids[:, i, :count] = request.rows * nodes_per_row + request.nodes
            guidance_scales[i, :count, 0] = request.guidance_scales
        feeds: dict[str, Any] = {
            "conditional": logit_ids[0],
            "unconditional": logit_ids[1],
            "cfg_scale": guidance_scales,
            **head.make_setting_inputs([request.sampling for request in requests]),
        }
        if head.add_noise:
            table = self._noise.get(head.vocab_size) or NoiseTable(self, head.vocab_size)
            self._noise[head.vocab_size] = table
            feeds["noise_ids"] = table.find_noise_ids(requests, nodes)
            feeds["noise"] = table.value
        return feeds

    def wait(self) -> None:
        """Wait until the device has done all work of this thread, by copying a number from the device."""
        if self._wait_value is None:
            self._wait_value = self.upload(np.zeros(1, np.float32))
        self._wait_value.numpy()


class NoiseTable:
    """Table of Gumbel noise on a device, `[groups, GROUP_SIZE, parts, part]`, for a codebook of `vocab_size` tokens.

    A group contains the noise of `GROUP_SIZE` positions of a seed. When the table is full, a new group replaces the
    least recently used group.
    """

    def __init__(self, device: OrtDevice, vocab_size: int) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self.value = None
        # Index in the table by seed and group of positions; the first key is the least recently used.
        self._indices: dict[tuple[int, int], int] = {}
        self._free: list[int] = []
        self._threads = ThreadPoolExecutor(min(_MAX_THREADS, count_usable_cores()), "noise")

    def find_noise_ids(self, requests: Sequence[SamplingRequest], num_nodes: int) -> Array:
        """Return the index of the noise of each node, `group * GROUP_SIZE + position`, int32 `[requests, num_nodes]`.

        Noise that the table lacks is uploaded. Other threads then generate the noise of the next group, as it will
        probably be needed soon.
        """
        needed: dict[tuple[int, int], Noise] = {}
        places = [[divmod(position, GROUP_SIZE) for position in request.positions.tolist()] for request in requests]
        for request, request_places in zip(requests, places, strict=True):
            if request.noise is not None:
                needed |= {(request.noise.seed, group): request.noise for group, _ in request_places}
        if len(needed) > len(self._indices) + len(self._free):
            self._allocate_noise_groups(max(_MIN_GROUPS, 2 * len(needed)))
        # The groups in use move to the end. The first key is then the least recently used group, to be replaced first.
        self._indices |= {key: self._indices.pop(key) for key in needed if key in self._indices}
        for key in [key for key in needed if key not in self._indices]:
            index = self._free.pop() if self._free else self._indices.pop(next(iter(self._indices)))
            self._indices[key] = index
            _, group = key
            noise = needed[key]
            self.device.write_noise(self.value, index, noise.gumbel(group * GROUP_SIZE, GROUP_SIZE, self.vocab_size))
            self._threads.submit(noise.prepare_noise_group, group + 1, self.vocab_size)
        ids = np.zeros((len(requests), num_nodes), np.int32)
        for row, request, request_places in zip(ids, requests, places, strict=True):
            if request.noise is not None:
                seed = request.noise.seed
                indices = [self._indices[seed, group] * GROUP_SIZE + position for group, position in request_places]
                row[: len(indices)] = indices
        return ids

    def _allocate_noise_groups(self, num_groups: int) -> None:
        self.value = self.device.zeros((num_groups, GROUP_SIZE, *choose_column_part_shape(self.vocab_size)), "float32")
        self._indices = {}
        self._free = list(range(num_groups))


def get_value_dtype(value: Any) -> str:
    return _DTYPES[value.data_type()]
