"""One TensorRT or TensorRT-RTX plan: loaded, checked, and run on device memory by address, plain or as CUDA graphs.

Each profile has an execution context, made when first needed; within a profile, shapes and addresses are set again only
where they differ from the last run. All contexts of a plan keep intermediate results in the same memory: their runs
follow each other in one stream.

With CUDA graphs, runs are told apart by profile, shapes and addresses. The first run of a kind is as above. The second
gets a context that is never bound to anything else, runs in it, and is then recorded; later ones are launched. NVIDIA's
guides ask for both: for a run once shapes were set, as it brings the context up to date, which must not be recorded;
and for one context per graph, with memory shared among them, as a graph refers to its context's state. TensorRT-RTX
records by itself, within `execute_async_v3`, and its guide advises against recording from outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...checks import brief
from ...errors import EngineError
from ..contracts import DTypes, PlanOptions, Tensor
from ..profiles import Profile
from .cuda import Block, CudaMemory, Graph
from .library import first, make_logger

Shape = tuple[int, ...]
Place = tuple[Shape, int]  # a tensor's shape and its address
Kind = tuple[int | Place, ...]  # of a run: its profile, and what is bound to each input and output
PLAIN = PlanOptions()

# Kinds of runs remembered. An image of LlamaGen-XL goes through 18 past lengths, with a few numbers of nodes at each,
# and the next image through the same.
MOST_KINDS = 128


@dataclass(frozen=True)
class PlanSource:
    """Where a plan comes from: its file, the ranges it was built for, and the command that builds it again."""

    path: Path
    profiles: tuple[Profile, ...]
    rebuild: str

    def other(self, found: str, expected: str, more: str = "") -> EngineError:
        """The error for a plan that is not the one expected; `more` goes to the command that builds it again."""
        return EngineError(f"{self.path}: found {found}, expected {expected}; rebuild with `{self.rebuild}{more}`")


@dataclass
class Context:
    """An execution context, what was last bound to its inputs and outputs, and that run recorded."""

    graph: Graph | None = None  # first, so that it goes before the context it refers to
    handle: Any = None
    bound: Mapping[str, Place] = field(default_factory=dict)


class Plan:
    """A plan on a device. Several threads may run it; each run waits for its turn in the device's stream.

    Raises: EngineError if the library does not load the plan, if its tensors are others than expected, or if it does
    not take the options.
    """

    def __init__(
        self,
        library: Any,
        memory: CudaMemory,
        source: PlanSource,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        options: PlanOptions = PLAIN,
    ) -> None:
        self._library, self._memory, self._source = library, memory, source
        self._errors: list[str] = []
        self._logger = make_logger(library, self._errors)  # the library keeps no reference of its own
        memory.use()
        try:
            self._runtime = library.Runtime(self._logger)
            self._engine = self._runtime.deserialize_cuda_engine(source.path.read_bytes())
        except (TypeError, RuntimeError) as error:  # what the bindings raise where the library returns nothing
            raise self._failure("load this plan", brief(error, 200)) from error
        except OSError as error:
            raise EngineError(f"{source.path}: cannot be read ({error.strerror or error})") from error
        self._check(self._engine is not None, "load this plan")
        if (found := self._engine.num_optimization_profiles) != len(source.profiles):
            raise source.other(f"{found} profiles", f"{len(source.profiles)}, those of engine.json")
        self.dtypes = self._check_tensors(inputs, outputs)
        if options.weight_budget is not None:
            self._stream_weights(options.weight_budget)
        self._graphs = options.cuda_graphs
        self._strategies = getattr(library, "CudaGraphStrategy", None)  # of TensorRT-RTX
        self._activations: Block | None = None
        self._plain: dict[int, Context] = {}
        self._kinds: dict[Kind, Context | None] = {}  # None after one run; what ran last is at the end

    def enqueue(self, profile: int, inputs: Mapping[str, Place], outputs: Mapping[str, Place]) -> None:
        """Ask for one run within a profile; it happens in the order of the memory's stream."""
        with self._memory.lock:
            self._errors.clear()
            if not self._graphs:
                self._run_plainly(profile, inputs, outputs)
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
                self._run_plainly(profile, inputs, outputs)
            self._kinds[kind] = context
            if len(self._kinds) > MOST_KINDS:
                del self._kinds[next(iter(self._kinds))]

    def _run_plainly(self, profile: int, inputs: Mapping[str, Place], outputs: Mapping[str, Place]) -> None:
        if profile not in self._plain:
            self._plain[profile] = self._make_context(profile, record=False)
        self._bind_and_run(self._plain[profile], inputs, outputs)

    def _bind_and_run(self, context: Context, inputs: Mapping[str, Place], outputs: Mapping[str, Place]) -> None:
        handle, reshaped, places = context.handle, False, {**inputs, **outputs}
        last, context.bound = context.bound, {}  # what is bound now is kept only if everything below succeeds
        for name, (shape, address) in places.items():
            shape_before, address_before = last.get(name, (None, None))
            if name in inputs and shape != shape_before:
                reshaped = True
                self._check(handle.set_input_shape(name, shape), f"take `{name}` as {list(shape)}")
            elif reshaped and name in outputs and (found := tuple(handle.get_tensor_shape(name))) != shape:
                raise self._source.other(f"`{name}` as {list(found)}", f"{list(shape)}")
            if address != address_before:
                self._check(handle.set_tensor_address(name, address), f"take an address for `{name}`")
        self._check(handle.execute_async_v3(self._memory.stream), "run this plan")
        context.bound = places

    def _run_again(self, context: Context) -> None:
        if context.graph is not None:
            context.graph.launch()
        else:
            self._check(context.handle.execute_async_v3(self._memory.stream), "run this plan")

    def _record(self, context: Context) -> None:
        """Record what has just run in a context, unless the library does so itself."""
        if self._strategies is not None:
            return

        def run() -> None:
            if not context.handle.execute_async_v3(self._memory.stream):
                raise EngineError(first(self._errors))

        self._memory.synchronise()
        try:
            context.graph = Graph(self._memory, run)
        except EngineError as error:
            raise self._failure("run as a CUDA graph", str(error), "run without CUDA graphs") from error

    def _make_context(self, profile: int, record: bool) -> Context:
        memory = self._memory
        memory.use()
        handle = self._engine.create_execution_context(self._strategy(record))
        self._check(handle is not None, "make an execution context (is the device's memory full?)")
        if self._activations is None:
            self._activations = Block(memory, self._engine.device_memory_size_v2)  # enough for every profile
        handle.set_device_memory(self._activations.address, self._activations.size)
        self._check(not self._errors, "take memory for intermediate results")
        name = self._source.profiles[profile].name
        self._check(handle.set_optimization_profile_async(profile, memory.stream), f"choose profile `{name}`")
        return Context(handle=handle)

    def _strategy(self, record: bool) -> Any:
        """What to make a context with: a strategy of allocation, for TensorRT-RTX to record within a configuration."""
        ours = self._library.ExecutionContextAllocationStrategy.USER_MANAGED
        if not record or self._strategies is None:
            return ours
        config, whole = self._engine.create_runtime_config(), self._strategies.WHOLE_GRAPH_CAPTURE
        config.set_execution_context_allocation_strategy(ours)
        config.cuda_graph_strategy = whole
        self._check(config.cuda_graph_strategy == whole, "record CUDA graphs")
        return config

    def _stream_weights(self, budget: int) -> None:
        """Leave no more than `budget` bytes of the weights on the device; only before there are contexts."""
        engine, source = self._engine, self._source
        if not engine.streamable_weights_size:
            expected = "a plan for it; leave weight-budget out"
            raise source.other("no weights that can be streamed", expected, " --weight-streaming")
        engine.weight_streaming_budget_v2 = budget = min(budget, engine.streamable_weights_size)
        kept = engine.weight_streaming_budget_v2 == budget
        self._check(kept, f"keep to {budget / 2**20:,.0f} MiB of weights on the device")

    def _check_tensors(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> DTypes:
        """Compare the plan's tensors with what is expected of them; NumPy types by name."""
        engine, modes, kinds = self._engine, self._library.TensorIOMode, self._library.DataType
        names = {kinds.FLOAT: "float32", kinds.HALF: "float16", kinds.INT64: "int64"}
        found = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        expected = {tensor.name: modes.INPUT for tensor in inputs} | {tensor.name: modes.OUTPUT for tensor in outputs}
        if odd := sorted(found ^ expected.keys()):
            which = "a" if odd[0] in found else "no"
            raise self._source.other(f"{which} tensor `{odd[0]}`", f"{len(expected)} tensors")
        dtypes: dict[str, type[np.generic]] = {}
        for tensor in (*inputs, *outputs):
            name, shape = tensor.name, tuple(engine.get_tensor_shape(tensor.name))
            dtype = names.get(kind := engine.get_tensor_dtype(name), str(kind))
            fits = len(shape) == len(tensor.shape) and all(
                size in (-1, want) or want is None for size, want in zip(shape, tensor.shape, strict=True)
            )
            if engine.get_tensor_mode(name) != expected[name] or dtype not in tensor.dtypes or not fits:
                raise self._source.other(f"`{name}` as {dtype} {list(shape)}", str(tensor))
            dtypes[name] = np.dtype(dtype).type
        return dtypes

    def _check(self, success: bool, what: str) -> None:
        """Raises: EngineError unless the library did `what`."""
        if not success:
            raise self._failure(what)

    def _failure(self, what: str, reason: str = "", cure: str = "") -> EngineError:
        """The library does not do `what`: by its own words, and to be built again, unless another reason is given."""
        return EngineError(
            f"{self._source.path}: {self._library.__name__} {self._library.__version__} does not {what}: "
            f"{reason or first(self._errors)}; {cure or f'rebuild with `{self._source.rebuild}`'}"
        )
