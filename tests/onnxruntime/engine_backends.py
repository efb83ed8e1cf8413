"""Small target and drafter with a vocabulary of four tokens, on every engine that this host can run."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from host_tensorrt import HostTensorRT, write_engine_file
from numpy.typing import NDArray
from tiny_graphs import write_graph
from toy_distributions import compute_naive_distribution
from toy_engine import ToyModel, make_model, make_prompt

from lantern_rt.bundle.manifest import DecoderSizes
from lantern_rt.engines.gpu import find_gpu
from lantern_rt.engines.ort.device import OrtDevice
from lantern_rt.engines.ort.engine import OrtDeviceEngine, OrtEngine
from lantern_rt.engines.profiles import ShapeProfile
from lantern_rt.engines.trt import builder
from lantern_rt.engines.trt.backend import MEMORY
from lantern_rt.engines.trt.engine import TensorRTEngine
from lantern_rt.engines.trt.executable import TensorRTExecutable
from lantern_rt.export.graph.graphs import make_target_graph
from lantern_rt.export.models.decoder import Decoder, DecoderConfig
from lantern_rt.export.models.eagle import EagleDrafter, make_drafter_graph
from lantern_rt.methods import Sampling
from lantern_rt.runtime.engine import Engine
from lantern_rt.runtime.raster import RasterLayout
from lantern_rt.runtime.state import DrafterLayout, PrefixRow, Prompt

SMALL_CONFIG = DecoderConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=48,
    vocab_size=4,
    grid=2,
    prefix=3,
    prefix_rotation="identity",
)
IMAGE_LAYOUT = RasterLayout(SMALL_CONFIG.grid**2, SMALL_CONFIG.grid)
NEIGHBORS = np.array(
    [[n for n in range(SMALL_CONFIG.vocab_size) if n != code] for code in range(SMALL_CONFIG.vocab_size)]
)
SINGLE_THREAD = 1
BACKENDS = ("toy", "onnxruntime", "onnxruntime, device", "tensorrt, host")
GPU_BACKENDS = ("onnxruntime, cuda", "tensorrt, gpu", "tensorrt-rtx, gpu")
PROFILES = (
    ShapeProfile(name="ar", rows=(1, 2, 512), nodes=(2, 2, 2), columns=(64, 64, 64)),
    ShapeProfile(name="tree", rows=(1, 2, 512), nodes=(2, 12, 12), columns=(64, 64, 64)),
)


class SmallModel:
    def __init__(self, folder: Path) -> None:
        torch.manual_seed(3)
        torch.set_num_threads(1)
        self.decoder = Decoder(SMALL_CONFIG).eval()
        head = torch.nn.Linear(SMALL_CONFIG.hidden_size, SMALL_CONFIG.vocab_size, bias=False)
        drafter = EagleDrafter(replace(SMALL_CONFIG, final_norm=False), head, bias=True).eval()
        with torch.no_grad():
            for linear in (self.decoder.head, drafter.head):
                linear.weight.mul_(4)  # makes the token distributions far from uniform
        self.folder = folder
        self.code_embeddings = (
            np.random.default_rng(0).normal(size=(SMALL_CONFIG.vocab_size, SMALL_CONFIG.hidden_size)).astype(np.float32)
        )
        write_graph(make_target_graph(self.decoder, torch.from_numpy(self.code_embeddings)), folder)
        write_graph(make_drafter_graph(drafter), folder)
        self.target_spec = SMALL_CONFIG.make_target_spec()
        self.drafter_spec = drafter.config.make_drafter_spec()

    def load_on_backend(self, backend: str) -> ToyModel:
        """Load the model on a backend; `toy` is the NumPy model of the unit tests, with other logits."""
        if backend == "toy":
            return make_model(
                vocabulary=SMALL_CONFIG.vocab_size, codes=4, prefix=SMALL_CONFIG.prefix, neighbors=NEIGHBORS
            )
        if backend.startswith("tensorrt"):
            return self._load_on_tensorrt(*backend.split(", "))
        paths = {role: self.folder / f"{role}.onnx" for role in ("target", "drafter")}
        if backend in ("onnxruntime, device", "onnxruntime, cuda"):
            device = OrtDevice("cuda" if backend == "onnxruntime, cuda" else "cpu")
            target: Engine = OrtDeviceEngine(
                paths["target"], self.target_spec, self.code_embeddings, SINGLE_THREAD, device
            )
            drafter: Engine = OrtDeviceEngine(paths["drafter"], self.drafter_spec, None, SINGLE_THREAD, device)
        else:
            target = OrtEngine(paths["target"], self.target_spec, self.code_embeddings, SINGLE_THREAD)
            drafter = OrtEngine(paths["drafter"], self.drafter_spec, None, SINGLE_THREAD)
        return ToyModel(
            target, drafter, SMALL_CONFIG.num_rope_positions, DrafterLayout(), NEIGHBORS, image=IMAGE_LAYOUT
        )

    def _load_on_tensorrt(self, name: str, location: str) -> ToyModel:
        """Load TensorRT engines of both graphs on the GPU, or on the stand-in if `location` is `host`."""
        on_host = location == "host"
        manifest = SimpleNamespace(
            target=self.target_spec,
            decoders={"target": self.target_spec, "drafter": self.drafter_spec},
            sizes=(),
            num_embeddings=SMALL_CONFIG.vocab_size,
        )
        file_names = {f"{role}{end}": f"{role}.onnx{end}" for role in ("target", "drafter") for end in ("", ".data")}
        manifest.files = file_names
        bundle: Any = SimpleNamespace(path=lambda name: self.folder / file_names[name], manifest=manifest)
        library = HostTensorRT() if on_host else builder.import_library(name)
        device = OrtDevice("cpu" if on_host else MEMORY)
        folder = Path(tempfile.mkdtemp(dir=self.folder))

        def load_engine(spec: DecoderSizes, table: NDArray[np.float32] | None) -> TensorRTEngine:
            inputs = builder.write_device_graph(bundle, spec.role, PROFILES, folder)
            graph = folder / f"{spec.role}.onnx"
            gpu = find_gpu()
            assert inputs is not None
            if gpu is None or on_host:
                plan = write_engine_file(graph, inputs, graph.with_suffix(".plan"))
            else:
                plan = builder.build_engine_file(name, graph, inputs, (gpu.compute_capability,), lambda *progress: None)
            return TensorRTEngine([TensorRTExecutable(library, plan, PROFILES, "rebuild")], spec, table, device)

        target = load_engine(self.target_spec, self.code_embeddings)
        drafter = load_engine(self.drafter_spec, None)
        return ToyModel(
            target, drafter, SMALL_CONFIG.num_rope_positions, DrafterLayout(), NEIGHBORS, image=IMAGE_LAYOUT
        )

    def make_prompt(self, backend: str, seed: int) -> Prompt:
        """Return a prompt with random embeddings. The first `seed % 3` positions of the prompt are padding."""
        padding = seed % 3
        if backend == "toy":
            return make_prompt(seed, SMALL_CONFIG.prefix, padding)
        rows = (
            np.random.default_rng(seed)
            .normal(size=(2, SMALL_CONFIG.prefix, SMALL_CONFIG.hidden_size))
            .astype(np.float32)
        )
        is_real_token = np.arange(SMALL_CONFIG.prefix) >= padding
        return Prompt(PrefixRow(rows[0], is_real_token), PrefixRow(rows[1], is_real_token))

    def compute_joint_distribution(self, prompt: Prompt, sampling: Sampling) -> NDArray[np.float64]:
        """Return the probability of every image, computed with torch, in an array with an axis for each cell."""
        codes = SMALL_CONFIG.grid**2
        vocabulary = SMALL_CONFIG.vocab_size
        images = np.array(list(itertools.product(range(vocabulary), repeat=codes)))
        joint = np.ones(len(images))
        rows = [
            np.concatenate([np.tile(prefix_row.embeds, (len(images), 1, 1)), self.code_embeddings[images]], 1)
            for prefix_row in (prompt.cond, prompt.uncond)
        ]
        with torch.no_grad():
            cond_logits, uncond_logits = (
                self.decoder.head(self.decoder.forward_sequences(torch.from_numpy(row))).double().numpy()
                for row in rows
            )
        logits = uncond_logits + sampling.cfg_scale * (cond_logits - uncond_logits)
        for i, sequence in enumerate(images):
            for cell, code in enumerate(sequence):
                joint[i] *= compute_naive_distribution(logits[i, SMALL_CONFIG.prefix - 1 + cell], sampling)[code]
        return joint.reshape((vocabulary,) * codes)
