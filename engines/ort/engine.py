"""Decoder graphs in ONNX Runtime: the target and the drafter as engines of the decode loop.

`OrtEngine` keeps keys and values in NumPy buffers, read in place. `OrtDeviceEngine` leaves everything large on the
device: per pass, embeddings, positions and masks go there; back come only the rows that the decode loop looks at, and
accepted nodes are appended by one small graph that scatters into the cache where it lies. With provider `cpu` its
device is the host's memory, where tests compare the two. An engine may serve several threads, each with caches of its
own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...bundle.manifest import DecoderSpec, DrafterSpec
from ...runtime.engine import Cache, Floats, Ints, Pass, PassOutput
from ..contracts import Array, ThreadOptions
from ..decoder_tensors import NodeInputs, decoder_tensors, kv_dtype, past_length_of
from ..kv_cache import CacheRows, KVCache, own_cache, round_up
from .graph_bytes import Value, model_bytes, node_bytes
from .session import GraphSession, import_onnxruntime, load_helper

_NUMPY = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class OrtEngine:
    """A decoder graph. With a table of code embeddings it is a target; without, a drafter."""

    def __init__(
        self,
        path: Path,
        spec: DecoderSpec | DrafterSpec,
        code_embeddings: Floats | None = None,
        threads: ThreadOptions | None = None,
        provider: str = "cpu",
        optimised: bool = False,
    ) -> None:
        self.spec = spec
        inputs, outputs = decoder_tensors(spec, drafts=code_embeddings is None)
        self._graph = GraphSession(path, inputs, outputs, threads, provider, optimised)
        self._past = [tensor.name for tensor in inputs if tensor.name.startswith("past_key_values.")]
        self._kv_dtype = kv_dtype(path, self._graph.dtypes)
        self.node_inputs = NodeInputs(code_embeddings, self._graph.dtypes)

    def new_cache(self, rows: int, capacity: int) -> Cache:
        """An empty cache for `rows` sequences of at most `capacity` entries each."""
        spec = self.spec
        return KVCache.empty(rows, capacity, spec.num_layers, spec.num_kv_heads, spec.head_dim, self._kv_dtype)

    def next_past_length(self, cache: Cache, nodes: int) -> int:
        """The longest row, rounded up so that sums are formed in one order whatever else is in the batch."""
        return own_cache(cache, CacheRows).past_length()

    def run(self, batch: Pass, cache: Cache) -> PassOutput:
        """Run one pass. Counts itself in `cache.passes` and `cache.seconds`."""
        own = own_cache(cache, KVCache)
        feeds = self.node_inputs(batch)
        feeds.update(zip(self._past, own.past(past_length_of(batch, own)), strict=True))
        start = time.perf_counter()
        logits, features, *new_kv = self._graph.run(feeds)
        own.seconds += time.perf_counter() - start
        own.passes += 1
        return PassOutput(logits.astype(np.float32, copy=False), features.astype(np.float32, copy=False), new_kv)


class DeviceRows:
    """Rows `[rows, nodes, width]` on a device. Indexing the first two axes copies just those rows, as float32."""

    def __init__(self, value: Any, gather: Any) -> None:
        rows, nodes, self._width = value.shape()
        self._value, self._gather = value, gather
        self._places = np.arange(rows * nodes).reshape(rows, nodes)

    def __getitem__(self, key: Any) -> Floats:
        places: Ints = np.asarray(self._places[key])
        binding = self._gather.io_binding()
        _bind(binding.bind_input, "data", self._value, (self._places.size, self._width))
        wanted = np.ascontiguousarray(places.ravel(), np.int64)  # a name: bindings hold no reference
        binding.bind_cpu_input("places", wanted)
        binding.bind_output("chosen", "cpu")
        self._gather.run_with_iobinding(binding)
        (chosen,) = binding.copy_outputs_to_cpu()
        found: Floats = chosen.reshape(*places.shape, self._width).astype(np.float32, copy=False)
        return found


@dataclass
class DeviceCache(CacheRows):
    """Keys and values in a device's memory: ONNX Runtime's values `[columns, rows, num_kv_heads, head_dim]`.

    helper: the session of `_append_graph`.
    """

    tensors: list[Any]
    helper: Any

    def append(self, new_kv: list[Any], accepted_indices: list[Ints]) -> None:
        """Append nodes `accepted_indices[r]` of `new_kv` to each row r, all tensors in one run of the helper graph."""
        source, target, lengths = self.places(accepted_indices)
        if not len(source):
            return
        binding, target = self.helper.io_binding(), target[:, None]
        binding.bind_cpu_input("source", source)
        binding.bind_cpu_input("target", target)
        for i, (tensor, new) in enumerate(zip(self.tensors, new_kv, strict=True)):
            _bind(binding.bind_input, f"new.{i}", new, _flat(new))
            _bind(binding.bind_input, f"cache.{i}", tensor, _flat(tensor))
            _bind(binding.bind_output, f"joined.{i}", tensor, _flat(tensor))  # the same memory: nothing is copied
        self.helper.run_with_iobinding(binding)
        self.lengths = lengths

    def keep_rows(self, rows: Ints) -> None:
        """Keep only these rows, in this order; by way of the host, for it happens once per finished image."""
        self.lengths = self.lengths[rows]
        self.tensors = [
            _to_device(np.ascontiguousarray(tensor.numpy()[:, rows]), tensor.device_name()) for tensor in self.tensors
        ]


class OrtDeviceEngine(OrtEngine):
    """A decoder graph whose keys, values, logits and hidden states stay on the provider's device."""

    @property
    def device(self) -> str:
        """ONNX Runtime's name of the device."""
        return "cuda" if self._graph.provider == "cuda" else "cpu"

    def new_cache(self, rows: int, capacity: int) -> DeviceCache:
        """An empty cache in device memory, all of it taken at once."""
        spec = self.spec
        shape = (round_up(max(1, capacity)), rows, spec.num_kv_heads, spec.head_dim)
        tensors = [_to_device(np.zeros(shape, self._kv_dtype), self.device) for _ in range(2 * spec.num_layers)]
        return DeviceCache(np.zeros(rows, np.int64), capacity, tensors, self._append)

    def run(self, batch: Pass, cache: Cache) -> PassOutput:
        """Run one pass; logits and hidden states come back as `DeviceRows`."""
        own = own_cache(cache, DeviceCache)
        past_length = past_length_of(batch, own)
        binding = self._graph.session.io_binding()
        inputs = {name: _to_device(array, self.device) for name, array in self.node_inputs(batch).items()}
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, tensor in zip(self._past, own.tensors, strict=True):
            _bind(binding.bind_input, name, tensor, (past_length, *tensor.shape()[1:]))
        for name in self._graph.output_names:
            binding.bind_output(name, self.device)
        start = time.perf_counter()
        self._graph.run_bound(binding)
        own.seconds += time.perf_counter() - start
        own.passes += 1
        logits, hidden, *new_kv = binding.get_outputs()
        return PassOutput(DeviceRows(logits, self._gather_logits), DeviceRows(hidden, self._gather_hidden), new_kv)

    @cached_property
    def _append(self) -> Any:
        entry, dtype = (self.spec.num_kv_heads, self.spec.head_dim), np.dtype(self._kv_dtype).name
        return load_helper(_append_graph(2 * self.spec.num_layers, entry, dtype), self._graph.provider)

    @cached_property
    def _gather_logits(self) -> Any:
        return self._gather("logits", self.spec.vocab_size)

    @cached_property
    def _gather_hidden(self) -> Any:
        return self._gather("hidden_states", self.spec.hidden_size)

    def _gather(self, name: str, width: int) -> Any:
        """A session that takes rows `places` of an output `data [all, width]`."""
        dtype = np.dtype(self._graph.dtypes[name]).name
        inputs: list[Value] = [("data", dtype, ["all", width]), ("places", "int64", ["some"])]
        node = node_bytes("Gather", ["data", "places"], "chosen")
        return load_helper(model_bytes([node], inputs, [("chosen", dtype, ["some", width])]), self._graph.provider)


