"""TensorRT plans as engines of the decode loop; keys, values, logits and hidden states stay on the device.

Translates passes into the shapes a plan was built for: the smallest profile that fits, and a number of nodes rounded
up to a few fixed ones, so that shapes repeat. The nodes added see only themselves and nobody sees them. Per pass,
embeddings, positions and masks go to the device; back come only the rows that the decode loop looks at.

Does not know trees, prompts or acceptance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...bundle.manifest import DecoderSpec, DrafterSpec
from ...errors import EngineError
from ...runtime.engine import Bools, Cache, Floats, Pass, PassOutput
from ..contracts import PlanOptions
from ..decoder_tensors import NodeInputs, check_span, decoder_tensors, kv_dtype
from ..kv_cache import round_up
from ..ort.session import Array, Tensor
from ..profiles import Profile
from .block_pool import BlockPool
from .contexts import Place, Shape
from .cuda_memory import ALIGNMENT, Allocator, Block, DeviceMemory
from .device_cache import BlockCache, DeviceRows, Fresh
from .plan import PLAIN, Plan
from .plan_errors import PlanSource


class TensorRTEngine:
    """A decoder plan. With a table of code embeddings it is a target; without, a drafter.

    One engine may serve several threads, each with caches of its own. The outputs of a pass are good until the next
    pass on the same cache; reading them later is a ValueError. With CUDA graphs, the memory of freed caches is kept
    for the next ones: passes recur only where addresses do.
    """

    def __init__(
        self,
        library: Any,
        memory: DeviceMemory,
        source: PlanSource,
        spec: DecoderSpec | DrafterSpec,
        code_embeddings: Floats | None = None,
        options: PlanOptions = PLAIN,
    ) -> None:
        self.spec, self._memory, self._source = spec, memory, source
        inputs, outputs = decoder_tensors(spec, drafts=code_embeddings is None)
        self._plan = Plan(library, memory, source, inputs, outputs, options)
        self._blocks: Allocator = BlockPool(memory) if options.cuda_graphs else memory
        self._past = [tensor.name for tensor in inputs if tensor.name.startswith("past_key_values.")]
        self._fresh = [tensor.name for tensor in outputs if tensor.name.startswith("new_key_values.")]
        self._entry = spec.num_kv_heads * spec.head_dim * np.dtype(kv_dtype(source.path, self._plan.dtypes)).itemsize
        self._node_inputs = NodeInputs(code_embeddings, self._plan.dtypes)

    def new_cache(self, rows: int, capacity: int) -> BlockCache:
        """An empty cache on the device; EngineError if the plan was built for fewer rows or columns."""
        most_rows, most_nodes, most_past = (
            max(getattr(profile, name)[2] for profile in self._source.profiles) for name in ("rows", "nodes", "past")
        )
        if rows > most_rows:
            raise self._too_small("rows", rows, most_rows)
        if (sure := capacity - most_nodes - 2) > most_past:  # what comes after those is dropped before it is read
            raise self._too_small("past", round_up(sure), most_past)
        return BlockCache.zeros(self._memory, rows, capacity, len(self._past), self._entry, self._blocks)

    def next_past_length(self, cache: Cache, nodes: int) -> int:
        """The longest row, rounded up; EngineError if the plan has no profile for such a pass."""
        own = _own(cache)
        past_length = own.past_length()
        self._fit(len(own.lengths), nodes, past_length)
        return past_length

    def run(self, batch: Pass, cache: Cache) -> PassOutput:
        """Run one pass. Counts itself in `cache.passes` and `cache.seconds`."""
        own = _own(cache)
        past_length, (rows, nodes) = check_span(batch, own), batch.positions.shape
        profile, stretched = self._fit(rows, nodes, past_length)
        arrays = self._node_inputs(stretch(batch, stretched))
        start = time.perf_counter()
        shapes = self._output_shapes(rows, stretched)
        sizes = {name: array.nbytes for name, array in arrays.items()}
        sizes |= {name: math.prod(shape) * self._item(name) for name, shape in shapes.items()}
        places = self._place(own, sizes)
        for name, array in arrays.items():
            self._memory.upload(places[name], array)
        inputs: dict[str, Place] = {name: (array.shape, places[name]) for name, array in arrays.items()}
        past = (past_length, rows, self.spec.num_kv_heads, self.spec.head_dim)
        inputs |= {name: (past, address) for name, address in zip(self._past, own.addresses(), strict=True)}
        self._plan.enqueue(profile, inputs, {name: (shape, places[name]) for name, shape in shapes.items()})
        self._memory.synchronise()
        own.seconds += time.perf_counter() - start
        own.passes += 1
        logits, hidden = (
            DeviceRows(own, places[name], self._plan.dtypes[name], (rows, nodes, shapes[name][2]), stretched)
            for name in ("logits", "hidden_states")
        )
        first, second = (places[name] for name in self._fresh[:2])
        return PassOutput(logits, hidden, Fresh(first, second - first, rows, own.passes))

    def _output_shapes(self, rows: int, nodes: int) -> dict[str, Shape]:
        spec = self.spec
        shapes: dict[str, Shape] = {
            "logits": (rows, nodes, spec.vocab_size),
            "hidden_states": (rows, nodes, spec.hidden_size),
        }
        return shapes | dict.fromkeys(self._fresh, (nodes, rows, spec.num_kv_heads, spec.head_dim))

    def _item(self, name: str) -> int:
        return np.dtype(self._plan.dtypes[name]).itemsize

    def _place(self, cache: BlockCache, sizes: Mapping[str, int]) -> dict[str, int]:
        """Addresses one after the other in the cache's scratch memory."""
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name], end = end, end + round_up(size, ALIGNMENT)
        start = cache.take_scratch(end)
        return {name: start + offset for name, offset in offsets.items()}

    def _fit(self, rows: int, nodes: int, past_length: int) -> tuple[int, int]:
        """The smallest profile for a pass, by number, and the nodes to run; EngineError if there is none."""
        profiles = self._source.profiles
        found = smallest_profile(profiles, rows, nodes, past_length)
        if found is not None:
            return found, bucket(nodes, profiles[found])
        for name, wanted in (("rows", rows), ("nodes", nodes), ("past", past_length)):
            if wanted > (most := max(getattr(profile, name)[2] for profile in profiles)):
                raise self._too_small(name, wanted, most)
        # each fits some profile, but no profile all: many nodes come with a short past only
        most = max(profile.nodes[2] for profile in profiles if profile.past[2] >= past_length)
        raise self._too_small("nodes", nodes, most)

    def _too_small(self, name: str, wanted: int, most: int) -> EngineError:
        what = {"rows": "rows", "nodes": "nodes in one pass", "past": "past columns"}[name]
        return EngineError(
            f"{self._source.path}: found {wanted} {what}, expected at most {most}, which it was built for; "
            f"rebuild with `{self._source.rebuild} --max-{name} {wanted}`"
        )


