"""How many images are decoded together, and whether there is memory for what is asked, before any of it is taken."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..bundle.files import Bundle
from ..bundle.manifest import ConditionSpec, Manifest
from ..engines.host import available_memory
from ..engines.kv_cache import SPAN_STEP, round_up
from ..engines.memory import cache_bytes, pass_bytes, weight_bytes
from ..errors import RequestError
from ..methods import Auto, Drafted, MethodConfig
from ..requests import Request, Settings
from ..runtime.state import method_nodes

TOGETHER = 64  # images at most
BATCH_BYTES = 2 << 30  # that they may take, or half of what is free
_NODES = 64  # of passes that `auto` may time
_PIXEL = 1024  # bytes that an image decoder takes for a pixel: two layers of 128 channels


def images_together(manifest: Manifest, settings: Settings, most_rows: int) -> int:
    """Images decoded together: at most 64, at most 2 GiB of keys, values and logits, or half of the free memory.

    most_rows: of a pass; guidance makes two of an image. At least one.
    """
    budget = min(BATCH_BYTES, available_memory() // 2)
    rows = most_rows // (2 if settings.sampling.guided else 1)
    return max(1, min(TOGETHER, rows, budget // sum(image_bytes(manifest, settings).values())))


def image_bytes(manifest: Manifest, settings: Settings, prefix: int | None = None) -> dict[str, int]:
    """What decoding one image takes, by what it is for. prefix: tokens of its prompt; None: as many as there may be."""
    prompt = manifest.condition.prefix if prefix is None else prefix
    rows, size = 2 if settings.sampling.guided else 1, 2 if manifest.target.dtype == "float16" else 4
    nodes = max(_NODES, method_nodes(settings.method))
    drafted = nodes * (1 + (manifest.row_end is not None))
    columns = round_up(prompt + manifest.picture_tokens + drafted + 2)
    specs = {"target": manifest.target, "drafter": manifest.drafter if _drafts(settings.method) else None}
    needed = {f"cache of the {role}": cache_bytes(spec, rows, columns, size) for role, spec in specs.items() if spec}
    passes = (prompt, SPAN_STEP), (nodes, columns)  # nodes and past: of the prompt, of a picture
    # what one pass gave is there until the next one has given its own
    return needed | {"passes": 2 * max(pass_bytes(manifest.target, rows, *one, size) for one in passes)}


def check_memory(bundle: Bundle, settings: Settings, prefix: int | None = None) -> None:
    """Refuse what this host has no memory for: weights, and the decoding of one image.

    prefix: tokens of the prompt; None: as few as there may be, as every request is looked at by `check_room`. Raises:
    RequestError: with all the numbers.
    """
    manifest, drafts = bundle.manifest, _drafts(settings.method)
    roles = ("target", "drafter", "condition", "vq_decoder")
    graphs = [role for role in roles if role in manifest.files and (drafts or role != "drafter")]
    weights = sum(weight_bytes(bundle, role) for role in graphs)
    least = _fewest_tokens(manifest.condition) if prefix is None else prefix
    needed = {"weights": weights, **_picture_bytes(manifest, settings, least)}
    free = available_memory()
    if sum(needed.values()) > free:
        expected = f"{_sizes(needed)} for bundle {manifest.name}"
        raise RequestError(field="memory", found=f"{_gib(free)} free", expected=expected, remedy="close other programs")


def check_room(manifest: Manifest, request: Request, free: int) -> None:
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


def _drafts(method: MethodConfig) -> bool:
    return isinstance(method, Auto) or (isinstance(method, Drafted) and not method.by_heads)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 27 else f"{size / 2**20:.1f} MiB"
