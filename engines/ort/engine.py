"""Decoder engines of ONNX Runtime: one for CPUs, and one for GPUs and other devices.

The engine for CPUs runs the graph in the bundle, in two parts if it has `PositionVectors`. The engine for devices runs
a graph in the device layout. Several threads may use an engine at once if each thread has separate caches.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...bundle.manifest import DecoderSizes, DecoderSpec
from ...runtime.engine import Cache, Floats, PassInput, PassOutput
from ..columns import compute_padded_node_count
from ..decoder_tensors import build_graph_inputs, check_pass_input, declare_host_tensors, find_kv_dtype
from ..device_engine import DeviceCache, DeviceEngine
from ..device_graph import DeviceGraphOptions, make_device_graph
from ..kv_cache import BaseKVCache, KVCache
from .device import OrtDevice
from .position_vectors import PositionVectors
from .providers import DEFAULT_PROVIDER
from .session import GraphSession


class OrtEngine:
    """Decoder engine for CPUs.

    ONNX Runtime reads keys and values in place from the NumPy arrays of the cache. `code_embeddings` are the embeddings
    of tokens, `[vocab_size, hidden_size]`, of a target; None: a drafter. The graph at `prefix_path`, if any, runs the
    passes over prefixes.
    """

    def __init__(
        self,
        path: Path,
        spec: DecoderSizes,
        code_embeddings: Floats | None = None,
        threads: int | None = None,
        provider: str = DEFAULT_PROVIDER,
        prefix_path: Path | None = None,
    ) -> None:
        self.spec = spec
        inputs, outputs = declare_host_tensors(spec)
        self._vectors = None
        pass_graph = None
        # OpenVINO, with which it was not tried, runs the whole graph in each pass.
        if isinstance(spec, DecoderSpec) and spec.architecture.conditions and provider == DEFAULT_PROVIDER:
            self._vectors = PositionVectors(path, spec, threads)
            inputs += self._vectors.tensors
            pass_graph = self._vectors.extract_graph(inputs, outputs)
        self._graph = GraphSession(path, inputs, outputs, threads, provider, pass_graph)
        self._prefix_graph = self._graph
        if prefix_path is not None:
            # Most weights are the target's. Prepacked, they would take as much memory again, for one pass per image.
            self._prefix_graph = GraphSession(prefix_path, inputs, outputs, threads, provider, prepack=False)
        self._past = [tensor.name for tensor in inputs if tensor.name.startswith("past_key_values.")]
        self._kv_dtype = find_kv_dtype(path, self._graph.dtypes)
        self._embedding_table = code_embeddings
        # Graph, and shape of the attention mask, of passes whose outputs were checked.
        self._checked_shapes: set[tuple[GraphSession, tuple[int, ...]]] = set()

    def make_cache(self, rows: int, capacity: int) -> Cache:
        spec = self.spec
        return KVCache.empty(rows, capacity, spec.num_layers, spec.num_kv_heads, spec.head_dim, self._kv_dtype)

    def past_columns(self, cache: Cache, nodes: int) -> int:
        """Return the length of the longest row, rounded up as `COLUMN_STEP` explains."""
        return BaseKVCache.require_instance(cache).past_length()

    def run(self, batch: PassInput, cache: Cache) -> PassOutput:
        kv_cache = KVCache.require_instance(cache)
        past_length = check_pass_input(batch, kv_cache, self.spec)
        feeds = build_graph_inputs(batch, self._embedding_table, self._graph.dtypes)
        feeds.update(zip(self._past, (tensor[:past_length] for tensor in kv_cache.tensors), strict=True))
        if self._vectors is not None:
            feeds |= self._vectors.look_up(batch.positions, kv_cache)
        graph = self._graph if batch.embeds is None else self._prefix_graph
        # Outputs of a shape are checked once, as checks take time in every pass.
        checked = graph, batch.attention_mask.shape
        run = graph.run if checked in self._checked_shapes else graph.run_and_check
        logits, features, *new_kv = run(feeds)
        self._checked_shapes.add(checked)
        kv_cache.num_passes += 1
        return PassOutput(logits.astype(np.float32, copy=False), features.astype(np.float32, copy=False), new_kv)


class OrtDeviceEngine(DeviceEngine):
    """Decoder engine for a GPU or other device, which runs a graph in the device layout (`device_graph.py`).

    Tests use provider `cpu`, whose device memory is the memory of the host. The arguments are those of `OrtEngine` and
    `DeviceGraphOptions`.
    """

    def __init__(
        self,
        path: Path,
        spec: DecoderSizes,
        code_embeddings: Floats | None,
        threads: int,
        device: OrtDevice,
        dtype: str = "float32",
        max_nodes: int | None = None,
        prefix_path: Path | None = None,
    ) -> None:
        options = DeviceGraphOptions(dtype, device.basic_ops_only, None, max_nodes, device.has_cudnn_attention())
        paths = [path] if prefix_path is None else [path, prefix_path]
        graphs = [make_device_graph(each, spec, options) for each in paths]
        sessions = [
            GraphSession(
                each,
                graph.inputs,
                graph.outputs,
                threads,
                device.provider,
                model_bytes=graph.model_bytes,
                allow_graph_capture=True,
            )
            for each, graph in zip(paths, graphs, strict=True)
        ]
        super().__init__(sessions, graphs[0].inputs, spec, code_embeddings, device, graphs[0].dtype, None)

    def make_cache(self, rows: int, capacity: int) -> DeviceCache:
        return DeviceCache(self._pool, rows, capacity)

    def compute_padded_node_count(self, cache: DeviceCache, num_nodes: int) -> int:
        return compute_padded_node_count(num_nodes)
