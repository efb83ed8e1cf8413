"""Memory: how many images are decoded together, whether there is room for a request, and how much a process took.

What decoding takes is worked out from sizes alone, before anything is allocated.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping

import psutil  # type: ignore[import-untyped]

from .bundle.files import Bundle
from .bundle.manifest import ConditionSpec, DecoderSpec, DrafterSpec, Manifest
from .bundle.onnx_scan import count_float_weights
from .engines.host import available_memory
from .engines.kv_cache import SPAN_STEP, round_up
from .engines.precisions import INT8, INTEGER_WEIGHTS
from .errors import BundleError, RequestError
from .inputs import format_error
from .methods import Drafted
from .requests import Request, Settings, resolve_settings
from .runtime.state import method_nodes

FFN_RATIO = 3  # intermediate_size over hidden_size: 8/3 in Llama-style models, rounded up
MOST_WEIGHTS = 1 << 50
MAX_IMAGES = 64  # images at most
BATCH_BYTES = 2 << 30  # that they may take, or half of what is free
_NODES = 64  # of a pass of one image, at least
_PIXEL = 1024  # bytes that an image decoder takes for a pixel: two layers of 128 channels
_SECONDS = 0.01  # between looks at the memory in use


def largest_settings(manifest: Manifest) -> Settings:
    """Return settings whose images take the most memory: those of the drafter, if there is one."""
    return resolve_settings(manifest, {"method": "eagle:drafter=eagle" if manifest.drafter else "ar"})


def compute_max_images(manifest: Manifest, settings: Settings, max_rows: int) -> int:
    """Images decoded together: at most 64, at most 2 GiB of keys, values and logits, or half of the free memory.

    max_rows: of a pass; guidance makes two of an image. At least one.
    """
    budget = min(BATCH_BYTES, available_memory() // 2)
    rows = max_rows // (2 if settings.sampling.guided else 1)
    return max(1, min(MAX_IMAGES, rows, budget // sum(image_bytes(manifest, settings).values())))


def image_bytes(manifest: Manifest, settings: Settings, prefix: int | None = None) -> dict[str, int]:
    """What decoding one image takes, by what it is for. prefix: tokens of its prompt; None: as many as there may be."""
    prompt = manifest.condition.prefix if prefix is None else prefix
    rows, size = 2 if settings.sampling.guided else 1, 2 if manifest.target.dtype == "float16" else 4
    nodes = max(_NODES, method_nodes(settings.method))
    drafted = nodes * (1 + (manifest.row_end is not None))
    columns = round_up(prompt + manifest.max_image_tokens + drafted + 2)
    specs = {"target": manifest.target, "drafter": manifest.drafter if _drafts(settings) else None}
    needed = {f"cache of the {role}": cache_bytes(spec, rows, columns, size) for role, spec in specs.items() if spec}
    passes = (prompt, SPAN_STEP), (nodes, columns)  # nodes and past: of the prompt, of a picture
    # what one pass gave is there until the next one has given its own
    return needed | {"passes": 2 * max(pass_bytes(manifest.target, rows, *one, size) for one in passes)}


def check_memory(bundle: Bundle, settings: Settings, prefix: int | None = None) -> None:
    """Raise an error if the weights and one image need more memory than is free.

    Args:
        bundle: opened bundle.
        settings: settings of the image.
        prefix: number of prompt tokens; None: the fewest possible, because `check_image_memory` checks every request.

    Raises:
        RequestError: names the memory needed, by use, and the free memory.
    """
    manifest, drafts = bundle.manifest, _drafts(settings)
    roles = ("target", "drafter", "condition", "vq_decoder")
    graphs = [role for role in roles if role in manifest.files and (drafts or role != "drafter")]
    weights = sum(weight_bytes(bundle, role) for role in graphs)
    least = _fewest_tokens(manifest.condition) if prefix is None else prefix
    needed = {"weights": weights, **_picture_bytes(manifest, settings, least)}
    free = available_memory()
    if sum(needed.values()) > free:
        expected = f"{_sizes(needed)} for bundle {manifest.name}"
        raise RequestError(field="memory", found=f"{_gib(free)} free", expected=expected, remedy="close other programs")


def check_image_memory(manifest: Manifest, request: Request, free: int) -> None:
    """Refuse a request of which one image alone takes more than what was free once the weights were loaded.

    Raises: RequestError: with all the numbers.
    """
    tokens = max(len(real) for image in request.images for real in image.real)
    needed = _picture_bytes(manifest, request.settings, tokens)
    if sum(needed.values()) > free:
        found = f"{_gib(free)} free beside the weights"
        expected = f"{_sizes(needed)} for an image of a prompt of {tokens:,} tokens"
        raise RequestError(field="memory", found=found, expected=expected, remedy="shorten it, or close other programs")


def _picture_bytes(manifest: Manifest, settings: Settings, prefix: int) -> dict[str, int]:
    pixels = math.prod(manifest.pixels(manifest.size(settings.size)))
    return image_bytes(manifest, settings, prefix) | {"painting": _PIXEL * pixels}


def _fewest_tokens(condition: ConditionSpec) -> int:
    layout = condition.layout
    if layout is None:
        return condition.prefix
    return max(len(layout.before) + 1 + len(layout.after), len(layout.uncond or ()))


def _sizes(needed: Mapping[str, int]) -> str:
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in needed.items())
    return f"{_gib(sum(needed.values()))} ({parts})"


def _drafts(settings: Settings) -> bool:
    return isinstance(settings.method, Drafted) and not settings.method.uses_draft_heads


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 27 else f"{size / 2**20:.1f} MiB"


def cache_bytes(spec: DecoderSpec | DrafterSpec, rows: int, columns: int, size: int) -> int:
    """Keys and values of so many columns. size: bytes of a number."""
    return 2 * spec.num_layers * columns * rows * spec.num_kv_heads * spec.head_dim * size


def pass_bytes(spec: DecoderSpec | DrafterSpec, rows: int, nodes: int, past: int, size: int) -> int:
    """A pass over `nodes` nodes of every row, at least: logits, and what one layer computes."""
    logits = nodes * spec.vocab_size * 4  # float32
    heads = spec.hidden_size // spec.head_dim
    scores = nodes * (past + nodes) * (2 * heads + 1) * size  # the mask, two copies of one layer's scores
    states = nodes * spec.hidden_size * (4 + 2 * FFN_RATIO) * size  # of one layer: states, gates and projections
    return rows * (logits + scores + states)


def weight_bytes(bundle: Bundle, role: str) -> int:
    """A graph's weights as ONNX Runtime keeps them on a CPU, where every pass reads them once.

    Floats are loaded as float32, however they are stored; integers stay what they are.
    Raises: BundleError: the graph cannot be read, or claims what no file holds.
    """
    manifest = bundle.manifest
    decoder = {"target": manifest.target, "drafter": manifest.drafter}.get(role)
    precision = decoder.precision if decoder else manifest.vq_precision if role == "vq_decoder" else None
    if precision in (*INTEGER_WEIGHTS, INT8):
        return sum(entry.bytes for name, entry in manifest.files.items() if name in (role, f"{role}.data"))
    path = bundle.path(role)
    try:
        weights = count_float_weights(path)
        if weights >= MOST_WEIGHTS:
            raise ValueError("more weights than any file holds")
    except (ValueError, OSError) as error:
        raise BundleError(
            field=str(path), found=format_error(error), expected="an ONNX graph", remedy="export the bundle again"
        ) from error
    return 4 * weights


class PeakMemory(threading.Thread):
    """`with PeakMemory() as peak: ...`, then `peak.bytes`; None where the system does not tell."""

    def __init__(self) -> None:
        super().__init__(name="peak memory", daemon=True)
        self.bytes = anonymous_memory()
        self._done = threading.Event()

    def __enter__(self) -> PeakMemory:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()

    def run(self) -> None:
        """Look until the block ends."""
        while self.bytes is not None and not self._done.wait(_SECONDS):
            self.bytes = max(self.bytes, anonymous_memory() or 0)


def anonymous_memory() -> int | None:
    """Bytes of memory in use, files aside; None where the system does not tell."""
    try:
        memory = psutil.Process().memory_info()
    except psutil.Error:  # Linux without /proc
        return None
    return int(memory.rss - memory.shared) if psutil.LINUX else None
