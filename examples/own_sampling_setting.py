"""The sampling setting `epsilon_cutoff` of transformers: tokens of lower probability are left out."""

from math import log
from typing import Annotated

import numpy as np
from pydantic import Field

from lantern_rt import register_sampling_setting


def make_filter(epsilon):
    def find_bounds(logits, certain, margin):  # as in runtime/filters.py
        sums = np.logaddexp.reduce(logits[logits > certain]), np.logaddexp.reduce(logits)
        lowest, highest = (min(log(epsilon) + each, logits.max()) for each in sums)
        return lowest - margin, highest + margin

    return find_bounds


annotation = Annotated[float | None, Field(gt=0, le=1, description="Smallest probability of tokens to sample from.")]
register_sampling_setting("epsilon_cutoff", annotation, make_filter)
