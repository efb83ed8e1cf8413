"""A TensorRT engine with the host in the GPU's place, beside the plain engine of the same graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from host_tensorrt import HostLibrary, write_plan
from tiny_rig import Rig, spec_of

from lantern_rt.engines.device_graph import device_graph
from lantern_rt.engines.ort.device import Device
from lantern_rt.engines.profiles import Profile, capacity_of
from lantern_rt.engines.trt.engine import TensorRTEngine
from lantern_rt.engines.trt.plan import Plan

PROFILES = (
    Profile(name="ar", rows=(1, 2, 4), nodes=(2, 2, 2), columns=(64, 192, 320)),
    Profile(name="tree", rows=(1, 2, 4), nodes=(2, 12, 24), columns=(64, 192, 320)),
)


class HostRig:
    """A rig's graph behind the TensorRT engine, and behind the plain one."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.library, self.device = rig, HostLibrary(), Device("cpu")
        made = device_graph(rig.path, spec_of(rig.config), drafts=False, capacity=capacity_of(PROFILES))
        self.plan = write_plan(rig.path, PROFILES, rig.path.with_suffix(".plan"), made.model)
        self.engine = self.load()

    def load(self, plan: Path | None = None, profiles: tuple[Profile, ...] = PROFILES, **change: Any) -> TensorRTEngine:
        loaded = Plan(self.library, plan or self.plan, profiles, "lantern-rt build-engine tiny")
        spec = spec_of(self.rig.config).model_copy(update=change)
        return TensorRTEngine(loaded, spec, self.rig.table, self.device)

    def prefilled(self, rows: int, capacity: int = 300) -> Any:
        """A cache that holds the first `rows` prefixes."""
        return self.rig.prefilled(rows, self.engine, capacity)

    def extend(self, cache: Any, codes: list[list[int]]) -> None:
        self.rig.extend(cache, codes, self.engine)

    def last(self, cache: Any, codes: list[int]) -> np.ndarray:
        tokens = np.array([[code, 0] for code in codes])
        positions = np.repeat(cache.lengths[:, None], 2, 1)
        return self.rig.run(cache, tokens, np.eye(2, dtype=bool), positions, self.engine).logits[:, 0]
