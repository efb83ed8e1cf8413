"""Decoder graphs in ONNX Runtime: the target and the drafter as engines of the decode loop.

`OrtEngine` keeps keys and values in NumPy buffers, read in place. `OrtDeviceEngine` leaves everything large on the
device: back come only the rows that the decode loop looks at. With provider `cpu` its device is the host's memory. An
engine may serve several threads, each with caches of its own.
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
from ..contracts import Array
from ..decoder_tensors import decoder_tensors, kv_dtype, node_inputs, past_length_of
from ..host import import_onnxruntime
from ..kv_cache import CacheRows, KVCache
from .graph_bytes import append_graph, gather_graph
from .session import GraphSession, load_session

_NUMPY = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class OrtEngine:
    """A decoder graph. With a table of code embeddings it is a target; without, a drafter."""

    def __init__(
        self,
        path: Path,
        spec: DecoderSpec | DrafterSpec,
        code_embeddings: Floats | None = None,
        threads: int | None = None,
        provider: str = "cpu",
        optimised: bool = False,
        expand_weights: bool = False,
    ) -> None:
        self.spec = spec
        inputs, outputs = decoder_tensors(spec, drafts=code_embeddings is None)
        self._graph = GraphSession(path, inputs, outputs, threads, provider, optimised, expand_weights)
        self._past = [tensor.name for tensor in inputs if tensor.name.startswith("past_key_values.")]
        self._kv_dtype = kv_dtype(path, self._graph.dtypes)
        self._table = code_embeddings
        self._sound: set[tuple[int, ...]] = set()  # shapes of masks whose passes gave outputs of the right shapes

    def new_cache(self, rows: int, capacity: int) -> Cache:
        """An empty cache for `rows` sequences of at most `capacity` entries each."""
        spec = self.spec
        return KVCache.empty(rows, capacity, spec.num_layers, spec.num_kv_heads, spec.head_dim, self._kv_dtype)

    def next_past_length(self, cache: Cache, nodes: int) -> int:
        """The longest row, rounded up so that sums are formed in one order whatever else is in the batch."""
        return CacheRows.own(cache).past_length()

    def run(self, batch: Pass, cache: Cache) -> PassOutput:
        """Run one pass. Counts itself in `cache.passes` and `cache.seconds`."""
        own = KVCache.own(cache)
        feeds = node_inputs(batch, self._table, self._graph.dtypes)
        feeds.update(zip(self._past, own.past(past_length_of(batch, own)), strict=True))
        shape = batch.attention_mask.shape
        start = time.perf_counter()
        logits, features, *new_kv = self._graph.run(feeds) if shape in self._sound else self._checked(feeds, shape)
        own.seconds += time.perf_counter() - start
        own.passes += 1
        return PassOutput(logits.astype(np.float32, copy=False), features.astype(np.float32, copy=False), new_kv)

    def _checked(self, feeds: dict[str, Array], shape: tuple[int, ...]) -> list[Array]:
        """Outputs of the first pass of a shape. Raises: BundleError: they have other shapes than they should."""
        found, (rows, nodes, _) = self._graph.run_checked(feeds), shape
        for i, (name, array) in enumerate(zip(self._graph.output_names, found, strict=True)):
            if array.shape[:2] != (expected := (rows, nodes) if i < 2 else (nodes, rows)):
                raise self._graph.other_shape(name, array.shape, f"{list(expected)} first")
        self._sound.add(shape)
        return found


class DeviceRows:
    """Rows `[rows, nodes, width]` on a device. Indexing the first two axes copies just those rows, as float32."""

    def __init__(self, value: Any, gather: Any) -> None:
        rows, nodes, self._width = value.shape()
        self._value, self._gather = value, gather
        self._places = np.arange(rows * nodes).reshape(rows, nodes)

    def __getitem__(self, key: Any) -> Floats:
        places: Ints = np.asarray(self._places[key])
        binding = self._gather.io_binding()
        _bind(binding.bind_input, "data", self._value)
        wanted = np.ascontiguousarray(places.ravel(), np.int64)  # a name: bindings hold no reference
        binding.bind_cpu_input("places", wanted)
        binding.bind_output("chosen", "cpu")
        self._gather.run_with_iobinding(binding)
        chosen: Floats = binding.copy_outputs_to_cpu()[0].reshape(*places.shape, self._width)
        return chosen.astype(np.float32, copy=False)


@dataclass
class DeviceCache(CacheRows):
    """Keys and values in a device's memory: ONNX Runtime's values `[columns, rows, num_kv_heads, head_dim]`."""

    tensors: list[Any]
    appender: Any  # the session of `append_graph`

    def append(self, new_kv: list[Any], accepted_indices: list[Ints]) -> None:
        """Append nodes `accepted_indices[r]` of `new_kv` to each row r, all tensors in one run."""
        source, target, lengths = self.places(accepted_indices)
        if not len(source):
            return
        binding, target = self.appender.io_binding(), target[:, None]
        binding.bind_cpu_input("source", source)
        binding.bind_cpu_input("target", target)
        for i, (tensor, new) in enumerate(zip(self.tensors, new_kv, strict=True)):
            _bind(binding.bind_input, f"new.{i}", new)
            _bind(binding.bind_input, f"cache.{i}", tensor)
            _bind(binding.bind_output, f"joined.{i}", tensor)  # the same memory: nothing is copied
        self.appender.run_with_iobinding(binding)
        self.lengths = lengths

    def keep_rows(self, rows: Ints) -> None:
        """Keep only these rows, in this order; by way of the host, for it happens once per finished image."""
        self.lengths = self.lengths[rows]
        kept = [np.ascontiguousarray(tensor.numpy()[:, rows]) for tensor in self.tensors]
        self.tensors = [_to_device(array, self.tensors[0].device_name()) for array in kept]

    def extend(self, other: Cache) -> None:
        """Take in the rows of another cache; by way of the host, for it happens once per image."""
        added = DeviceCache.own(other)
        pairs = [(mine.numpy(), its.numpy()) for mine, its in zip(self.tensors, added.tensors, strict=True)]
        self.join(added)
        for i, pair in enumerate(pairs):
            missing = [[(0, self.columns - len(one))] + [(0, 0)] * 3 for one in pair]
            joined = np.concatenate([np.pad(one, left) for one, left in zip(pair, missing, strict=True)], 1)
            self.tensors[i] = _to_device(joined, self.tensors[i].device_name())


class OrtDeviceEngine(OrtEngine):
    """A decoder graph whose keys, values, logits and hidden states stay on the provider's device."""

    @property
    def _device(self) -> str:
        return "cuda" if self._graph.provider == "cuda" else "cpu"

    def new_cache(self, rows: int, capacity: int) -> DeviceCache:
        """An empty cache in device memory, all of it taken at once."""
        cache = DeviceCache(np.zeros(rows, np.int64), capacity, [], self._appender)
        shape = (cache.columns, rows, self.spec.num_kv_heads, self.spec.head_dim)
        cache.tensors = [_to_device(np.zeros(shape, self._kv_dtype), self._device) for _ in self._past]
        return cache

    def run(self, batch: Pass, cache: Cache) -> PassOutput:
        """Run one pass; logits and hidden states come back as `DeviceRows`."""
        own = DeviceCache.own(cache)
        past_length = past_length_of(batch, own)
        binding = self._graph.session.io_binding()
        arrays = node_inputs(batch, self._table, self._graph.dtypes)
        inputs = {name: _to_device(array, self._device) for name, array in arrays.items()}  # a name, as above
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, tensor in zip(self._past, own.tensors, strict=True):
            _bind(binding.bind_input, name, tensor, past_length)
        for name in self._graph.output_names:
            binding.bind_output(name, self._device)
        start = time.perf_counter()
        self._graph.run_bound(binding)
        own.seconds += time.perf_counter() - start
        own.passes += 1
        logits, hidden, *new_kv = binding.get_outputs()
        return PassOutput(DeviceRows(logits, self._gather[0]), DeviceRows(hidden, self._gather[1]), new_kv)

    @cached_property
    def _appender(self) -> Any:
        graph = append_graph(len(self._past), (self.spec.num_kv_heads, self.spec.head_dim), self._kv_dtype)
        return load_session(graph, 1, self._graph.provider)

    @cached_property
    def _gather(self) -> list[Any]:
        """Sessions that gather rows of the logits and of the hidden states."""
        sizes, dtypes = {"logits": self.spec.vocab_size, "hidden_states": self.spec.hidden_size}, self._graph.dtypes
        graphs = [gather_graph(width, dtypes[name]) for name, width in sizes.items()]
        return [load_session(graph, 1, self._graph.provider) for graph in graphs]


def _bind(bind: Any, name: str, value: Any, columns: int | None = None) -> None:
    """Bind the first `columns` of a value, or all of it with its first two axes in one."""
    first, second, *rest = value.shape()
    shape = [first * second, *rest] if columns is None else [columns, second, *rest]
    bind(name, value.device_name(), 0, _NUMPY[value.data_type()], shape, value.data_ptr())


def _to_device(array: Array, device: str) -> Any:
    return import_onnxruntime().OrtValue.ortvalue_from_numpy(array, device, 0)
