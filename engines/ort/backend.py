"""Loader of a bundle's graphs in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence

from ...bundle.files import Bundle
from ...bundle.manifest import DecoderSizes
from ...runtime.engine import Engine, Floats
from ..contracts import Function, TensorSpec
from ..kv_cache import COLUMN_STEP
from .device import OrtDevice
from .engine import OrtDeviceEngine, OrtEngine
from .providers import DEFAULT_PROVIDER, PROVIDERS, ProviderChoice
from .session import GraphSession, check_provider


class OrtGraphLoader:
    """Loader of a bundle's graphs in ONNX Runtime, after a check that all providers run."""

    def __init__(self, bundle: Bundle, threads: int, providers: ProviderChoice) -> None:
        self._bundle = bundle
        self._threads = threads
        self._providers = providers
        for name in {providers.main_provider, *providers.graph_providers.values()}:
            check_provider(name)
        names = {providers.get_provider(role) for role in ("target", "drafter")}
        self._devices = {name: OrtDevice(name) for name in names if PROVIDERS[name].memory_device != "cpu"}

    def load_decoder(self, spec: DecoderSizes, code_embeddings: Floats | None) -> Engine:
        """Load the target, with the embeddings of its tokens `[vocab_size, hidden_size]`, or the drafter, without."""
        path, *others = map(self._bundle.path, self._bundle.manifest.list_graphs_of_decoder(spec.role))
        prefix_path = next(iter(others), None)
        provider = self._providers.get_provider(spec.role)
        if provider in self._devices:
            manifest = self._bundle.manifest
            # A pass has at most the nodes of a whole sequence and a draft. This is a tighter limit than the size of the
            # rotary table, which may have rows for several sequences, one per image size.
            max_nodes = manifest.condition.prefix + manifest.max_image_tokens + COLUMN_STEP
            return OrtDeviceEngine(
                path,
                spec,
                code_embeddings,
                self._threads,
                self._devices[provider],
                manifest.target.dtype,
                max_nodes,
                prefix_path,
            )
        return OrtEngine(path, spec, code_embeddings, self._threads, provider, prefix_path)

    def load_graph_function(self, role: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Function:
        """Load a graph without a KV cache, and return a function that returns its outputs in the declared order."""
        provider = self._providers.get_provider(role)
        if role in PROVIDERS[provider].cpu_only_graphs:
            provider = DEFAULT_PROVIDER
        return GraphSession(self._bundle.path(role), inputs, outputs, self._threads, provider).run_and_check
