"""Guidance of the first tokens only, as the published implementation's `cfg_interval`, through the whole product."""

from pathlib import Path

import numpy as np
import pytest
from llamagen_golden import golden

from lantern_rt import Pipeline

METHODS = ["ar", "sjd:window=3", "sjd:window=7", "eagle:tree=chain-3", "eagle:tree=dynamic-8-3-3"]


@pytest.mark.parametrize("method", METHODS)
def test_the_t2i_golden_with_cfg_interval_is_reproduced(t2i_drafter_bundle: Path, method: str) -> None:
    arrays = golden("llamagen-t2i")
    given = arrays["t5_embeddings"], arrays["t5_mask"]
    settings = {"temperature": 0, "cfg_scale": 4.0, "cfg_interval": int(arrays["cfg_interval"])}
    found = Pipeline.from_bundle(t2i_drafter_bundle, threads=1)(embeddings=given, method=method, **settings)
    np.testing.assert_array_equal(np.array(found.codes), arrays["greedy_ids_cfg4_interval"])


@pytest.mark.parametrize("method", METHODS[:3])
def test_the_c2i_golden_with_cfg_interval_is_reproduced(c2i_bundle: Path, method: str) -> None:
    arrays = golden("llamagen-c2i")
    settings = {"temperature": 0, "cfg_scale": 4.0, "cfg_interval": int(arrays["cfg_interval"])}
    pipeline = Pipeline.from_bundle(c2i_bundle, threads=1)
    found = pipeline(class_ids=arrays["class_ids"].tolist(), method=method, **settings)
    np.testing.assert_array_equal(np.array(found.codes), arrays["greedy_ids_cfg4_interval"])
