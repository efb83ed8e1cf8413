"""TensorRT plans as engines of the decode loop; keys, values, logits and hidden states stay on the device.

Translates passes into the shapes a plan was built for: the smallest profile that fits, and a number of nodes rounded
up to a few fixed ones, so that shapes repeat. The nodes added see only themselves and nobody sees them. Per pass,
embeddings, positions and masks go to the device; back come only the rows that the decode loop looks at.
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
from ..contracts import Array, Tensor
from ..decoder_tensors import NodeInputs, decoder_tensors, kv_dtype, past_length_of
from ..kv_cache import own_cache, round_up
from ..profiles import Profile
from .cuda import ALIGNMENT, Block, CudaMemory
from .device_cache import BlockCache, DeviceRows, NewKV
from .plan import Plan, PlanSource, Shape


class TensorRTEngine:
    """A decoder plan. With a table of code embeddings it is a target; without, a drafter.

    One engine may serve several threads, each with caches of its own. The outputs of a pass are good until the next
    pass on the same cache; reading them later is a ValueError.
    """

    def __init__(
        self,
        library: Any,
        memory: CudaMemory,
        source: PlanSource,
        spec: DecoderSpec | DrafterSpec,
        code_embeddings: Floats | None = None,
    ) -> None:
        self.spec, self._memory, self._source = spec, memory, source
        inputs, outputs = decoder_tensors(spec, drafts=code_embeddings is None)
        self._plan = Plan(library, memory, source, inputs, outputs)
        self._past = [tensor.name for tensor in inputs if tensor.name.startswith("past_key_values.")]
        self._new = [tensor.name for tensor in outputs if tensor.name.startswith("new_key_values.")]
        self._entry = spec.num_kv_heads * spec.head_dim * np.dtype(kv_dtype(source.path, self._plan.dtypes)).itemsize
        self._node_inputs = NodeInputs(code_embeddings, self._plan.dtypes)

    def new_cache(self, rows: int, capacity: int) -> BlockCache:
        """An empty cache on the device. Raises: EngineError if the plan was built for fewer rows or columns."""
        if rows > self._most("rows"):
            raise self._too_small("rows", rows)
        # what comes after the largest pass is dropped before it is read
        if (sure := capacity - self._most("nodes") - 2) > self._most("past"):
            raise self._too_small("past", round_up(sure))
        return BlockCache(self._memory, rows, capacity, len(self._past), self._entry)

    def next_past_length(self, cache: Cache, nodes: int) -> int:
        """The longest row, rounded up. Raises: EngineError if the plan has no profile for such a pass."""
        own = own_cache(cache, BlockCache)
        self._fit(len(own.lengths), nodes, own.past_length())
        return own.past_length()

    def run(self, batch: Pass, cache: Cache) -> PassOutput:
        """Run one pass. Counts itself in `cache.passes` and `cache.seconds`."""
        own, spec, dtypes = own_cache(cache, BlockCache), self.spec, self._plan.dtypes
        past_length, (rows, nodes) = past_length_of(batch, own), batch.positions.shape
        profile, padded = self._fit(rows, nodes, past_length)
        arrays = self._node_inputs(pad_nodes(batch, padded))
        start = time.perf_counter()
        shapes: dict[str, Shape] = {
            "logits": (rows, padded, spec.vocab_size),
            "hidden_states": (rows, padded, spec.hidden_size),
            **dict.fromkeys(self._new, (padded, rows, spec.num_kv_heads, spec.head_dim)),
        }
        sizes = {name: array.nbytes for name, array in arrays.items()}
        sizes |= {name: math.prod(shape) * np.dtype(dtypes[name]).itemsize for name, shape in shapes.items()}
        places = self._place(own, sizes)
        for name, array in arrays.items():
            self._memory.upload(places[name], array)
        past = (past_length, rows, spec.num_kv_heads, spec.head_dim)
        self._plan.enqueue(
            profile,
            {name: (array.shape, places[name]) for name, array in arrays.items()}
            | {name: (past, address) for name, address in zip(self._past, own.addresses(), strict=True)},
            {name: (shape, places[name]) for name, shape in shapes.items()},
        )
        self._memory.synchronise()
        own.seconds += time.perf_counter() - start
        own.passes += 1
        logits, hidden = (
            DeviceRows(own, places[name], dtypes[name], (rows, nodes, shapes[name][2]), padded)
            for name in ("logits", "hidden_states")
        )
        first, second = (places[name] for name in self._new[:2])
        return PassOutput(logits, hidden, NewKV(first, second - first, own.passes))

    def _place(self, cache: BlockCache, sizes: Mapping[str, int]) -> dict[str, int]:
        """Addresses one after the other in the cache's scratch memory."""
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name], end = end, end + round_up(size, ALIGNMENT)
        start = cache.take_scratch(end)
        return {name: start + offset for name, offset in offsets.items()}

    def _fit(self, rows: int, nodes: int, past_length: int) -> tuple[int, int]:
        """The smallest profile for a pass, by number, and the nodes to run. Raises: EngineError if there is none."""
        found = smallest_profile(self._source.profiles, rows, nodes, past_length)
        if found is not None:
            return found, bucket(nodes, self._source.profiles[found])
        for name, wanted in (("rows", rows), ("nodes", nodes), ("past", past_length)):
            if wanted > self._most(name):
                raise self._too_small(name, wanted)
        # each fits some profile, but no profile all: many nodes come with a short past only
        raise self._too_small("nodes", nodes, past_length)

    def _most(self, name: str, past_length: int = 0) -> int:
        """The largest size of any profile that takes such a past."""
        return max(int(getattr(one, name)[2]) for one in self._source.profiles if one.past[2] >= past_length)

    def _too_small(self, name: str, wanted: int, past_length: int = 0) -> EngineError:
        what = {"rows": "rows", "nodes": "nodes in one pass", "past": "past columns"}[name]
        expected = f"at most {self._most(name, past_length)}, which it was built for"
        return self._source.other(f"{wanted} {what}", expected, f" --max-{name} {wanted}")


class TensorRTFunction:
    """A plan that is one call over rows, such as the image decoder; more rows than it was built for go in turns."""

    def __init__(
        self,
        library: Any,
        memory: CudaMemory,
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
        dtypes, rows = self._plan.dtypes, len(next(iter(feeds.values())))
        arrays = {name: np.ascontiguousarray(array, dtypes[name]) for name, array in feeds.items()}
        results = {
            tensor.name: np.empty([rows if size is None else size for size in tensor.shape], dtypes[tensor.name])
            for tensor in self._outputs
        }
        blocks = {name: Block(self._memory, array.nbytes) for name, array in (arrays | results).items()}
        for name, array in arrays.items():
            self._memory.upload(blocks[name].address, array)
        inputs, outputs = (
            {name: (array.shape, blocks[name].address) for name, array in part.items()} for part in (arrays, results)
        )
        self._plan.enqueue(0, inputs, outputs)
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


def pad_nodes(batch: Pass, nodes: int) -> Pass:
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
