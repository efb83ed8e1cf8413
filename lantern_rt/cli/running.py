"""What a command decodes with: the options of engines that `run`, `bench`, `tune` and `eval` share.

Does not know option parsing, nor what is decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..bundle.files import Bundle, open_bundle
from ..pipeline import Pipeline


@dataclass(frozen=True)
class Running:
    """threads: of the engines. engines: a folder that `build-engine` made. provider: of ONNX Runtime. cuda_graphs and
    weight_budget (MiB): for TensorRT engines. As `Pipeline.from_bundle` takes them otherwise."""

    threads: int | None = None
    engines: Path | None = None
    provider: str = "cpu"
    cuda_graphs: bool = False
    weight_budget: int | None = None

    def open_bundle(self, name: str) -> Bundle:
        """The bundle, without hashing the graphs that engines stand in for."""
        if self.engines is None:
            return open_bundle(name)
        from ..engines.engine_folder import open_engine_folder

        return open_bundle(name, unread=open_engine_folder(self.engines).replaced())

    def load(self, bundle: Bundle) -> Pipeline:
        """The bundle's graphs, or the engines in their place, ready to decode."""
        return Pipeline.from_bundle(
            bundle,
            self.threads,
            provider=self.provider,
            engines=self.engines,
            cuda_graphs=self.cuda_graphs,
            weight_budget=None if self.weight_budget is None else self.weight_budget << 20,
        )
