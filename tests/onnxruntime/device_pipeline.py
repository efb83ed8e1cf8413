"""Pipeline that runs the code path for accelerators on the CPU, so that tests need no accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lantern_rt import Pipeline
from lantern_rt.engines.ort.backend import OrtGraphLoader
from lantern_rt.engines.ort.device import OrtDevice


def load_device_pipeline(bundle: str | Path, provider: str = "cpu") -> Pipeline:
    """Load a bundle whose decoders run the graphs for accelerators on the CPU, without recomputing near ties."""
    with pytest.MonkeyPatch.context() as patch:
        initialize = OrtGraphLoader.__init__

        def initialize_with_device(self: OrtGraphLoader, *arguments: Any) -> None:
            initialize(self, *arguments)
            self._devices = {"cpu": OrtDevice("cpu")}

        patch.setattr(OrtGraphLoader, "__init__", initialize_with_device)
        pipe = Pipeline.from_bundle(bundle, threads=1, provider=provider)
    pipe.engines.rounding_bound = 0.0  # logits never count as near-equal
    return pipe
