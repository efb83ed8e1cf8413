"""Backends by name, and a bundle's graphs loaded: target and drafter as engines, the others as functions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import numpy as np

from ..bundle.files import Bundle
from ..bundle.manifest import Manifest
from ..errors import RequestError
from ..runtime.engine import Engine, Floats, Ints
from .contracts import Array, Function, Tensor
from .engine_folder import EngineFolder
from .host import thread_count
from .memory import INTEGERS, PRODUCTS, check_products
from .ort.backend import OrtBackend, OrtGraphs
from .ort.providers import DEFAULT_PROVIDER, IMAGE_DECODER, ON_CPU, Providers
from .trt.backend import TensorRTBackend

BACKENDS: dict[str, type[OrtBackend | TensorRTBackend]] = {
    "onnxruntime": OrtBackend,
    "tensorrt": TensorRTBackend,
    "tensorrt-rtx": TensorRTBackend,
}


ImageDecoder = Callable[[Ints], Floats]
# Of a CPU that computes in float32; the embedded model's largest was 6.1e-5 nats (benchmarks/ties.py).
ROUNDING = 1e-4


def find_backend(name: str) -> OrtBackend | TensorRTBackend:
    """The backend of a name; its library need not be installed. Raises: RequestError if there is none."""
    if name not in BACKENDS:
        raise RequestError(f"backend: found {name!r}, expected one of {', '.join(BACKENDS)}")
    return BACKENDS[name](name)


class Engines:
    """Everything a bundle can run, from its own graphs or from an engine folder built of it; for several threads.

    The drafter, the VQ decoder and its encoder are loaded when first asked for: decoding without them never pays.
    providers: of the bundle's own graphs. expand_weights: the target's int8 or int4 weights become float32 when loaded;
    with provider `cpu`. picture_threads: of the VQ decoder, by default as many as the others have.

    Raises, before anything is loaded: EngineError if the folder's engines are of another bundle, version or host, or
    altered; RequestError if there are no weights to expand.
    """

    def __init__(
        self,
        bundle: Bundle,
        threads: int | None = None,
        providers: Providers = ON_CPU,
        folder: EngineFolder | None = None,
        expand_weights: bool = False,
        picture_threads: int | None = None,
    ) -> None:
        self._bundle, self.picture_threads = bundle, thread_count(picture_threads or threads)
        # what measured times hold for, such as `onnxruntime-cpu`, `onnxruntime-cpu-expanded` or `tensorrt-rtx`
        built_by = None if folder is None else (folder.manifest.backend, folder.manifest.provider)
        parts = built_by or ("onnxruntime", providers.main)
        self.backend = "-".join(part for part in (*parts, "expanded" if expand_weights else None) if part)
        self.picture_backend = self.backend if folder else f"onnxruntime-{providers.of(IMAGE_DECODER)}"
        self.threads = thread_count(threads)
        precision, dtype = bundle.manifest.target.precision, bundle.manifest.target.dtype
        self.integers = precision in INTEGERS and not expand_weights  # products round what they multiply to 8 bits
        self.on_cpu = self.backend.startswith(f"onnxruntime-{DEFAULT_PROVIDER}")
        exact = precision == PRODUCTS  # sums of integers
        settles = self.on_cpu and dtype == "float32" and not (exact or self.integers)
        self.rounding = ROUNDING if settles else 0.0  # as `Model.rounding`
        target = None if folder is None else folder.manifest.graphs.get("target")
        built = () if target is None else target.profiles
        most = max((profile.nodes[2] for profile in built), default=1 << 20)
        self.most_nodes = most if bundle.manifest.row_end is None else most // 2  # of drafts, each with a row's end
        self.most_rows = max((profile.rows[2] for profile in built), default=1 << 20)
        self._lock = threading.Lock()
        self._drafter: Engine | None = None
        self._vq_decoder: ImageDecoder | None = None
        self._vq_encoder: Function | None = None
        if expand_weights:
            _check_expandable(bundle, providers.main, folder)
        check_products(bundle, self.backend)
        self._graphs = _open_graphs(bundle, self.threads, providers, folder, expand_weights)
        self.target = self._graphs.decoder("target", bundle.manifest.target, bundle.code_embeddings())
        self._condition = self._graphs.function("condition", *_condition_tensors(bundle.manifest))

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
        """Images float32 `[images, 3, height, width]`, about -1 .. 1, of codes `[images, rows, columns]`."""
        with self._lock:
            if self._vq_decoder is None:
                self._vq_decoder = _image_decoder(self._graphs, self._bundle.manifest, self.picture_threads)
        return self._vq_decoder(codes)

    def vq_encoder(self, images: Floats) -> Ints:
        """Codes int64 `[images, cells]` of pictures float32 `[images, 3, height, width]` in -1 .. 1.

        Raises: BundleError: the bundle has no encoder.
        """
        manifest = self._bundle.manifest
        pictures = Tensor("images", ("float32",), (None, 3, manifest.image_height, manifest.image_width))
        codes = Tensor("codes", ("int64",), (None, manifest.codes_per_image))
        with self._lock:
            if self._vq_encoder is None:
                self._vq_encoder = self._graphs.function("vq_encoder", [pictures], [codes])
        return self._vq_encoder({"images": images})[0]

    def load_all(self) -> None:
        """Load what is still unloaded, so that a damaged graph shows now."""
        _ = self.drafter
        size = self._bundle.manifest.size()
        self.vq_decoder(np.zeros((1, size.rows, size.columns), np.int64))


def image_decoder(bundle: Bundle, provider: str, threads: int) -> ImageDecoder:
    """The bundle's VQ decoder alone, on a provider; as `Engines.vq_decoder`. Raises: EngineError, BundleError."""
    graphs = OrtGraphs(bundle, None, threads, Providers(own={IMAGE_DECODER: provider}))
    return _image_decoder(graphs, bundle.manifest, threads)