class TensorRTFunction:
    """A plan that is one call over rows, such as the image decoder; more rows than it was built for go in turns."""

    def __init__(
        self,
        library: Any,
        memory: DeviceMemory,
        source: PlanSource,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        self._plan = Plan(library, memory, source, inputs, outputs)
        self._memory, self._outputs = memory, outputs
        self._rows = source.profiles[0].rows[2]

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs, in the order in which they were declared."""
        rows = len(next(iter(feeds.values())))
        parts = [
            self._run({name: array[start : start + self._rows] for name, array in feeds.items()})
            for start in range(0, rows, self._rows)
        ]
        return [np.concatenate(found) for found in zip(*parts, strict=True)]

    def _run(self, feeds: Mapping[str, Array]) -> list[Array]:
        arrays = {name: np.ascontiguousarray(array, self._plan.dtypes[name]) for name, array in feeds.items()}
        rows = len(next(iter(arrays.values())))
        blocks = {name: Block(self._memory, array.nbytes) for name, array in arrays.items()}
        results: dict[str, Array] = {}
        for tensor in self._outputs:
            shape = [rows if size is None else size for size in tensor.shape]
            results[tensor.name] = np.empty(shape, self._plan.dtypes[tensor.name])
            blocks[tensor.name] = Block(self._memory, results[tensor.name].nbytes)
        for name, array in arrays.items():
            self._memory.upload(blocks[name].address, array)
        self._plan.enqueue(
            0,
            {name: (array.shape, blocks[name].address) for name, array in arrays.items()},
            {name: (array.shape, blocks[name].address) for name, array in results.items()},
        )
        for name, array in results.items():
            self._memory.download(array, blocks[name].address)
        self._memory.synchronise()
        return list(results.values())


def smallest_profile(profiles: Sequence[Profile], rows: int, nodes: int, past_length: int) -> int | None:
    """The number of the profile with the fewest nodes, then the shortest past, that takes such a pass."""
    fitting = [
        (profile.nodes[2], profile.past[2], number)
        for number, profile in enumerate(profiles)
        if profile.rows[0] <= rows <= profile.rows[2]
        and nodes <= profile.nodes[2]
        and profile.past[0] <= past_length <= profile.past[2]
    ]
    return min(fitting)[2] if fitting else None


def bucket(nodes: int, profile: Profile) -> int:
    """Nodes to run for so many: the next power of two, or the profile's own bounds."""
    low, _, high = profile.nodes
    return min(max(1 << (nodes - 1).bit_length(), low), high)


def stretch(batch: Pass, nodes: int) -> Pass:
    """A pass with nodes added at the end that read zeros, see themselves only, and are seen by nobody."""
    rows, before = batch.positions.shape
    more = nodes - before
    if more == 0:
        return batch
    past_length = batch.attention_mask.shape[2] - before
    attention_mask: Bools = np.zeros((rows, nodes, past_length + nodes), bool)
    attention_mask[:, :before, : past_length + before] = batch.attention_mask
    attention_mask[:, np.arange(before, nodes), past_length + np.arange(before, nodes)] = True

    def longer(array: Any) -> Any:
        return None if array is None else np.pad(array, [(0, 0), (0, more)] + [(0, 0)] * (array.ndim - 2))

    return Pass(
        longer(batch.positions), attention_mask, longer(batch.tokens), longer(batch.embeds), longer(batch.hidden)
    )


def _own(cache: Cache) -> BlockCache:
    if not isinstance(cache, BlockCache):
        raise TypeError(f"a cache of another engine: {type(cache).__name__}")
    return cache
