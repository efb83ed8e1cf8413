"""One TensorRT or TensorRT-RTX plan, loaded: its tensors checked, its weights where they were asked to be.

Does not know what a plan is for, nor how it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import EngineError
from ..contracts import PlanOptions
from ..ort.session import Tensor
from .contexts import Contexts, Place
from .cuda_memory import DeviceMemory
from .library import Messages, make_logger
from .plan_errors import PlanErrors, PlanSource

PLAIN = PlanOptions()


class Plan:
    """A plan on a device. Several threads may run it; each run waits for its turn in the device's stream.

    EngineError if the library does not load the plan, if its tensors are others than expected, or if it does not take
    the options.
    """

    def __init__(
        self,
        library: Any,
        memory: DeviceMemory,
        source: PlanSource,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        options: PlanOptions = PLAIN,
    ) -> None:
        messages = Messages()
        self._memory, self._library = memory, library
        self._errors = errors = PlanErrors(library, source, messages)
        self._logger = make_logger(library, messages)  # the library keeps no reference of its own
        memory.use()
        try:
            self._runtime = library.Runtime(self._logger)
            self._engine = self._runtime.deserialize_cuda_engine(source.path.read_bytes())
        except (TypeError, RuntimeError) as error:  # what the bindings raise where the library returns nothing
            raise errors.failure(f"does not load this plan ({' '.join(str(error).split())[:200]})") from error
        except OSError as error:
            raise EngineError(f"{source.path}: cannot be read ({error.strerror or error})") from error
        if self._engine is None:
            raise errors.failure("does not load this plan")
        if (found := self._engine.num_optimization_profiles) != len(source.profiles):
            raise errors.other(f"{found} profiles", f"{len(source.profiles)}, those of engine.json")
        self.dtypes = self._check(inputs, outputs)
        if options.weight_budget is not None:
            self._stream_weights(options.weight_budget)
        self._contexts = Contexts(self._engine, memory, errors, options.cuda_graphs)

    def enqueue(self, profile: int, inputs: Mapping[str, Place], outputs: Mapping[str, Place]) -> None:
        """Ask for one run within a profile; it happens in the order of the memory's stream."""
        with self._memory.lock:
            self._errors.messages.errors.clear()
            self._contexts.enqueue(profile, inputs, outputs)

    def _stream_weights(self, budget: int) -> None:
        """Leave no more than `budget` bytes of the weights on the device; only before there are contexts."""
        engine, source = self._engine, self._errors.source
        if not engine.streamable_weights_size:
            raise EngineError(
                f"{source.path}: found no weights that can be streamed, expected a plan for it; rebuild with "
                f"`{source.rebuild} --weight-streaming`, or leave weight-budget out"
            )
        engine.weight_streaming_budget_v2 = budget = min(budget, engine.streamable_weights_size)
        self._errors.check(
            engine.weight_streaming_budget_v2 == budget, f"keep to {budget / 2**20:,.0f} MiB of weights on the device"
        )

    def _check(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[str, type[np.generic]]:
        """Compare the plan's tensors with what is expected of them; NumPy types by name."""
        engine, modes, kinds = self._engine, self._library.TensorIOMode, self._library.DataType
        names = {kinds.FLOAT: "float32", kinds.HALF: "float16", kinds.INT64: "int64"}
        found = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        expected = {tensor.name for tensor in (*inputs, *outputs)}
        if found != expected:
            odd = sorted(found ^ expected)[0]
            raise self._errors.other(f"{'a' if odd in found else 'no'} tensor `{odd}`", f"{len(expected)} tensors")
        dtypes: dict[str, type[np.generic]] = {}
        for mode, tensors in ((modes.INPUT, inputs), (modes.OUTPUT, outputs)):
            for tensor in tensors:
                kind, shape = engine.get_tensor_dtype(tensor.name), tuple(engine.get_tensor_shape(tensor.name))
                dtype = names.get(kind, str(kind))
                fits = len(shape) == len(tensor.shape) and all(
                    size in (-1, want) or want is None for size, want in zip(shape, tensor.shape, strict=True)
                )
                if engine.get_tensor_mode(tensor.name) != mode or dtype not in tensor.dtypes or not fits:
                    sizes = ", ".join("any" if size is None else str(size) for size in tensor.shape)
                    raise self._errors.other(
                        f"`{tensor.name}` as {dtype} {list(shape)}", f"{' or '.join(tensor.dtypes)} [{sizes}]"
                    )
                dtypes[tensor.name] = np.dtype(dtype).type
        return dtypes
