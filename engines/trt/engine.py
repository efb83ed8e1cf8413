"""TensorRT plans as engines of the decode loop; keys, values, logits and hidden states stay on the device.

Translates passes into the shapes a plan was built for: the smallest profile that fits, and a number of nodes rounded
up to a few fixed ones, so that shapes repeat. The nodes added see only themselves and nobody sees them. Per pass,
embeddings, positions and masks go to the device; back come only the rows that the decode loop looks at.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...bundle.manifest import DecoderSpec, DrafterSpec
from ...runtime.engine import Cache, Floats, Pass, PassOutput
from ..contracts import Array, Tensor
from ..decoder_tensors import decoder_tensors, kv_dtype, node_inputs, past_length_of
from ..kv_cache import round_up
from ..profiles import Profile
from .cuda import Scratch
from .device_cache import BlockCache, DeviceRows, NewKV
from .plan import Plan


class TensorRTEngine:
    """A decoder plan. With a table of code embeddings it is a target; without, a drafter.

    One engine may serve several threads, each with caches of its own. The outputs of a pass are good until the next
    pass on the same cache; reading them later is a ValueError.
    """

    def __init__(self, plan: Plan, spec: DecoderSpec | DrafterSpec, code_embeddings: Floats | None = None) -> None:
        self.spec, self._plan = spec, plan
        inputs, outputs = decoder_tensors(spec, drafts=code_embeddings is None)
        plan.check_tensors(inputs, outputs)
        self._past = [tensor.name for tensor in inputs if tensor.name.startswith("past_key_values.")]
        self._new = [tensor.name for tensor in outputs if tensor.name.startswith("new_key_values.")]
        self._entry = spec.num_kv_heads * spec.head_dim * np.dtype(kv_dtype(plan.path, plan.dtypes)).itemsize
        self._table = code_embeddings

    def new_cache(self, rows: int, capacity: int) -> BlockCache:
        """An empty cache on the device. Raises: EngineError if the plan was built for fewer rows or columns."""
        self._check("rows", rows)
        largest = max(profile.nodes[2] for profile in self._plan.profiles)
        self._check("past", round_up(capacity - largest - 2))  # what comes after the largest pass is never read
        return BlockCache(self._plan.memory, rows, capacity, len(self._past), self._entry)

    def next_past_length(self, cache: Cache, nodes: int) -> int:
        """The longest row, rounded up. Raises: EngineError if the plan has no profile for such a pass."""
        own = BlockCache.own(cache)
        self._fit(len(own.lengths), nodes, own.past_length())
        return own.past_length()

    def run(self, batch: Pass, cache: Cache) -> PassOutput:
        """Run one pass. Counts itself in `cache.passes` and `cache.seconds`."""
        own, spec, dtypes = BlockCache.own(cache), self.spec, self._plan.dtypes
        past_length, (rows, nodes) = past_length_of(batch, own), batch.positions.shape
        profile, padded = self._fit(rows, nodes, past_length)
        arrays = node_inputs(pad_nodes(batch, padded), self._table, dtypes)
        start = time.perf_counter()
        entry, widths = (spec.num_kv_heads, spec.head_dim), (spec.vocab_size, spec.hidden_size)
        rows_out = dict(zip(("logits", "hidden_states"), widths, strict=True))
        addresses = self._plan.run(
            profile,
            arrays,
            {name: ((past_length, rows, *entry), at) for name, at in zip(self._past, own.addresses(), strict=True)},
            {name: (rows, padded, width) for name, width in rows_out.items()}
            | dict.fromkeys(self._new, (padded, rows, *entry)),
            own.scratch,
        )
        self._plan.memory.synchronise()
        own.seconds += time.perf_counter() - start
        own.passes += 1
        logits, hidden = (
            DeviceRows(own, addresses[name], dtypes[name], (rows, nodes, width), padded)
            for name, width in rows_out.items()
        )
        first, second = (addresses[name] for name in self._new[:2])
        return PassOutput(logits, hidden, NewKV(first, second - first, own.passes))

    def _fit(self, rows: int, nodes: int, past_length: int) -> tuple[int, int]:
        """The profile for a pass, by number, and the nodes to run. Raises: EngineError if there is none."""
        if found := fit(self._plan.profiles, rows, nodes, past_length):
            return found
        for name, wanted in (("rows", rows), ("nodes", nodes), ("past", past_length)):
            self._check(name, wanted)
        self._check("nodes", nodes, past_length)  # some profiles take many nodes with a short past only
        raise self._plan.other(f"{rows} rows of {nodes} nodes", "a pass that one of its profiles takes")

    def _check(self, name: str, wanted: int, past_length: int = 0) -> None:
        """Raises: EngineError unless a profile that takes such a past takes so many."""
        most = max(getattr(profile, name)[2] for profile in self._plan.profiles if profile.past[2] >= past_length)
        if wanted > most:
            what = {"rows": "rows", "nodes": "nodes in one pass", "past": "past columns"}[name]
            expected = f"at most {most}, which it was built for"
            raise self._plan.other(f"{wanted} {what}", expected, f" --max-{name} {wanted}")


class TensorRTFunction:
    """A plan that is one call over rows, such as the image decoder; more rows than it was built for go in turns."""

    def __init__(self, plan: Plan, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        plan.check_tensors(inputs, outputs)
        self._plan, self._outputs = plan, outputs

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs, in the order in which they were declared."""
        memory, dtypes, most = self._plan.memory, self._plan.dtypes, self._plan.profiles[0].rows[2]
        rows, scratch = len(next(iter(feeds.values()))), Scratch(memory)
        results = {
            tensor.name: np.empty([rows if size is None else size for size in tensor.shape], dtypes[tensor.name])
            for tensor in self._outputs
        }
        for start in range(0, rows, most):
            part = slice(start, start + most)
            arrays = {name: np.ascontiguousarray(array[part], dtypes[name]) for name, array in feeds.items()}
            shapes = {name: array[part].shape for name, array in results.items()}
            addresses = self._plan.run(0, arrays, {}, shapes, scratch)
            for name, array in results.items():
                memory.download(array[part], addresses[name])
            memory.synchronise()
        return list(results.values())


def fit(profiles: Sequence[Profile], rows: int, nodes: int, past_length: int) -> tuple[int, int] | None:
    """The profile with the fewest nodes, then the shortest past, that takes a pass, by number; the nodes to run.

    Nodes are rounded up to the next power of two, within the profile's bounds.
    """
    fitting = [
        (profile.nodes[2], profile.past[2], number)
        for number, profile in enumerate(profiles)
        if profile.rows[0] <= rows <= profile.rows[2]
        and nodes <= profile.nodes[2]
        and profile.past[0] <= past_length <= profile.past[2]
    ]
    if not fitting:
        return None
    high, _, number = min(fitting)
    return number, min(max(1 << (nodes - 1).bit_length(), profiles[number].nodes[0]), high)


def pad_nodes(batch: Pass, nodes: int) -> Pass:
    """A pass with nodes added at the end that read zeros, see themselves only, and are seen by nobody."""
    before, columns = batch.attention_mask.shape[1:]
    if (more := nodes - before) == 0:
        return batch
    attention_mask = np.pad(batch.attention_mask, [(0, 0), (0, more), (0, more)])
    attention_mask[:, np.arange(before, nodes), np.arange(columns, columns + more)] = True
    padded = {
        name: np.pad(array, [(0, 0), (0, more)] + [(0, 0)] * (array.ndim - 2))
        for name, array in vars(batch).items()
        if name != "attention_mask" and array is not None
    }
    return replace(batch, attention_mask=attention_mask, **padded)