def _append_graph(tensors: int, entry: tuple[int, int], dtype: str) -> bytes:
    """For every tensor: entries `source` of the new ones, scattered to places `target` of the cache."""
    nodes: list[bytes] = []
    inputs: list[Value] = [("source", "int64", ["count"]), ("target", "int64", ["count", 1])]
    outputs: list[Value] = []
    for i in range(tensors):
        nodes.append(node_bytes("Gather", [f"new.{i}", "source"], f"chosen.{i}"))
        nodes.append(node_bytes("ScatterND", [f"cache.{i}", "target", f"chosen.{i}"], f"joined.{i}"))
        inputs += [(f"new.{i}", dtype, ["new", *entry]), (f"cache.{i}", dtype, ["places", *entry])]
        outputs.append((f"joined.{i}", dtype, ["places", *entry]))
    return model_bytes(nodes, inputs, outputs)


def _bind(bind: Any, name: str, value: Any, shape: tuple[int, ...]) -> None:
    """Bind the first numbers of a value's memory under another shape."""
    bind(name, value.device_name(), 0, _NUMPY[value.data_type()], list(shape), value.data_ptr())


def _to_device(array: Array, device: str) -> Any:
    return import_onnxruntime().OrtValue.ortvalue_from_numpy(array, device, 0)


def _flat(value: Any) -> tuple[int, ...]:
    """The shape with the first two axes in one."""
    first, second, *rest = value.shape()
    return (first * second, *rest)
