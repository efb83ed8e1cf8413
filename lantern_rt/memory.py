"""Estimates of memory from sizes in the manifest, checks of free memory, and the measurement of peak memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence

import psutil  # type: ignore[import-untyped]

from .bundle.conditions import ConditionSpec
from .bundle.files import Bundle
from .bundle.manifest import DecoderSpec, DrafterSpec, Manifest
from .bundle.weights import StoredWeights
from .completion import list_supported_methods
from .engines.host import available_memory
from .engines.kv_cache import COLUMN_STEP, round_up
from .engines.precisions import INT8, INTEGER_WEIGHTS
from .errors import BundleError, RequestError
from .requests import GenerationSettings, resolve_settings
from .runtime.drafters import count_draft_nodes
from .runtime.state import Plan
from .subjects.base import ImageRequest

FFN_RATIO = 3  # intermediate_size over hidden_size: 8/3 in Llama-style models, rounded up
MAX_WEIGHTS = 1 << 50  # number of weights that a damaged graph may claim, but no file can hold
MAX_IMAGES = 64  # maximum number of images per forward pass
BATCH_BYTES = 2 << 30  # maximum memory of a batch; a batch uses at most half of the free memory, too
_MIN_NODES = 64  # minimum number of nodes per image for which memory is reserved
_BYTES_PER_PIXEL = 1024  # memory of the image decoder: two layers of 128 channels in float32
_POLL_SECONDS = 0.01  # interval of `PeakMemoryMonitor`


def largest_settings(manifest: Manifest) -> GenerationSettings:
    """Return the settings that need the most memory per image."""
    method, *_ = list_supported_methods(manifest, ("eagle:drafter=eagle", "ar"))
    return resolve_settings(manifest, {"method": method})


def compute_max_images(
    manifest: Manifest,
    images: Sequence[ImageRequest],
    settings: GenerationSettings,
    max_rows: int,
    free_bytes: int | None,
) -> int:
    """Compute the maximum number of images per forward pass, 1 .. 64.

    Two or more images need at most 2 GiB, and at most half of the free memory. If one image of the longest prompt needs
    more than `free_bytes`, RequestError lists the needed memory for each purpose.

    Args:
        images: images of a request; empty: no request is known yet.
        free_bytes: free memory in bytes after the weights were loaded; None: the memory for one image is not checked.
    """
    tokens = max((image.prefix.length for image in images), default=0)
    needed = _estimate_memory_with_decoder(manifest, settings, tokens)
    if free_bytes is not None and sum(needed.values()) > free_bytes:
        actual = f"{_format_bytes(free_bytes)} free beside the weights"
        expected = f"{_format_memory_uses(needed)} for an image of a prompt of {tokens:,} tokens"
        raise RequestError(
            field="memory", found=actual, expected=expected, remedy="shorten it, or close other programs"
        )
    budget = min(BATCH_BYTES, available_memory() // 2)
    max_images_by_rows = max_rows // _make_largest_plan(manifest, settings).num_rows
    image_bytes = sum(estimate_image_memory(manifest, settings).values())
    return max(1, min(MAX_IMAGES, max_images_by_rows, budget // image_bytes))


def estimate_image_memory(
    manifest: Manifest, settings: GenerationSettings, prefix: int | None = None
) -> dict[str, int]:
    """Estimate the bytes for decoding one image, by purpose: every KV cache, and the forward passes.

    Args:
        prefix: number of prefix positions, such as prompt tokens; None: the maximum of the bundle.
    """
    prompt = manifest.condition.prefix if prefix is None else prefix
    itemsize = 2 if manifest.target.dtype == "float16" else 4
    plan = _make_largest_plan(manifest, settings)
    columns = round_up(plan.count_cache_columns(prompt))  # caches round their length up
    specs = {"target": manifest.target, "drafter": manifest.drafter if _uses_drafter_graph(settings) else None}
    caches = {
        f"cache of the {role}": count_kv_cache_bytes(spec, plan.num_rows, columns, itemsize)
        for role, spec in specs.items()
        if spec
    }
    prefill = estimate_forward_pass_memory(manifest.target, plan.num_rows, prompt, COLUMN_STEP, itemsize)
    verification = estimate_forward_pass_memory(manifest.target, plan.num_rows, plan.max_nodes, columns, itemsize)
    # Twice, because the outputs of a pass are released only after the next pass.
    return caches | {"passes": 2 * max(prefill, verification)}


def _make_largest_plan(manifest: Manifest, settings: GenerationSettings) -> Plan:
    nodes = max(_MIN_NODES, count_draft_nodes(settings.method))
    longest_layout = max(map(manifest.layout, manifest.all_sizes), key=lambda layout: layout.num_tokens)
    return Plan(longest_layout, settings.sampling, settings.method, nodes)


def check_memory(bundle: Bundle, settings: GenerationSettings, num_prompt_tokens: int | None = None) -> None:
    """Raise RequestError, before the weights are loaded, if they and one image need more memory than is free.

    Args:
        num_prompt_tokens: number of prompt tokens; None: the smallest possible number, because `compute_max_images`
            checks the prompt of every request later.
    """
    manifest = bundle.manifest
    roles = ["target", "prefix", "condition", "vq_decoder"]
    if _uses_drafter_graph(settings):
        roles.insert(1, "drafter")
    weights = sum(count_weight_bytes(bundle, role) for role in roles if role in manifest.files)
    num_tokens = _count_min_prompt_tokens(manifest.condition) if num_prompt_tokens is None else num_prompt_tokens
    needed = {"weights": weights, **_estimate_memory_with_decoder(manifest, settings, num_tokens)}
    free = available_memory()
    if sum(needed.values()) > free:
        expected = f"{_format_memory_uses(needed)} for bundle {manifest.name}"
        raise RequestError(
            field="memory", found=f"{_format_bytes(free)} free", expected=expected, remedy="close other programs"
        )


def _estimate_memory_with_decoder(
    manifest: Manifest, settings: GenerationSettings, num_prompt_tokens: int
) -> dict[str, int]:
    num_pixels = math.prod(manifest.size_in_pixels(settings.image_size))
    return estimate_image_memory(manifest, settings, num_prompt_tokens) | {
        "image decoding": _BYTES_PER_PIXEL * num_pixels
    }


def _count_min_prompt_tokens(condition: ConditionSpec) -> int:
    layout = condition.layout
    if layout is None:
        return condition.prefix
    return max(len(layout.before) + 1 + len(layout.after), len(layout.uncond or ()))


def _format_memory_uses(bytes_by_use: Mapping[str, int]) -> str:
    parts = ", ".join(f"{name} {_format_bytes(size)}" for name, size in bytes_by_use.items())
    return f"{_format_bytes(sum(bytes_by_use.values()))} ({parts})"


def _uses_drafter_graph(settings: GenerationSettings) -> bool:
    return "eagle" in settings.method.requirements.drafters


def _format_bytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 27 else f"{size / 2**20:.1f} MiB"


def count_kv_cache_bytes(spec: DecoderSpec | DrafterSpec, num_rows: int, cache_length: int, itemsize: int) -> int:
    # 2: keys and values
    return 2 * spec.num_layers * cache_length * num_rows * spec.num_kv_heads * spec.head_dim * itemsize


def estimate_forward_pass_memory(
    spec: DecoderSpec | DrafterSpec, num_rows: int, num_nodes: int, past_length: int, itemsize: int
) -> int:
    """Return a lower bound of the bytes of a forward pass: the logits, and the activations of one layer."""
    logits = num_nodes * spec.vocab_size * 4  # float32
    # the attention mask, and two copies of the attention scores of one layer
    scores = num_nodes * (past_length + num_nodes) * (2 * spec.architecture.num_heads + 1) * itemsize
    states = num_nodes * spec.hidden_size * (4 + 2 * FFN_RATIO) * itemsize  # one layer's states, gates and projections
    return num_rows * (logits + scores + states)


def count_weight_bytes(bundle: Bundle, graph_role: str) -> int:
    """Compute how many bytes of memory the weights of a graph take in ONNX Runtime on a CPU.

    ONNX Runtime loads all floating-point weights as float32. Integer weights keep the type that the file has. The graph
    `prefix` maps the weights that the target's file has.
    """
    manifest = bundle.manifest
    decoder = manifest.decoders.get(graph_role)
    precision = decoder.precision if decoder else manifest.vq_precision if graph_role == "vq_decoder" else None
    if precision in (*INTEGER_WEIGHTS, INT8) or graph_role == "prefix":
        return sum(entry.bytes for name, entry in manifest.files.items() if name in (graph_role, f"{graph_role}.data"))
    path = bundle.path(graph_role)
    weights = StoredWeights(path).count_float_elements()
    if weights >= MAX_WEIGHTS:
        raise BundleError(field=str(path), found="weights larger than any file", remedy="export the bundle again")
    return 4 * weights  # float32 has 4 bytes


class PeakMemoryMonitor(threading.Thread):
    """Context manager that measures the peak memory of this process in a thread.

    Its `bytes` are without memory-mapped files; None: the system does not report memory.
    """

    def __init__(self) -> None:
        super().__init__(name="peak memory", daemon=True)
        self.bytes = measure_process_memory()
        self._done = threading.Event()

    def __enter__(self) -> PeakMemoryMonitor:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()

    def run(self) -> None:
        while self.bytes is not None and not self._done.wait(_POLL_SECONDS):
            self.bytes = max(self.bytes, measure_process_memory() or 0)


def measure_process_memory() -> int | None:
    """Return the memory of this process in bytes, without mapped files; None: the system does not report memory."""
    try:
        memory = psutil.Process().memory_info()
    except psutil.Error:  # Linux without /proc
        return None
    return int(memory.rss - memory.shared) if psutil.LINUX else None
