"""A bundle's graphs loaded: target and drafter as engines, the others as functions."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from ..bundle.files import Bundle
from ..bundle.manifest import Manifest
from ..runtime.engine import Engine, Floats, Ints
from .contracts import Array, Function, Tensor
from .engine_folder import EngineFolder
from .host import import_onnxruntime, thread_count
from .ort.backend import OrtGraphs
from .ort.providers import AUTO, DEFAULT_PROVIDER, IMAGE_DECODER, ON_CPU, Providers, detect_provider
from .precisions import INT8, INTEGER_WEIGHTS, check_matmul_support
from .trt.backend import open_tensorrt

# Of a CPU that computes in float32; the largest measured with the embedded model was 6.1e-5 nats.
ROUNDING = 1e-4
_UNLIMITED = 1 << 20


class Engines:
    """Everything a bundle can run, from its own graphs or from plans built of it; for several threads.

    The drafter and the VQ encoder are loaded when first asked for. The VQ decoder is loaded with the target: were it
    damaged, a whole image's codes would have been decoded for nothing.

    Args:
        bundle: opened.
        threads: of the graphs, one per core by default.
        providers: of the bundle's own graphs.
        folder: plans to run instead of its graphs.

    Raises:
        BundleError: the graph of the target, the condition or the VQ decoder is damaged.
        EngineError: the plans are of another bundle, version or host, or altered; the same before anything is loaded.
    """

    def __init__(
        self,
        bundle: Bundle,
        threads: int | None = None,
        providers: Providers = ON_CPU,
        folder: EngineFolder | None = None,
    ) -> None:
        self._bundle = bundle
        self.threads = thread_count(threads)
        # what measured times hold for, such as `onnxruntime-cpu` or `tensorrt-rtx`
        self.backend, drafts, self.image_backend = (
            folder.manifest.backend if folder else f"onnxruntime-{providers.of(role)}"
            for role in ("target", "drafter", IMAGE_DECODER)
        )
        check_matmul_support(bundle, self.backend, drafts)
        if drafts != self.backend:
            self.backend += f",drafter={providers.of('drafter')}"
        self.on_cpu = folder is None and providers.main == DEFAULT_PROVIDER
        precision, dtype = bundle.manifest.target.precision, bundle.manifest.target.dtype
        exact = precision == INT8  # sums of integers
        integers = precision in INTEGER_WEIGHTS  # products round what they multiply to 8 bits
        rounds = self.on_cpu and dtype == "float32" and not (exact or integers)
        self.rounding = ROUNDING if rounds else 0.0  # as `Model.rounding`
        target = folder.manifest.graphs.get("target") if folder else None
        built = target.profiles if target else ()
        most = max((profile.nodes[2] for profile in built), default=_UNLIMITED)
        self.max_nodes = most if bundle.manifest.row_end is None else most // 2  # of drafts, each with a row's end
        self.max_rows = max((profile.rows[2] for profile in built), default=_UNLIMITED)
        self._lock = threading.Lock()
        self._drafter: Engine | None = None
        self._vq_encoder: Function | None = None
        if folder is None:
            self._graphs = OrtGraphs(bundle, self.threads, providers)
        else:
            self._graphs = open_tensorrt(bundle, folder, self.threads)
        self.target = self._graphs.decoder("target", bundle.manifest.target, bundle.code_embeddings)
        self._condition = self._graphs.function("condition", *_condition_tensors(bundle.manifest))
        self._vq_decoder = self._graphs.function(IMAGE_DECODER, *_image_tensors(bundle.manifest))

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
        cells = codes if self._bundle.manifest.sizes else codes.reshape(len(codes), -1)
        return self._vq_decoder({"codes": np.ascontiguousarray(cells, np.int64)})[0]

    def vq_encoder(self, images: Floats) -> Ints:
        """Codes int64 `[images, cells]` of pictures float32 `[images, 3, height, width]` in -1 .. 1.

        Raises: BundleError: the bundle has no encoder.
        """
        manifest = self._bundle.manifest
        codes = Tensor("codes", ("int64",), (None, None if manifest.sizes else manifest.codes_per_image))
        with self._lock:
            if self._vq_encoder is None:
                self._vq_encoder = self._graphs.function("vq_encoder", _image_tensors(manifest)[1], [codes])
        return self._vq_encoder({"images": images})[0]

    def load_all(self) -> None:
        """Load what is still unloaded and run the VQ decoder, so that a damaged graph shows now."""
        _ = self.drafter
        size = self._bundle.manifest.size()
        self.vq_decoder(np.zeros((1, size.rows, size.columns), np.int64))


def choose_providers(wanted: Providers, bundle: Bundle) -> Providers:
    """The same, with `auto` decided for this host and bundle. Raises: EngineError: a GPU's library does not load.

    Decoders of integers run on a GPU if asked to: they draw other images there. So does their image decoder, unless it
    is left to the CPU.
    """
    manifest = bundle.manifest
    if wanted.main == AUTO:
        only_cpu = any(spec is not None and spec.precision == INT8 for spec in (manifest.target, manifest.drafter))
        wanted = wanted._replace(main=DEFAULT_PROVIDER if only_cpu else detect_provider(import_onnxruntime()))
    if manifest.vq_precision == INT8 and wanted.main != DEFAULT_PROVIDER:
        return wanted._replace(by_graph={IMAGE_DECODER: DEFAULT_PROVIDER, **wanted.by_graph})
    return wanted


def _image_tensors(manifest: Manifest) -> tuple[list[Tensor], list[Tensor]]:
    cells: tuple[int | None, ...] = (manifest.codes_per_image,)
    pixels: tuple[int | None, ...] = (manifest.image_height, manifest.image_width)
    if manifest.sizes:
        cells = pixels = (None, None)
    return [Tensor("codes", ("int64",), (None, *cells))], [Tensor("images", ("float32",), (None, 3, *pixels))]


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
