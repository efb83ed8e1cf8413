"""Loading of a bundle's graphs: target and drafter as engines, all other graphs as functions."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from ..bundle.files import Bundle
from ..runtime.engine import Engine, Floats, Ints
from .contracts import Array, Function
from .engine_folder import EngineFolder
from .function_tensors import declare_condition_tensors, declare_image_tensors
from .host import choose_thread_count, import_onnxruntime
from .ort.backend import OrtGraphLoader
from .ort.providers import AUTO, DEFAULT_PROVIDER, IMAGE_DECODER, ON_CPU, ProviderChoice, detect_provider
from .precisions import INT8, INTEGER_WEIGHTS, check_matmul_support
from .trt.backend import open_tensorrt_folder

# Maximum change, in nats, of the difference of two logits between passes on a CPU in float32. The largest change
# measured with the embedded model is 6.1e-5 nats.
ROUNDING = 1e-4
_UNLIMITED = 1 << 20  # maximum number of rows and nodes for ONNX Runtime, which has no limit


class BundleEngines:
    """Loaded graphs of a bundle, or TensorRT engines built from them; thread-safe.

    Drafter and VQ encoder are loaded when first used. The VQ decoder is loaded with the target, so that a damaged VQ
    decoder is reported before the tokens of an image are generated.

    Args:
        threads: number of threads per graph; None: one per core.
        engine_folder: engine folder whose TensorRT engines run instead; None: run all graphs in ONNX Runtime.

    Attributes:
        backend: backend of target and drafter, such as `onnxruntime-cpu` or `tensorrt-rtx`; timings name it.
        on_cpu: whether the target runs in ONNX Runtime on the CPU.
        rounding_bound: maximum change, in nats, by which rounding changes the difference of two target logits between
            passes. 0: near-ties (choices that rounding could change) are not recomputed.
        max_nodes: maximum number of draft nodes per batch row and forward pass.

    Raises:
        BundleError: the graph of the target, the condition or the VQ decoder is damaged.
        EngineError: the TensorRT engines were built for another bundle, library version or host, or were altered.
        RequestError: a backend lacks the quantized matmul of the bundle.
    """

    def __init__(
        self,
        bundle: Bundle,
        threads: int | None = None,
        providers: ProviderChoice = ON_CPU,
        engine_folder: EngineFolder | None = None,
    ) -> None:
        self._bundle = bundle
        self.threads = choose_thread_count(threads)
        self.backend, drafter_backend, self.image_backend = (
            engine_folder.manifest.backend if engine_folder else f"onnxruntime-{providers.get_provider(role)}"
            for role in ("target", "drafter", IMAGE_DECODER)
        )
        check_matmul_support(bundle, self.backend, drafter_backend)
        if drafter_backend != self.backend:
            self.backend += f",drafter={providers.get_provider('drafter')}"
        self.on_cpu = engine_folder is None and providers.main_provider == DEFAULT_PROVIDER
        spec = bundle.manifest.target
        # With int8, sums of integers are exact. With integer weights, matmuls round activations to 8 bits. For both,
        # near-ties are not recomputed.
        has_float_matmul = spec.precision != INT8 and spec.precision not in INTEGER_WEIGHTS
        self.rounding_bound = ROUNDING if self.on_cpu and spec.dtype == "float32" and has_float_matmul else 0.0
        target = engine_folder.manifest.graphs.get("target") if engine_folder else None
        profiles = target.profiles if target else ()
        max_nodes = max((profile.nodes[2] for profile in profiles), default=_UNLIMITED)
        # A draft node takes up to two nodes of a pass if an end-of-row token may follow it.
        self.max_nodes = max_nodes // bundle.manifest.layout().count_max_nodes_per_pass(1)
        self.max_rows = max((profile.rows[2] for profile in profiles), default=_UNLIMITED)
        self._lock = threading.Lock()
        self._drafter: Engine | None = None
        self._vq_encoder: Function | None = None
        if engine_folder is None:
            self._graphs = OrtGraphLoader(bundle, self.threads, providers)
        else:
            self._graphs = open_tensorrt_folder(bundle, engine_folder, self.threads)
        self.target = self._graphs.load_decoder(spec, bundle.code_embeddings)
        manifest = bundle.manifest
        condition = declare_condition_tensors(manifest.condition, spec.hidden_size)
        self._condition = self._graphs.load_graph_function("condition", *condition)
        self._tensors = declare_image_tensors(
            manifest.decoded_cells, manifest.image_height, manifest.image_width, manifest.size().first_codes
        )
        self._vq_decoder: Function | None = None
        if manifest.makes_images:
            self._vq_decoder = self._graphs.load_graph_function(
                IMAGE_DECODER, [self._tensors.codes], [self._tensors.images]
            )

    @property
    def drafter(self) -> Engine | None:
        spec = self._bundle.manifest.drafter
        with self._lock:
            if self._drafter is None and spec is not None:
                self._drafter = self._graphs.load_decoder(spec, None)
            return self._drafter

    def compute_condition(self, inputs: Mapping[str, Array]) -> tuple[Floats, Floats]:
        """Compute the conditional and the unconditional prefixes, float32 `[rows, length, hidden_size]`."""
        prefix, uncond = self._condition(inputs)
        return prefix, uncond

    def decode_images(self, codes: Ints) -> Floats:
        """Decode tokens `[images, rows, columns]` to pixels `[images, 3, height, width]`, about -1 (black) .. 1."""
        assert self._vq_decoder is not None
        # A bundle with several image sizes has a graph that reads the grid. Other graphs read a flat sequence.
        cells = codes if self._bundle.manifest.decoded_cells is None else codes.reshape(len(codes), -1)
        return self._vq_decoder({"codes": np.ascontiguousarray(cells, np.int64)})[0]

    def encode_images(self, images: Floats) -> Ints:
        """Encode pixels, float32 `[images, 3, height, width]` in -1 (black) .. 1, to tokens `[images, cells]`."""
        with self._lock:
            if self._vq_encoder is None:
                self._vq_encoder = self._graphs.load_graph_function(
                    "vq_encoder", [self._tensors.images], [self._tensors.encoded]
                )
        return self._vq_encoder({"images": images})[0]

    def load_all(self) -> None:
        """Load the drafter, and run the VQ decoder once, so that damaged graphs are reported now."""
        _ = self.drafter
        if self._vq_decoder is None:
            return
        size = self._bundle.manifest.size()
        self.decode_images(np.zeros((1, size.rows, size.columns), np.int64))


def choose_providers(requested: ProviderChoice, bundle: Bundle) -> ProviderChoice:
    """Replace the provider `auto` by a provider of this host that suits a bundle.

    For `auto`, int8 decoders run on the CPU, because a GPU would generate other images for the same seed. An int8 VQ
    decoder runs on the CPU unless the user requests a provider for it.

    Raises:
        EngineError: the library of a GPU provider cannot be loaded.
    """
    manifest = bundle.manifest
    if requested.main_provider == AUTO:
        only_cpu = any(spec is not None and spec.precision == INT8 for spec in (manifest.target, manifest.drafter))
        requested = requested._replace(
            main_provider=DEFAULT_PROVIDER if only_cpu else detect_provider(import_onnxruntime())
        )
    if manifest.vq_precision == INT8 and requested.main_provider != DEFAULT_PROVIDER:
        return requested._replace(graph_providers={IMAGE_DECODER: DEFAULT_PROVIDER, **requested.graph_providers})
    return requested
