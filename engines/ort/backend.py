"""A bundle's graphs in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence

from ...bundle.files import Bundle
from ...bundle.manifest import DecoderSpec, DrafterSpec
from ...runtime.engine import Engine, Floats
from ..contracts import Function, TensorSpec
from ..kv_cache import COLUMN_STEP
from .device import OrtDevice
from .engine import OrtDeviceEngine, OrtEngine
from .providers import DEFAULT_PROVIDER, PROVIDERS, ProviderChoice
from .session import GraphSession, check_provider


class OrtGraphLoader:
    """Loads the graphs of a bundle, each on the provider that `providers` names for it.

    Raises:
        EngineError: a provider is not installed, or has no convolutions.
    """

    def __init__(self, bundle: Bundle, threads: int, providers: ProviderChoice) -> None:
        self._bundle = bundle
        self._threads = threads
        self._providers = providers
        for name in {providers.main_provider, *providers.graph_providers.values()}:
            check_provider(name)
        names = {providers.provider_for(role) for role in ("target", "drafter")}
        self._devices = {name: OrtDevice(name) for name in names if PROVIDERS[name].memory_device != "cpu"}

    def load_decoder(self, role: str, spec: DecoderSpec | DrafterSpec, code_embeddings: Floats | None) -> Engine:
        """Load the target or the drafter.

        Args:
            role: `target` or `drafter`.
            spec: sizes of the decoder.
            code_embeddings: embeddings of tokens, `[vocab_size, hidden_size]`, for the target; None for the drafter.
        """
        path = self._bundle.path(role)
        provider = self._providers.provider_for(role)
        if provider in self._devices:
            manifest = self._bundle.manifest
            # At most a sequence and its draft. A rotary table may have rows for several sequences, one per image size.
            max_nodes = manifest.condition.prefix + manifest.max_image_tokens + COLUMN_STEP
            return OrtDeviceEngine(
                path, spec, code_embeddings, self._threads, self._devices[provider], manifest.target.dtype, max_nodes
            )
        return OrtEngine(path, spec, code_embeddings, self._threads, provider)

    def load_graph_function(self, role: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Function:
        """Load another graph and check its tensors.

        Args:
            role: name of the graph, such as `condition` or `vq_decoder`.
            inputs: all expected inputs.
            outputs: expected outputs, in the order in which the function returns them.
        """
        provider = self._providers.provider_for(role)
        if role in PROVIDERS[provider].cpu_only_graphs:
            provider = DEFAULT_PROVIDER
        return GraphSession(self._bundle.path(role), inputs, outputs, self._threads, provider).run_and_check