def _image_decoder(graphs: OrtGraphs, manifest: Manifest, threads: int) -> ImageDecoder:
    cells: tuple[int | None, ...] = (manifest.codes_per_image,)
    pixels: tuple[int | None, ...] = (manifest.image_height, manifest.image_width)
    if manifest.sizes:
        cells = pixels = (None, None)
    codes_in, images = Tensor("codes", ("int64",), (None, *cells)), Tensor("images", ("float32",), (None, 3, *pixels))
    run = graphs.function(IMAGE_DECODER, [codes_in], [images], threads)

    def decode(codes: Ints) -> Floats:
        read = codes if manifest.sizes else codes.reshape(len(codes), -1)
        return run({"codes": np.ascontiguousarray(read, np.int64)})[0]

    return decode


def _check_expandable(bundle: Bundle, provider: str, folder: EngineFolder | None) -> None:
    """Raises: RequestError unless the target's weights are integers that ONNX Runtime would keep on a CPU."""
    precision = bundle.manifest.target.precision
    if folder is not None:
        found, expected = f"the engines {folder.folder}", "a bundle's own graphs"
    elif provider != DEFAULT_PROVIDER:
        found, expected = f"provider {provider}", f"provider {DEFAULT_PROVIDER}"
    elif precision not in INTEGERS:
        found, expected = f"a target with {precision} weights", "int8-weights or int4-weights"
    else:
        return
    raise RequestError(f"expand_weights: found {found}, expected {expected}; leave it out")


def _open_graphs(
    bundle: Bundle, threads: int, providers: Providers, folder: EngineFolder | None, expand_weights: bool
) -> OrtGraphs:
    if folder is None:
        return OrtGraphs(bundle, None, threads, providers, expand_weights)
    backend, built_by = find_backend(folder.manifest.backend), folder.manifest.builder_version
    folder.check_bundle(bundle)
    if (version := backend.version()) != built_by:
        raise folder.other(f"engines built by {folder.manifest.builder} {built_by}", f"{version}, the one installed")
    backend.check_host(folder)
    folder.check_files()
    return backend.open(bundle, folder, threads)


def _condition_tensors(manifest: Manifest) -> tuple[list[Tensor], list[Tensor]]:
    condition = manifest.condition
    prefix, kind, caption_dim = condition.prefix, condition.kind, condition.caption_dim
    shapes: dict[str, dict[str, tuple[int | None, ...]]] = {
        "class": {"class_ids": (None,)},
        "words": {"token_ids": (None, prefix)},
        "embeddings": {"caption_embeds": (None, prefix, caption_dim), "caption_mask": (None, prefix)},
        "text": dict.fromkeys(("token_ids", "token_mask"), (None, None)),
        "tokens": dict.fromkeys(("token_ids", "uncond_ids"), (None, None)),
    }
    dtypes = dict.fromkeys(shapes[kind], "int64") | {"caption_embeds": "float32"}
    inputs = [Tensor(name, (dtypes[name],), shape) for name, shape in shapes[kind].items()]
    rows = (None, None if kind == "tokens" else prefix, manifest.target.hidden_size)
    return inputs, [Tensor(name, ("float32",), rows) for name in ("prefix_embeds", "uncond_embeds")]
