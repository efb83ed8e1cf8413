"""A pipeline whose decoders are the graphs that accelerators run, here on ONNX Runtime's CPU provider."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lantern_rt import Pipeline
from lantern_rt.engines.ort.backend import OrtGraphs
from lantern_rt.engines.ort.device import Device


def device_pipeline(bundle: str | Path, provider: str = "cpu") -> Pipeline:
    """The bundle on the device path; whatever the device draws is taken, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        opened = OrtGraphs.__init__

        def open_there(self: OrtGraphs, *given: Any) -> None:
            opened(self, *given)
            self._devices = {"cpu": Device("cpu")}

        patch.setattr(OrtGraphs, "__init__", open_there)
        pipe = Pipeline.from_bundle(bundle, threads=1, provider=provider)
    pipe.engines.rounding = 0.0
    return pipe
