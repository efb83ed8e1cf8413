"""How much memory a bundle's graphs will take, before anything is built or loaded.

Weights are counted in the graphs; keys and values follow from the sizes in `bundle.json`; activations are an
estimate: the tensors that a pass cannot do without, not what a library's allocator makes of them.

Does not know backends.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..bundle.files import Bundle
from ..bundle.manifest import DecoderSpec, DrafterSpec
from ..bundle.onnx_scan import NotOnnx, float_weights
from ..errors import BundleError
from .profiles import BuildOptions, largest_past

FFN_RATIO = 3  # width of the feed-forward layer over the model's: 8/3 in Llama-style models, rounded up


@dataclass(frozen=True)
class Estimate:
    """Bytes that one graph takes. `cache` is for `rows` full rows, `activations` for the largest pass."""

    role: str
    weights: int
    cache: int
    activations: int

    @property
    def total(self) -> int:
        """All three."""
        return self.weights + self.cache + self.activations


def estimate(bundle: Bundle, options: BuildOptions) -> list[Estimate]:
    """An estimate for every graph of the bundle."""
    manifest = bundle.manifest
    number = 2 if manifest.target.dtype == "float16" else 4
    specs = {"target": manifest.target, "drafter": manifest.drafter}
    found = []
    for role in ("target", "drafter", "condition", "vq_decoder"):
        if role not in manifest.files:
            continue
        try:
            weights = number * float_weights(bundle.path(role))
        except (NotOnnx, ValueError, OSError) as error:
            found_instead = getattr(error, "strerror", None) or error
            raise BundleError(f"{bundle.path(role)}: expected an ONNX graph, found {found_instead}") from error
        spec = specs.get(role)
        if spec is None:
            found.append(Estimate(role, weights, 0, 0))
            continue
        past = largest_past(manifest, options)
        cache = 2 * spec.num_layers * past * options.max_rows * spec.num_kv_heads * spec.head_dim * number
        found.append(Estimate(role, weights, cache, _activations(spec, options, past, number)))
    return found


def _activations(spec: DecoderSpec | DrafterSpec, options: BuildOptions, past: int, number: int) -> int:
    """Logits, the mask, two copies of one layer's scores, and its hidden states, gates and projections."""
    nodes = options.max_rows * options.max_nodes
    heads = spec.hidden_size // spec.head_dim
    columns = past + options.max_nodes
    logits = nodes * spec.vocab_size * 4  # float32
    scores = nodes * columns * (2 * heads + 1) * number
    states = nodes * spec.hidden_size * (4 + 2 * FFN_RATIO) * number
    return logits + scores + states
