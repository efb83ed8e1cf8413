"""A pipeline whose decoders are the graphs for accelerators, here on ONNX Runtime's CPU provider."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lantern_rt import Pipeline
from lantern_rt.engines.ort.backend import OrtGraphLoader
from lantern_rt.engines.ort.device import OrtDevice


def device_pipeline(bundle: str | Path, provider: str = "cpu") -> Pipeline:
    """Load a bundle on the device path, without recomputing near-equal logits, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        initialize = OrtGraphLoader.__init__

        def initialize_with_device(self: OrtGraphLoader, *arguments: Any) -> None:
            initialize(self, *arguments)
            self._devices = {"cpu": OrtDevice("cpu")}

        patch.setattr(OrtGraphLoader, "__init__", initialize_with_device)
        pipe = Pipeline.from_bundle(bundle, threads=1, provider=provider)
    pipe.engines.rounding = 0.0
    return pipe
