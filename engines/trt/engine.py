"""Decoder engines and graph functions that run TensorRT engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...bundle.manifest import DecoderSizes, DecoderSpec
from ...runtime.engine import Floats
from ..columns import compute_padded_node_count
from ..contracts import Array, TensorSpec
from ..decoder_tensors import declare_device_tensors
from ..device_engine import DeviceCache, DeviceEngine
from ..ort.device import OrtDevice
from ..profiles import count_profile_columns
from .executable import TensorRTExecutable


class TensorRTEngine(DeviceEngine):
    """Decoder engine that runs a TensorRT engine, whose caches have the number of columns that it was built for."""

    def __init__(
        self,
        executables: Sequence[TensorRTExecutable],
        spec: DecoderSizes,
        code_embeddings: Floats | None,
        device: OrtDevice,
    ) -> None:
        dtypes = (spec.dtype,) if isinstance(spec, DecoderSpec) else ("float32", "float16")
        self._executable = executables[0]
        self._columns = count_profile_columns(self._executable.profiles)
        inputs, outputs = declare_device_tensors(spec, dtypes, self._columns)
        for executable in executables:
            executable.check_tensors(inputs, outputs)
        dtype = np.dtype(self._executable.dtypes["hidden_states"]).name
        super().__init__(executables, inputs, spec, code_embeddings, device, dtype, num_cache_heads=spec.num_kv_heads)

    def make_cache(self, rows: int, capacity: int) -> DeviceCache:
        self._executable.check_axis_fits_profile("rows", rows)
        # The profile may have fewer columns than the capacity: the nodes of the last pass come last, and no later pass
        # reads their columns.
        self._executable.check_axis_fits_profile("columns", capacity - self._max_nodes() - 2)
        return DeviceCache(self._pool, rows, capacity, self._columns)

    def compute_padded_node_count(self, cache: DeviceCache, num_nodes: int) -> int:
        for name, size in (
            ("rows", len(cache.lengths)),
            ("nodes", num_nodes),
            ("columns", cache.count_attended_columns(num_nodes)),
        ):
            self._executable.check_axis_fits_profile(name, size)
        # Padding nodes, too, must fit the profile and the columns after the longest row.
        return min(
            compute_padded_node_count(num_nodes),
            self._max_nodes(),
            cache.num_columns - int(cache.lengths.max(initial=0)),
        )

    def _max_nodes(self) -> int:
        return max(profile.nodes[2] for profile in self._executable.profiles)


class TensorRTFunction:
    """Function that runs a graph without a KV cache, several times if the engine was built for fewer rows."""

    def __init__(
        self,
        executable: TensorRTExecutable,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        device: OrtDevice,
    ) -> None:
        executable.check_tensors(inputs, outputs)
        self._executable = executable
        self._outputs = outputs
        self._device = device

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        max_rows = self._executable.profiles[0].rows[2]
        results: list[list[Array]] = []
        with self._device.lock:  # while another engine records a CUDA graph, nothing else may allocate memory
            for start in range(0, len(next(iter(feeds.values()))), max_rows):
                parts = {name: array[start : start + max_rows] for name, array in feeds.items()}
                rows = len(next(iter(parts.values())))
                values = {
                    name: self._device.upload(np.ascontiguousarray(array, self._executable.dtypes[name]))
                    for name, array in parts.items()
                }
                for tensor in self._outputs:
                    shape = [size if isinstance(size, int) else rows for size in tensor.shape]
                    values[tensor.name] = self._device.empty(shape, np.dtype(self._executable.dtypes[tensor.name]).name)
                self._executable.bind_tensors(values)()
                results.append([values[tensor.name].numpy() for tensor in self._outputs])
        return [np.concatenate(arrays) for arrays in zip(*results, strict=True)]
