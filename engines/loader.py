"""The graphs of a bundle, loaded: target and drafter as engines, condition and VQ decoder as functions."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from ..bundle.files import Bundle
from ..bundle.manifest import Manifest
from ..errors import RequestError
from ..runtime.engine import Engine, Floats, Ints
from .contracts import Array, Function, Tensor, ThreadOptions
from .engine_folder import EngineFolder
from .ort.backend import OrtBackend, OrtGraphs
from .trt.backend import TensorRTBackend

BACKENDS: dict[str, type[OrtBackend | TensorRTBackend]] = {
    "onnxruntime": OrtBackend,
    "tensorrt": TensorRTBackend,
    "tensorrt-rtx": TensorRTBackend,
}


def find_backend(name: str) -> OrtBackend | TensorRTBackend:
    """The backend of a name; its library need not be installed. Raises: RequestError if there is none."""
    if name not in BACKENDS:
        raise RequestError(f"backend: found {name!r}, expected one of {', '.join(BACKENDS)}")
    return BACKENDS[name](name)


class Engines:
    """Everything a bundle can run, from its own graphs or from an engine folder built of it.

    The target and the condition graph are loaded at once, the drafter and the VQ decoder when first asked for:
    decoding without a drafter never pays for one. Attributes may be used from several threads.

    Raises: EngineError if the folder's engines are of another bundle, version or host, or altered; checked before
    anything is loaded.
    """

    def __init__(
        self,
        bundle: Bundle,
        threads: ThreadOptions | None = None,
        provider: str = "cpu",
        folder: EngineFolder | None = None,
    ) -> None:
        self._bundle = bundle
        # what measured times hold for, such as `onnxruntime-cpu` or `tensorrt-rtx`
        parts = ("onnxruntime", provider) if folder is None else (folder.manifest.backend, folder.manifest.provider)
        self.backend = "-".join(part for part in parts if part)
        self.threads = threads or ThreadOptions()
        self._lock = threading.Lock()
        self._drafter: Engine | None = None
        self._vq_decoder: Function | None = None
        manifest = bundle.manifest
        self._graphs = _open_graphs(bundle, self.threads, provider, folder)
        self.target = self._graphs.decoder("target", manifest.target, bundle.code_embeddings())
        self._condition = self._graphs.function("condition", *_condition_tensors(manifest))

    @property
    def drafter(self) -> Engine | None:
        """The drafter, or None if the bundle has none."""
        spec = self._bundle.manifest.drafter
        with self._lock:
            if self._drafter is None and spec is not None:
                self._drafter = self._graphs.decoder("drafter", spec, None)
            return self._drafter

    def condition(self, inputs: Mapping[str, Array]) -> tuple[Floats, Floats]:
        """Prefix rows `prefix_embeds` and `uncond_embeds`, float32 `[rows, length, hidden_size]`, lengths their own."""
        prefix, uncond = self._condition(inputs)
        return prefix, uncond

    def vq_decoder(self, codes: Ints) -> Floats:
        """Images float32 `[images, 3, height, width]`, about -1 .. 1, of codes `[images, cells]`."""
        with self._lock:
            if self._vq_decoder is None:
                manifest = self._bundle.manifest
                codes_in = Tensor("codes", ("int64",), (None, manifest.codes_per_image))
                images = Tensor("images", ("float32",), (None, 3, manifest.image_height, manifest.image_width))
                self._vq_decoder = self._graphs.function("vq_decoder", [codes_in], [images])
        (decoded,) = self._vq_decoder({"codes": np.ascontiguousarray(codes, np.int64)})
        return decoded

    def load_all(self) -> None:
        """Load what is still unloaded, so that a damaged graph shows now."""
        _ = self.drafter
        self.vq_decoder(np.zeros((1, self._bundle.manifest.codes_per_image), np.int64))


def _open_graphs(bundle: Bundle, threads: ThreadOptions, provider: str, folder: EngineFolder | None) -> OrtGraphs:
    if folder is None:
        return OrtGraphs(bundle, None, threads, provider)
    backend, manifest = find_backend(folder.manifest.backend), folder.manifest
    folder.check_bundle(bundle)
    if (version := backend.version()) != manifest.builder_version:
        built = f"engines built by {manifest.builder} {manifest.builder_version}"
        raise folder.other(built, f"{version}, the one installed")
    backend.check_host(folder)
    folder.check_files()
    return backend.open(bundle, folder, threads)


def _condition_tensors(manifest: Manifest) -> tuple[list[Tensor], list[Tensor]]:
    condition = manifest.condition
    inputs = {
        "class": [Tensor("class_ids", ("int64",), (None,))],
        "words": [Tensor("token_ids", ("int64",), (None, condition.prefix))],
        "embeddings": [
            Tensor("caption_embeds", ("float32",), (None, condition.prefix, condition.caption_dim)),
            Tensor("caption_mask", ("int64",), (None, condition.prefix)),
        ],
        "text": [Tensor(name, ("int64",), (None, None)) for name in ("token_ids", "token_mask")],
        "tokens": [Tensor(name, ("int64",), (None, None)) for name in ("token_ids", "uncond_ids")],
    }
    rows = (None, None if condition.kind == "tokens" else condition.prefix, manifest.target.hidden_size)
    outputs = [Tensor(name, ("float32",), rows) for name in ("prefix_embeds", "uncond_embeds")]
    return inputs[condition.kind], outputs
