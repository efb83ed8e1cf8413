"""Execution contexts of one plan, and its runs on device memory by address, plain or as CUDA graphs.

Each profile has a context, made when first needed; within a profile, shapes and addresses are set again only where
they differ from the last run. All contexts of a plan keep intermediate results in the same memory: their runs follow
each other in one stream.

With CUDA graphs, runs are told apart by profile, shapes and addresses. The first run of a kind is as above. The second
gets a context that is never bound to anything else, runs in it, and is then recorded; later ones are launched. NVIDIA's
guides ask for both: for a run once shapes were set, as it brings the context up to date, which must not be recorded;
and for one context per graph, with memory shared among them, as a graph refers to its context's state. TensorRT-RTX
records by itself, within `execute_async_v3`, and its guide advises against recording from outside.

Does not know what a plan is for, nor where its tensors lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import EngineError
from .cuda_memory import Block, DeviceMemory, Graph
from .plan_errors import PlanErrors

Shape = tuple[int, ...]
Place = tuple[Shape, int]  # a tensor's shape and its address
Kind = tuple[int | Place, ...]  # of a run: its profile, and what is bound to each input and output

# Kinds of runs remembered. An image of LlamaGen-XL goes through 18 spans, with a few numbers of nodes at each, and the
# next image through the same.
MOST_KINDS = 128


@dataclass
class Context:
    """An execution context, what was last bound to its inputs and outputs, and that run recorded."""

    graph: Graph | None = None  # first, so that it goes before the context it refers to
    handle: Any = None
    bound: Mapping[str, Place] = field(default_factory=dict)


class Contexts:
    """The contexts of a loaded plan; to be used with the memory's lock held. EngineError if the library fails."""

    def __init__(self, engine: Any, memory: DeviceMemory, errors: PlanErrors, graphs: bool = False) -> None:
        self._engine, self._memory, self._errors, self._graphs = engine, memory, errors, graphs
        self._strategies = getattr(errors.library, "CudaGraphStrategy", None)  # of TensorRT-RTX
        self._activations: Block | None = None
        self._plain: dict[int, Context] = {}
        self._kinds: dict[Kind, Context | None] = {}  # None after one run; what ran last is at the end

    def enqueue(self, profile: int, inputs: Mapping[str, Place], outputs: Mapping[str, Place]) -> None:
        """Ask for one run within a profile."""
        if not self._graphs:
            self._bind_and_run(self._plain_context(profile), inputs, outputs)
            return
        kind: Kind = (profile, *inputs.values(), *outputs.values())
        seen = kind in self._kinds
        context = self._kinds.pop(kind, None)  # back at the end, if all goes well
        if context is not None:
            self._run_again(context)
        elif seen:
            context = self._make_context(profile, record=True)
            self._bind_and_run(context, inputs, outputs)
            self._record(context)
        else:
            self._bind_and_run(self._plain_context(profile), inputs, outputs)
        self._kinds[kind] = context
        if len(self._kinds) > MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]

    def _bind_and_run(self, context: Context, inputs: Mapping[str, Place], outputs: Mapping[str, Place]) -> None:
        handle, check = context.handle, self._errors.check
        last, context.bound = context.bound, {}  # what is bound now is kept only if everything below succeeds
        reshaped = False
        for name, (shape, address) in inputs.items():
            shape_before, address_before = last.get(name, (None, None))
            if shape != shape_before:
                reshaped = True
                check(handle.set_input_shape(name, shape), f"take `{name}` as {list(shape)}")
            if address != address_before:
                check(handle.set_tensor_address(name, address), f"take an address for `{name}`")
        for name, (shape, address) in outputs.items():
            if reshaped and (found := tuple(handle.get_tensor_shape(name))) != shape:
                raise self._errors.other(f"`{name}` as {list(found)}", f"{list(shape)}")
            if address != last.get(name, (None, None))[1]:
                check(handle.set_tensor_address(name, address), f"take an address for `{name}`")
        check(handle.execute_async_v3(self._memory.stream), "run this plan")
        context.bound = {**inputs, **outputs}

    def _run_again(self, context: Context) -> None:
        if context.graph is not None:
            context.graph.launch()
        else:
            self._errors.check(context.handle.execute_async_v3(self._memory.stream), "run this plan")

    def _record(self, context: Context) -> None:
        """Record what has just run in a context, unless the library does so itself."""
        if self._strategies is not None:
            return

        def run() -> None:
            if not context.handle.execute_async_v3(self._memory.stream):
                raise EngineError(self._errors.messages.brief())

        self._memory.synchronise()
        try:
            context.graph = Graph(self._memory, run)
        except EngineError as error:
            raise self._errors.failure("does not run as a CUDA graph", str(error), "run without CUDA graphs") from error

    def _plain_context(self, profile: int) -> Context:
        if profile not in self._plain:
            self._plain[profile] = self._make_context(profile, record=False)
        return self._plain[profile]

    def _make_context(self, profile: int, record: bool) -> Context:
        memory, errors = self._memory, self._errors
        memory.use()
        handle = self._engine.create_execution_context(self._how(record))
        if handle is None:
            raise errors.failure("makes no execution context (is the device's memory full?)")
        if self._activations is None:
            self._activations = Block(memory, self._engine.device_memory_size_v2)  # enough for every profile
        handle.set_device_memory(self._activations.address, self._activations.size)
        errors.check(not errors.messages.errors, "take memory for intermediate results")
        name = errors.source.profiles[profile].name
        errors.check(handle.set_optimization_profile_async(profile, memory.stream), f"choose profile `{name}`")
        return Context(handle=handle)

    def _how(self, record: bool) -> Any:
        """What to make a context with: a strategy of allocation, for TensorRT-RTX to record within a configuration."""
        ours = self._errors.library.ExecutionContextAllocationStrategy.USER_MANAGED
        if not record or self._strategies is None:
            return ours
        config, whole = self._engine.create_runtime_config(), self._strategies.WHOLE_GRAPH_CAPTURE
        config.set_execution_context_allocation_strategy(ours)
        config.cuda_graph_strategy = whole
        self._errors.check(config.cuda_graph_strategy == whole, "record CUDA graphs")
        return config
