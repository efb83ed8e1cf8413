"""A bundle's graphs in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence

from ...bundle.files import Bundle
from ...bundle.manifest import DecoderSpec, DrafterSpec
from ...runtime.engine import Engine, Floats
from ..contracts import Function, Tensor
from .device import Device
from .engine import OrtDeviceEngine, OrtEngine
from .providers import DEFAULT_PROVIDER, PROVIDERS, Providers
from .session import GraphSession, check_provider


class OrtGraphs:
    """Loads the graphs of a bundle, each on the provider that `providers` names for it.

    Raises:
        EngineError: a provider is not installed, or has no convolutions.
    """

    def __init__(self, bundle: Bundle, threads: int, providers: Providers) -> None:
        self._bundle, self._threads, self._providers = bundle, threads, providers
        for name in {providers.main, *providers.own.values()}:
            check_provider(name)
        self._device = Device(providers.main) if PROVIDERS[providers.main].memory != "cpu" else None

    def decoder(self, role: str, spec: DecoderSpec | DrafterSpec, code_embeddings: Floats | None) -> Engine:
        """The target (with its table of code embeddings) or the drafter (without) as an engine."""
        path = self._bundle.path(role)
        if self._device is not None:
            return OrtDeviceEngine(path, spec, code_embeddings, self._threads, self._device)
        return OrtEngine(path, spec, code_embeddings, self._threads, self._providers.main)

    def function(
        self, role: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], threads: int | None = None
    ) -> Function:
        """Another graph (condition, image decoder), checked to have these tensors; threads: of its own."""
        provider = self._providers.of(role)
        if role in PROVIDERS[provider].leaves:
            provider = DEFAULT_PROVIDER
        return GraphSession(self._bundle.path(role), inputs, outputs, threads or self._threads, provider).run_checked
