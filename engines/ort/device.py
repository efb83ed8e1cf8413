"""Decoder graphs in ONNX Runtime with everything large left on the device: caches, logits, hidden states.

Per pass, embeddings, positions and masks go to the device; back come only the rows that the decode loop looks
at. Accepted nodes are appended by one small graph that scatters into the cache where it lies.

The same code runs on the host's memory (`device="cpu"`), where tests compare it with the plain engine. Does not
know trees or acceptance.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ...runtime.engine import Cache, Floats, Ints, Pass, PassOutput
from ..decoder_tensors import check_span
from ..kv_cache import Halves, KVCache, round_up
from .engine import OrtEngine
from .graph_bytes import Value, model_bytes, node_bytes
from .session import Array, import_onnxruntime, load_helper


class DeviceRows:
    """Rows `[rows, nodes, width]` on a device. Indexing the first two axes copies just those rows, as float32."""

    def __init__(self, value: Any, gather: Any, device: str) -> None:
        rows, nodes, self._width = value.shape()
        self._value, self._gather, self._device = value, gather, device
        self._places = np.arange(rows * nodes).reshape(rows, nodes)

    def __getitem__(self, key: Any) -> Floats:
        places: Ints = np.asarray(self._places[key])
        binding = self._gather.io_binding()
        _bind(binding, "data", self._value, (self._places.size, self._width))
        wanted = np.ascontiguousarray(places.ravel(), np.int64)  # a name: bindings hold no reference
        binding.bind_cpu_input("places", wanted)
        binding.bind_output("chosen", "cpu")
        self._gather.run_with_iobinding(binding)
        (chosen,) = binding.copy_outputs_to_cpu()
        found: Floats = chosen.reshape(*places.shape, self._width).astype(np.float32, copy=False)
        return found


@dataclass
class DeviceCache(KVCache):
    """The cache of `kv_cache.py`, in a device's memory: `tensors` are ONNX Runtime values of the same shapes."""

    helper: Any = None
    device: str = "cpu"

    def past(self, past_length: int) -> list[Halves]:
        """Not for device memory: passes bind the tensors themselves."""
        raise TypeError("a cache on a device has no NumPy views")

    def append(self, new_kv: list[Any], accepted_indices: list[Ints]) -> None:
        """Append nodes `accepted_indices[r]` of `new_kv` to each row r, all tensors in one run of the helper graph."""
        counts = self.check_picks(accepted_indices)
        if not counts.sum():
            return
        rows = len(self.lengths)
        row = np.repeat(np.arange(rows), counts)
        column = np.concatenate([np.arange(n) + start for n, start in zip(counts, self.lengths, strict=True)])
        binding = self.helper.io_binding()
        source, target = np.concatenate(accepted_indices) * rows + row, (column * rows + row)[:, None]
        binding.bind_cpu_input("source", source)
        binding.bind_cpu_input("target", target)
        for i, (tensor, new) in enumerate(zip(self.tensors, new_kv, strict=True)):
            _bind(binding, f"fresh.{i}", new, _flat(new))
            _bind(binding, f"cache.{i}", tensor, _flat(tensor))
            _bind(binding, f"joined.{i}", tensor, _flat(tensor), output=True)  # the same memory: nothing is copied
        self.helper.run_with_iobinding(binding)
        self.lengths = self.lengths + counts

    def keep_rows(self, rows: Ints) -> None:
        """Keep only these rows, in this order; by way of the host, for it happens once per finished image."""
        self.lengths = self.lengths[rows]
        self.tensors = [
            _to_device(np.ascontiguousarray(_host(tensor)[:, rows]), self.device) for tensor in self.tensors
        ]


