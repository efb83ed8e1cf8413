"""The graphs of a bundle, loaded: target and drafter as engines, condition and VQ decoder as functions.

The target and the condition graph are loaded at once, the drafter and the VQ decoder when first asked for:
decoding without a drafter never pays for one. Does not know decoding.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from ..bundle import Bundle
from ..manifest import Manifest
from ..runtime.engine import Floats, Ints
from .onnxruntime_engine import OrtEngine
from .onnxruntime_session import Array, GraphSession, Tensor, ThreadOptions


class Engines:
    """Everything a bundle can run. Attributes may be used from several threads."""

    def __init__(self, bundle: Bundle, threads: ThreadOptions | None = None, provider: str = "cpu") -> None:
        self._bundle, self._provider = bundle, provider
        self.threads = threads or ThreadOptions()
        self._lock = threading.Lock()
        self._drafter: OrtEngine | None = None
        self._vq_decoder: GraphSession | None = None
        manifest = bundle.manifest
        self.target = OrtEngine(
            bundle.path("target"), manifest.target, bundle.code_embeddings(), self.threads, provider
        )
        self._condition = GraphSession(bundle.path("condition"), *_condition_tensors(manifest), self.threads, provider)

    @property
    def drafter(self) -> OrtEngine | None:
        """The drafter, or None if the bundle has none."""
        spec = self._bundle.manifest.drafter
        with self._lock:
            if self._drafter is None and spec is not None:
                self._drafter = OrtEngine(self._bundle.path("drafter"), spec, None, self.threads, self._provider)
            return self._drafter

    def condition(self, inputs: Mapping[str, Array]) -> tuple[Floats, Floats]:
        """Prefix rows `prefix_embeds` and `uncond_embeds`, float32 `[rows, length, width]`, each of its own length."""
        prefix, uncond = self._condition.run(inputs)
        return prefix, uncond

    def vq_decoder(self, codes: Ints) -> Floats:
        """Images float32 `[images, 3, height, width]`, about -1 .. 1, of codes `[images, cells]`."""
        with self._lock:
            if self._vq_decoder is None:
                manifest = self._bundle.manifest
                codes_in = Tensor("codes", ("int64",), (None, manifest.codes_per_image))
                images = Tensor("images", ("float32",), (None, 3, manifest.image_height, manifest.image_width))
                path = self._bundle.path("vq_decoder")
                self._vq_decoder = GraphSession(path, [codes_in], [images], self.threads, self._provider)
        (decoded,) = self._vq_decoder.run({"codes": np.ascontiguousarray(codes, np.int64)})
        return decoded

    def load_all(self) -> None:
        """Load what is still unloaded, so that a damaged graph shows now."""
        _ = self.drafter
        self.vq_decoder(np.zeros((1, self._bundle.manifest.codes_per_image), np.int64))


def load_engines(bundle: Bundle, threads: ThreadOptions | None = None, provider: str = "cpu") -> Engines:
    """The engines of a bundle; threads by default as many as this process has physical cores."""
    return Engines(bundle, threads, provider)


def _condition_tensors(manifest: Manifest) -> tuple[list[Tensor], list[Tensor]]:
    condition = manifest.condition
    inputs = {
        "class": [Tensor("class_ids", ("int64",), (None,))],
        "words": [Tensor("token_ids", ("int64",), (None, condition.prefix))],
        "embeddings": [
            Tensor("caption_embeds", ("float32",), (None, condition.prefix, condition.caption_width)),
            Tensor("caption_mask", ("int64",), (None, condition.prefix)),
        ],
        "text": [Tensor(name, ("int64",), (None, condition.prefix)) for name in ("token_ids", "token_mask")],
        "tokens": [Tensor(name, ("int64",), (None, None)) for name in ("token_ids", "uncond_ids")],
    }
    rows = (None, None if condition.kind == "tokens" else condition.prefix, manifest.target.width)
    outputs = [Tensor(name, ("float32",), rows) for name in ("prefix_embeds", "uncond_embeds")]
    return inputs[condition.kind], outputs
