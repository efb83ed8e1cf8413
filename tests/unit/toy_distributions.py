"""Distributions of the toy target, computed directly from the definition and without the runtime."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from toy_engine import ToyModel, ToyTarget

from lantern_rt.methods import Sampling
from lantern_rt.runtime.state import Prompt


def compute_naive_distribution(logits: NDArray[np.float64], sampling: Sampling) -> NDArray[np.float64]:
    """Return the distribution after temperature, top-k, top-p and min-p, computed by simple loops."""
    weights = np.exp((logits - logits.max()) / (sampling.temperature or 1.0))
    for name in sampling.filter_order.split(", "):
        order = sorted(range(len(weights)), key=lambda code: -weights[code])
        if name == "top-k" and sampling.top_k:
            for code in order[sampling.top_k :]:
                weights[code] = 0
        if name == "top-p" and sampling.top_p < 1:
            total = weights.sum()
            cumulative = 0.0
            for code in order:
                probability = weights[code] / total
                if cumulative > sampling.top_p:
                    weights[code] = 0
                cumulative += probability
    weights[weights < (sampling.min_p or 0.0) * weights.max()] = 0
    cutoff = sampling.own_settings.get("epsilon_cutoff", 0.0) * weights.sum()  # of examples/own_sampling_setting.py
    weights[weights < min(cutoff, weights.max())] = 0
    return weights / weights.sum()


def compute_next_distribution(
    model: ToyModel, prompt: Prompt, codes: Sequence[int], sampling: Sampling
) -> NDArray[np.float64]:
    """Return the target's distribution of the token after `codes`, float64 `[vocabulary]`, without the runtime."""
    target = model.target
    assert isinstance(target, ToyTarget)
    prefix = len(prompt.cond.is_real_token)
    rows = []
    for prefix_row in [prompt.cond, prompt.uncond]:
        hashes = target.hash_prefix(prefix_row.embeds)[prefix_row.is_real_token]
        if codes:
            hashes = np.append(hashes, target.hash_codes(np.array(codes), prefix + np.arange(len(codes))))
        rows.append(target.compute_logits(hashes.sum(dtype=np.uint64, keepdims=True))[0].astype(np.float64))
    cond, uncond = rows
    penalty = sampling.repetition_penalty or 1.0
    for code in {token for token in codes if token < len(cond)}:  # row ends are not penalized
        cond[code] = cond[code] * penalty if cond[code] < 0 else cond[code] / penalty
    cell = sum(code < len(cond) for code in codes)
    scale = sampling.cfg_scale if cell < sampling.count_guided_tokens(model.num_codes) else 1.0
    if sampling.cfg_schedule == "linear":
        scale = 1 + (scale - 1) * (cell + 1) / model.num_codes
    return compute_naive_distribution(uncond + scale * (cond - uncond), sampling)


def compute_joint_distribution(model: ToyModel, prompt: Prompt, sampling: Sampling) -> NDArray[np.float64]:
    """Return the probability of every possible image, with an axis of length `vocabulary` for each token."""
    vocabulary = model.target.vocabulary  # type: ignore[attr-defined]
    joint = np.ones((vocabulary,) * model.num_codes)
    for length in range(model.num_codes):
        for codes in itertools.product(range(vocabulary), repeat=length):
            distribution = compute_next_distribution(model, prompt, codes, sampling)
            joint[codes] *= distribution.reshape((vocabulary,) + (1,) * (model.num_codes - length - 1))
    return joint
