"""Test harness of decoder engines: compares an engine with the torch module from which the graph was exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from host_tensorrt import HostTensorRT, write_engine_file
from tiny_graphs import write_graph

from lantern_rt.engines.device_graph import DeviceGraphOptions, make_device_graph
from lantern_rt.engines.ort.device import OrtDevice
from lantern_rt.engines.ort.engine import OrtDeviceEngine, OrtEngine
from lantern_rt.engines.profiles import ShapeProfile, count_profile_columns
from lantern_rt.engines.trt.builder import make_shape_bounds
from lantern_rt.engines.trt.engine import TensorRTEngine
from lantern_rt.engines.trt.executable import TensorRTExecutable
from lantern_rt.export.graph.graphs import make_target_graph
from lantern_rt.export.models.decoder import Decoder, DecoderConfig
from lantern_rt.runtime.engine import PassInput, PassOutput

SINGLE_THREAD = 1
PROFILES = (
    ShapeProfile(name="ar", rows=(1, 2, 4), nodes=(2, 2, 2), columns=(64, 192, 320)),
    ShapeProfile(name="tree", rows=(1, 2, 4), nodes=(2, 12, 24), columns=(64, 192, 320)),
)
WIDE_CONFIG = DecoderConfig(
    hidden_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    intermediate_size=704,
    vocab_size=256,
    grid=24,
    prefix=24,
)  # head width and matrix sizes of a real model, because small matrices use other kernels


class DecoderHarness:
    def __init__(self, folder: Path, config: DecoderConfig, backend: str = "cpu") -> None:
        torch.manual_seed(0)
        self.config = config
        self.torch_decoder = Decoder(config).eval()
        self.path = folder / "target.onnx"
        rng = np.random.default_rng(0)
        self.code_embeddings = rng.normal(size=(config.vocab_size, config.hidden_size)).astype(np.float32)
        self.prefixes = rng.normal(size=(8, config.prefix, config.hidden_size)).astype(np.float32)
        write_graph(make_target_graph(self.torch_decoder, torch.from_numpy(self.code_embeddings)), folder)
        self.engine: Any = self.load_engine(SINGLE_THREAD)
        if backend == "device":
            self.engine = OrtDeviceEngine(
                self.path, config.make_target_spec(), self.code_embeddings, SINGLE_THREAD, OrtDevice("cpu")
            )
        elif backend == "plan":
            self.library = HostTensorRT()
            options = DeviceGraphOptions(capacity=count_profile_columns(PROFILES))
            device_graph = make_device_graph(self.path, config.make_target_spec(), options)
            graph_path = folder / "device.onnx"
            graph_path.write_bytes(device_graph.model_bytes)
            inputs = [
                {
                    tensor.name: make_shape_bounds(tensor.name, tensor.shape, profile, 20_000)
                    for tensor in device_graph.inputs
                }
                for profile in PROFILES
            ]
            self.plan = write_engine_file(graph_path, inputs, self.path.with_suffix(".plan"))
            self.engine = self.load_tensorrt_engine()

    def load_engine(self, threads: int) -> OrtEngine:
        return OrtEngine(self.path, self.config.make_target_spec(), self.code_embeddings, threads)

    def load_tensorrt_engine(
        self, plan: Path | None = None, profiles: tuple[ShapeProfile, ...] = PROFILES, **spec_changes: Any
    ) -> TensorRTEngine:
        executable = TensorRTExecutable(self.library, plan or self.plan, profiles, "lantern-rt build-engine tiny")
        return TensorRTEngine(
            [executable],
            self.config.make_target_spec().model_copy(update=spec_changes),
            self.code_embeddings,
            OrtDevice("cpu"),
        )

    def prefill(self, rows: int, engine: Any = None, capacity: int = 300) -> Any:
        """Run the first `rows` prefixes and return their KV cache."""
        engine = engine or self.engine
        length = self.config.prefix
        cache = engine.make_cache(rows, capacity)
        output = self.run_pass(
            cache, None, np.tril(np.ones((length, length), bool)), np.tile(np.arange(length), (rows, 1)), engine
        )
        cache.append(output.new_kv, [np.arange(length)] * rows)
        return cache

    def run_pass(
        self, cache: Any, tokens: np.ndarray | None, node_mask: np.ndarray, positions: np.ndarray, engine: Any = None
    ) -> PassOutput:
        """Run a forward pass over tokens or prefixes."""
        engine = engine or self.engine
        rows, nodes = positions.shape
        past_length = engine.past_columns(cache, nodes)
        attention_mask = np.zeros((rows, nodes, past_length + nodes), bool)
        attention_mask[:, :, :past_length] = (np.arange(past_length) < cache.lengths[:, None])[:, None]
        attention_mask[:, :, past_length:] = node_mask
        embeds = self.prefixes[:rows] if tokens is None else None
        return engine.run(
            PassInput(positions=positions, attention_mask=attention_mask, tokens=tokens, embeds=embeds), cache
        )

    def append_codes(self, cache: Any, codes: list[list[int]], engine: Any = None) -> None:
        """Append codes to the rows of a KV cache, two codes per forward pass."""
        for start in range(0, max(map(len, codes)), 2):
            row_chunks = [row[start : start + 2] for row in codes]
            tokens = np.array([[*row_chunk, 0, 0][:2] for row_chunk in row_chunks])
            positions = cache.lengths[:, None] + np.arange(2)
            output = self.run_pass(cache, tokens, np.tril(np.ones((2, 2), bool)), positions, engine)
            cache.append(output.new_kv, [np.arange(len(row_chunk)) for row_chunk in row_chunks])

    def compute_reference_logits(self, row: int, codes: list[int]) -> np.ndarray:
        """Return torch's logits `[1 + len(codes), vocabulary]` after prefix number `row`, and after each code."""
        rows = np.concatenate([self.prefixes[row], self.code_embeddings[codes]]) if codes else self.prefixes[row]
        with torch.no_grad():
            hidden = self.torch_decoder.forward_sequences(torch.from_numpy(rows)[None])[0, self.config.prefix - 1 :]
            logits: np.ndarray = self.torch_decoder.head(hidden).numpy()
        return logits


def assert_close(values: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(values, expected, atol=2e-5, rtol=1e-4)