class OrtDeviceEngine(OrtEngine):
    """A decoder graph whose keys, values, logits and hidden states stay on `device` (`cuda`, or `cpu`)."""

    device = "cuda"

    def new_cache(self, rows: int, capacity: int) -> DeviceCache:
        """An empty cache in device memory, all of it taken at once."""
        spec = self.spec
        shape = (round_up(max(1, capacity)), rows, spec.num_kv_heads, spec.head_dim)
        zeros = [
            np.zeros(shape, self._kv_dtype) for _ in range(2 * spec.num_layers)
        ]  # on the host they become the cache
        tensors = cast(list[Halves], [_to_device(tensor, self.device) for tensor in zeros])
        return DeviceCache(
            tensors, np.zeros(rows, np.int64), capacity, helper=self._helpers["append"], device=self.device
        )

    def run(self, batch: Pass, cache: Cache) -> PassOutput:
        """Run one pass; logits and hidden states come back as `DeviceRows`."""
        if not isinstance(cache, DeviceCache):
            raise TypeError(f"a cache of another engine: {type(cache).__name__}")
        past_length = check_span(batch, cache)
        binding = self._graph.session.io_binding()
        inputs = {name: _to_device(array, self.device) for name, array in self.node_inputs(batch).items()}
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, tensor in zip(self._past, cache.tensors, strict=True):
            _bind(binding, name, tensor, (past_length, *_shape(tensor)[1:]))
        for name in self._graph.output_names:
            binding.bind_output(name, self.device)
        start = time.perf_counter()
        self._graph.run_bound(binding)
        cache.seconds += time.perf_counter() - start
        cache.passes += 1
        logits, hidden, *new_kv = binding.get_outputs()
        logits_rows = DeviceRows(logits, self._helpers["logits"], self.device)
        return PassOutput(logits_rows, DeviceRows(hidden, self._helpers["hidden"], self.device), new_kv)

    @property
    def _helpers(self) -> dict[str, Any]:
        if "_loaded" not in self.__dict__:
            self._loaded = self._load_helpers()
        return self._loaded

    def _load_helpers(self) -> dict[str, Any]:
        spec, entry = self.spec, (self.spec.num_kv_heads, self.spec.head_dim)
        kinds = {name: np.dtype(self._graph.dtypes[name]).name for name in ("logits", "hidden_states")}
        graphs = {
            "append": _append_graph(2 * spec.num_layers, entry, np.dtype(self._kv_dtype).name),
            "logits": _gather_graph(spec.vocab_size, kinds["logits"]),
            "hidden": _gather_graph(spec.hidden_size, kinds["hidden_states"]),
        }
        return {name: load_helper(content, self._graph.provider) for name, content in graphs.items()}


def _append_graph(tensors: int, entry: tuple[int, int], dtype: str) -> bytes:
    """For every tensor: entries `source` of the fresh ones, scattered to places `target` of the cache."""
    nodes, inputs, outputs = [], [("source", "int64", ["count"]), ("target", "int64", ["count", 1])], []
    for i in range(tensors):
        nodes.append(node_bytes("Gather", [f"fresh.{i}", "source"], f"chosen.{i}"))
        nodes.append(node_bytes("ScatterND", [f"cache.{i}", "target", f"chosen.{i}"], f"joined.{i}"))
        inputs += [(f"fresh.{i}", dtype, ["new", *entry]), (f"cache.{i}", dtype, ["places", *entry])]
        outputs.append((f"joined.{i}", dtype, ["places", *entry]))
    return model_bytes(nodes, cast(list[Value], inputs), cast(list[Value], outputs))


def _gather_graph(width: int, dtype: str) -> bytes:
    inputs: list[Value] = [("data", dtype, ["all", width]), ("places", "int64", ["some"])]
    return model_bytes(
        [node_bytes("Gather", ["data", "places"], "chosen")], inputs, [("chosen", dtype, ["some", width])]
    )


def _bind(binding: Any, name: str, value: Any, shape: tuple[int, ...], output: bool = False) -> None:
    """Bind the first numbers of a value's memory under another shape."""
    bind = binding.bind_output if output else binding.bind_input
    kind = np.dtype(_NUMPY[value.data_type()])
    bind(name, value.device_name(), 0, kind.type, list(shape), value.data_ptr())


_NUMPY = {"tensor(float)": "float32", "tensor(float16)": "float16"}


def _to_device(array: Array, device: str) -> Any:
    return import_onnxruntime().OrtValue.ortvalue_from_numpy(array, device, 0)


def _host(value: Any) -> NDArray[Any]:
    array: NDArray[Any] = value.numpy()
    return array


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape())


def _flat(value: Any) -> tuple[int, ...]:
    """The shape with the first two axes in one."""
    first, second, *rest = value.shape()
    return (first * second, *rest)
