"""The same little model behind every engine that runs here: a torch target and drafter of four codes."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tiny_graphs import DrafterGraph, TargetGraph, export_decoder
from toy_engine import make_model, make_prompt, naive_distribution

from lantern_rt.engines.onnxruntime_device import OrtDeviceEngine
from lantern_rt.engines.onnxruntime_engine import OrtEngine
from lantern_rt.engines.onnxruntime_session import ThreadOptions, save_optimised
from lantern_rt.export.decoder import Decoder, DecoderConfig
from lantern_rt.manifest import DecoderSpec, DrafterSpec
from lantern_rt.runtime.decode import DrafterLayout, Model, Prompt
from lantern_rt.runtime.sampling import Sampling

SMALL = DecoderConfig(
    width=32, layers=2, heads=4, kv_heads=2, ffn_width=48, vocabulary=4, grid=2, prefix=3, prefix_rotation="identity"
)
ONE = ThreadOptions(intra_op=1)
BACKENDS = ("toy", "onnxruntime", "onnxruntime, optimised", "onnxruntime, device")


class HostDeviceEngine(OrtDeviceEngine):
    """The engine that keeps everything on a device, with the host's memory as the device."""

    device = "cpu"


class SmallModel:
    """Graph files of the model, and its exact distribution from torch."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(3)
        torch.set_num_threads(1)
        self.decoder, drafter = Decoder(SMALL).eval(), DrafterGraph(Decoder(SMALL).eval())
        with torch.no_grad():
            for head in (self.decoder.head, drafter.decoder.head):
                head.weight.mul_(4)  # distributions far from uniform
        self.folder = folder
        export_decoder(TargetGraph(self.decoder), folder / "target.onnx")
        export_decoder(drafter, folder / "drafter.onnx")
        self.table = np.random.default_rng(0).normal(size=(SMALL.vocabulary, SMALL.width)).astype(np.float32)
        sizes = {name: getattr(SMALL, name) for name in ("width", "layers", "kv_heads", "head_width", "vocabulary")}
        self.target_spec, self.drafter_spec = DecoderSpec(**sizes, positions=SMALL.positions), DrafterSpec(**sizes)

    def on(self, backend: str) -> Model:
        """The model behind one of `BACKENDS`; the toy has its own tables."""
        if backend == "toy":
            return make_model(vocabulary=SMALL.vocabulary, codes=4, prefix=SMALL.prefix)
        optimised = backend == "onnxruntime, optimised"
        paths = {}
        for role in ("target", "drafter"):
            paths[role] = self.folder / f"{role}.onnx"
            if optimised:
                paths[role] = save_optimised(paths[role], "cpu", self.folder / f"{role}.optimised.onnx")[0]
        kinds = {"onnxruntime, device": HostDeviceEngine, "onnxruntime, cuda": OrtDeviceEngine}
        engine, provider = kinds.get(backend, OrtEngine), "cuda" if backend == "onnxruntime, cuda" else "cpu"
        target = engine(paths["target"], self.target_spec, self.table, ONE, provider, optimised)
        drafter = engine(paths["drafter"], self.drafter_spec, None, ONE, provider, optimised)
        return Model(target, drafter, SMALL.grid**2, SMALL.positions, DrafterLayout())

    def prompt(self, backend: str, identity: int) -> Prompt:
        """A prompt with `identity % 3` padded prefix rows."""
        padding = identity % 3
        if backend == "toy":
            return make_prompt(identity, SMALL.prefix, padding)
        rows = np.random.default_rng(identity).normal(size=(2, SMALL.prefix, SMALL.width)).astype(np.float32)
        return Prompt(rows[0], rows[1], np.arange(SMALL.prefix) >= padding)

    def joint(self, prompt: Prompt, sampling: Sampling) -> NDArray[np.float64]:
        """Probability of every sequence of codes by full forwards in torch, `[vocabulary] * codes`."""
        codes, vocabulary = SMALL.grid**2, SMALL.vocabulary
        every = np.array(list(itertools.product(range(vocabulary), repeat=codes)))
        joint = np.ones(len(every))
        rows = [
            np.concatenate([np.tile(side, (len(every), 1, 1)), self.table[every]], 1)
            for side in (prompt.cond, prompt.uncond)
        ]
        with torch.no_grad():
            cond, uncond = (self.decoder.head(self.decoder.full(torch.from_numpy(r))).double().numpy() for r in rows)
        logits = uncond + sampling.cfg_scale * (cond - uncond)
        for i, sequence in enumerate(every):
            for place, code in enumerate(sequence):
                joint[i] *= naive_distribution(logits[i, SMALL.prefix - 1 + place], sampling)[code]
        return joint.reshape((vocabulary,) * codes)
