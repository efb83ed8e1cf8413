"""From logits to distributions: guidance, temperature, top-k, top-p, and one draw.

Works on one node's logits at a time, since only nodes on the walked path are ever looked at. Does not
know trees, engines or requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError

Probabilities = NDArray[np.float64]
FilterOrder = Literal["top-k, top-p", "top-p, top-k"]


@dataclass(frozen=True)
class Sampling:
    """How a distribution is made from logits.

    cfg_scale: guided logits are uncond + cfg_scale * (cond - uncond); at exactly 1 the unconditional row
    is not run at all. temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. filter_order: LlamaGen
    applies top-k first, LANTERN (the transformers warpers) top-p first.
    """

    cfg_scale: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    filter_order: FilterOrder = "top-k, top-p"

    @property
    def guided(self) -> bool:
        """Whether an unconditional row is run beside every conditional one."""
        return self.cfg_scale != 1.0

    @property
    def greedy(self) -> bool:
        """Whether the most probable code is always taken."""
        return self.temperature == 0.0

    @property
    def filtered(self) -> bool:
        """Whether some codes are left out: never when greedy."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0)

    def scale(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits over the temperature; as they are when greedy."""
        return logits if self.temperature in (0.0, 1.0) else logits / np.float32(self.temperature)


def guide(logits: NDArray[np.float32], cfg_scale: float) -> NDArray[np.float32]:
    """Mix conditional and unconditional logits `[2, ...]` into `[...]`; `[1, ...]` passes through."""
    if len(logits) == 1:
        only: NDArray[np.float32] = logits[0]
        return only
    cond, uncond = logits
    mixed: NDArray[np.float32] = uncond + np.float32(cfg_scale) * (cond - uncond)
    return mixed


def softmax(logits: NDArray[np.float32]) -> Probabilities:
    """Probabilities float64 of float32 logits, along the last axis; they sum to 1 in float64."""
    weights: Probabilities = np.exp(logits - logits.max(-1, keepdims=True)).astype(np.float64)
    weights /= weights.sum(-1, keepdims=True)
    return weights


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Log-probabilities float32 of float32 logits, along the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    scores: NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return scores


def refuse_damaged(logits: NDArray[Any]) -> None:
    """EngineError if logits `[..., vocabulary]` hold NaN or positive infinity."""
    if not np.isfinite(logits.max(-1)).all():
        raise EngineError("a graph gave NaN or infinite logits; its weights are damaged, export the bundle again")


def shape_distribution(logits: NDArray[np.float32], sampling: Sampling) -> Probabilities:
    """Distribution `[vocabulary]` of guided logits `[vocabulary]`; sums to 1.

    Greedy settings give the plain softmax (the arg-max is what matters). Ties at the top-k threshold are
    all kept; top-p drops what comes after the cumulative sum has passed it and keeps at least one code.
    EngineError if the logits hold NaN or infinity: damaged weights must not pass for a picture.
    """
    refuse_damaged(logits)
    scaled = sampling.scale(logits)
    if not sampling.filtered:
        return softmax(scaled)
    keep = np.arange(len(scaled))
    for name in sampling.filter_order.split(", "):
        if name == "top-k" and 0 < sampling.top_k < len(keep):
            values = scaled[keep]
            keep = keep[values >= np.partition(values, -sampling.top_k)[-sampling.top_k]]
        elif name == "top-p" and sampling.top_p < 1.0:
            keep = keep[np.argsort(-scaled[keep], kind="stable")]
            before = np.cumsum(softmax(scaled[keep]))
            keep = keep[: 1 + int(np.count_nonzero(before <= sampling.top_p))]
    distribution = np.zeros(len(scaled))
    distribution[keep] = softmax(scaled[keep])
    return distribution


def draw(distribution: Probabilities, rng: np.random.Generator) -> int:
    """One code from a distribution `[vocabulary]`; uses exactly one number of the stream."""
    cumulative = np.cumsum(distribution)
    code = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    return min(code, int(np.flatnonzero(distribution)[-1]))


def draw_without_replacement(distribution: Probabilities, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Up to `count` different codes, in the order of successive draws, fewer if fewer have probability.

    An exponential race: the order of Exp(1) / p is that of successive draws without replacement.
    """
    if count == 1:
        return np.array([draw(distribution, rng)], np.int64)
    support = np.flatnonzero(distribution)
    arrival = rng.standard_exponential(len(support)) / distribution[support]
    count = min(count, len(support))
    first = np.argpartition(arrival, count - 1)[:count] if count < len(support) else np.arange(len(support))
    return support[first[np.argsort(arrival[first])]]
