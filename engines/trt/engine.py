"""TensorRT plans as engines of the decode loop, and as functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...bundle.manifest import DecoderSpec, DrafterSpec
from ...runtime.engine import Floats
from ..columns import padded_node_count
from ..contracts import Array, Tensor
from ..decoder_tensors import device_tensors
from ..device_engine import DeviceCache, DeviceEngine
from ..ort.device import Device
from ..profiles import capacity_of
from .executable import TensorRTExecutable


class TensorRTEngine(DeviceEngine):
    """A decoder plan. All its caches have as many columns as it was built for, tensor by tensor in one value."""

    def __init__(
        self, plan: TensorRTExecutable, spec: DecoderSpec | DrafterSpec, code_embeddings: Floats | None, device: Device
    ) -> None:
        dtypes = (spec.dtype,) if isinstance(spec, DecoderSpec) else ("float32", "float16")
        self._plan, self._columns = plan, capacity_of(plan.profiles)
        inputs, outputs = device_tensors(spec, code_embeddings is None, dtypes, self._columns)
        plan.check_tensors(inputs, outputs)
        dtype = np.dtype(plan.dtypes["hidden_states"]).name
        super().__init__(plan, inputs, spec, code_embeddings, device, dtype, heads=spec.num_kv_heads)

    def new_cache(self, rows: int, capacity: int) -> DeviceCache:
        self._plan.check_size("rows", rows)
        largest = max(profile.nodes[2] for profile in self._plan.profiles)
        self._plan.check_size("columns", capacity - largest - 2)  # what comes after the largest pass is never read
        return DeviceCache(self._pool, rows, capacity, self._columns)

    def fit(self, cache: DeviceCache, nodes: int) -> int:
        for name, wanted in (("rows", len(cache.lengths)), ("nodes", nodes), ("columns", cache.span(nodes))):
            self._plan.check_size(name, wanted)
        most = max(profile.nodes[2] for profile in self._plan.profiles)
        return min(padded_node_count(nodes), most, cache.columns - int(cache.lengths.max(initial=0)))


class TensorRTFunction:
    """A plan that is one call over rows, such as the image decoder; more rows than it was built for go in turns."""

    def __init__(
        self, plan: TensorRTExecutable, inputs: Sequence[Tensor], outputs: Sequence[Tensor], device: Device
    ) -> None:
        plan.check_tensors(inputs, outputs)
        self._plan, self._outputs, self._device = plan, outputs, device

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs, in the order in which they were declared."""
        most, results = self._plan.profiles[0].rows[2], list[list[Array]]()
        with self._device.lock:  # while another plan is recorded, nothing else may take memory
            for start in range(0, len(next(iter(feeds.values()))), most):
                parts = {name: array[start : start + most] for name, array in feeds.items()}
                rows = len(next(iter(parts.values())))
                values = {
                    name: self._device.put(np.ascontiguousarray(array, self._plan.dtypes[name]))
                    for name, array in parts.items()
                }
                for tensor in self._outputs:
                    shape = [size if isinstance(size, int) else rows for size in tensor.shape]
                    values[tensor.name] = self._device.empty(shape, np.dtype(self._plan.dtypes[tensor.name]).name)
                self._plan.bind(values)()
                results.append([values[tensor.name].numpy() for tensor in self._outputs])
        return [np.concatenate(arrays) for arrays in zip(*results, strict=True)]
