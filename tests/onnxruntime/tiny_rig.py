"""A decoder as an ONNX graph, an engine that runs it, and the torch module that it was exported from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from host_tensorrt import HostLibrary, write_plan

from lantern_rt.bundle.manifest import DecoderSpec, DrafterSpec
from lantern_rt.engines.device_graph import make_device_graph
from lantern_rt.engines.ort.device import OrtDevice
from lantern_rt.engines.ort.engine import OrtDeviceEngine, OrtEngine
from lantern_rt.engines.profiles import ShapeProfile, count_profile_columns
from lantern_rt.engines.trt.builder import make_shape_bounds
from lantern_rt.engines.trt.engine import TensorRTEngine
from lantern_rt.engines.trt.executable import TensorRTExecutable
from lantern_rt.export.graph.graphs import make_target_graph, write_graph
from lantern_rt.export.models.decoder import Decoder, DecoderConfig, get_decoder_spec_fields
from lantern_rt.runtime.engine import PassInput, PassOutput

SINGLE_THREAD = 1
PROFILES = (
    ShapeProfile(name="ar", rows=(1, 2, 4), nodes=(2, 2, 2), columns=(64, 192, 320)),
    ShapeProfile(name="tree", rows=(1, 2, 4), nodes=(2, 12, 24), columns=(64, 192, 320)),
)
WIDE = DecoderConfig(
    hidden_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    intermediate_size=704,
    vocab_size=256,
    grid=24,
    prefix=24,
)  # head width and matrix sizes of a real model, as small matrices use other kernels


def spec_of(config: DecoderConfig) -> DecoderSpec:
    return DecoderSpec(**get_decoder_spec_fields(config), max_positions=config.num_rope_positions)


def drafter_spec_of(config: DecoderConfig) -> DrafterSpec:
    return DrafterSpec(**get_decoder_spec_fields(replace(config, final_norm=False)))


class Rig:
    """An engine, the torch module that its graph was exported from, and the embeddings of codes.

    Args:
        folder: folder for the graph.
        config: configuration of the decoder.
        on: kind of `engine`: `cpu` has NumPy buffers; `device` and `plan` (TensorRT) use the host as their device.
    """

    def __init__(self, folder: Path, config: DecoderConfig, on: str = "cpu") -> None:
        torch.manual_seed(0)
        self.config = config
        self.decoder = Decoder(config).eval()
        self.path = folder / "target.onnx"
        rng = np.random.default_rng(0)
        self.table = rng.normal(size=(config.vocab_size, config.hidden_size)).astype(np.float32)
        self.prefix = rng.normal(size=(8, config.prefix, config.hidden_size)).astype(np.float32)
        write_graph(make_target_graph(self.decoder, torch.from_numpy(self.table)), folder)
        self.engine: Any = self.load(SINGLE_THREAD)
        if on == "device":
            self.engine = OrtDeviceEngine(self.path, spec_of(config), self.table, SINGLE_THREAD, OrtDevice("cpu"))
        elif on == "plan":
            self.library = HostLibrary()
            graph_and_inputs = make_device_graph(
                self.path, spec_of(config), is_drafter=False, capacity=count_profile_columns(PROFILES)
            )
            graph = folder / "device.onnx"
            graph.write_bytes(graph_and_inputs.model_bytes)
            inputs = [
                {
                    tensor.name: make_shape_bounds(tensor.name, tensor.shape, profile, 20_000)
                    for tensor in graph_and_inputs.inputs
                }
                for profile in PROFILES
            ]
            self.plan = write_plan(graph, inputs, self.path.with_suffix(".plan"))
            self.engine = self.load_executable()

    def load(self, threads: int) -> OrtEngine:
        return OrtEngine(self.path, spec_of(self.config), self.table, threads)

    def load_executable(
        self, plan: Path | None = None, profiles: tuple[ShapeProfile, ...] = PROFILES, **change: Any
    ) -> TensorRTEngine:
        loaded = TensorRTExecutable(self.library, plan or self.plan, profiles, "lantern-rt build-engine tiny")
        return TensorRTEngine(loaded, spec_of(self.config).model_copy(update=change), self.table, OrtDevice("cpu"))

    def prefill(self, rows: int, engine: Any = None, capacity: int = 300) -> Any:
        """Return a cache with the first `rows` prefixes."""
        engine = engine or self.engine
        length = self.config.prefix
        cache = engine.new_cache(rows, capacity)
        output = self.run(
            cache, None, np.tril(np.ones((length, length), bool)), np.tile(np.arange(length), (rows, 1)), engine
        )
        cache.append(output.new_kv, [np.arange(length)] * rows)
        return cache

    def run(
        self, cache: Any, tokens: np.ndarray | None, among: np.ndarray, positions: np.ndarray, engine: Any = None
    ) -> PassOutput:
        """Run a pass over tokens, or over prefixes.

        Args:
            cache: cache of earlier nodes.
            tokens: tokens `[rows, nodes]`; None runs the prefixes.
            among: true where a node attends to a node, `[nodes, nodes]`.
            positions: positions `[rows, nodes]`.
            engine: engine to run; by default that of the rig.
        """
        engine = engine or self.engine
        rows, nodes = positions.shape
        past_length = engine.padded_past_length(cache, nodes)
        attention_mask = np.zeros((rows, nodes, past_length + nodes), bool)
        attention_mask[:, :, :past_length] = (np.arange(past_length) < cache.lengths[:, None])[:, None]
        attention_mask[:, :, past_length:] = among
        embeds = self.prefix[:rows] if tokens is None else None
        return engine.run(
            PassInput(positions=positions, attention_mask=attention_mask, tokens=tokens, embeds=embeds), cache
        )

    def extend(self, cache: Any, codes: list[list[int]], engine: Any = None) -> None:
        """Append codes to each row, two nodes per pass; shorter rows are padded with a node that is not accepted."""
        for start in range(0, max(map(len, codes)), 2):
            parts = [row[start : start + 2] for row in codes]
            tokens = np.array([[*part, 0, 0][:2] for part in parts])
            positions = cache.lengths[:, None] + np.arange(2)
            output = self.run(cache, tokens, np.tril(np.ones((2, 2), bool)), positions, engine)
            cache.append(output.new_kv, [np.arange(len(part)) for part in parts])

    def reference(self, row: int, codes: list[int]) -> np.ndarray:
        """Return the logits `[1 + codes, vocabulary]` after the prefix and each code, from one full forward pass."""
        rows = np.concatenate([self.prefix[row], self.table[codes]]) if codes else self.prefix[row]
        with torch.no_grad():
            hidden = self.decoder.forward_sequences(torch.from_numpy(rows)[None])[0, self.config.prefix - 1 :]
            logits: np.ndarray = self.decoder.head(hidden).numpy()
        return logits


def assert_close(values: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(values, expected, atol=2e-5, rtol=1e-4)
