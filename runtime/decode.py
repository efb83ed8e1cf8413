"""The decode loop: draft a tree, verify it in one target pass, accept a path, commit it; repeat.

Drafts come from a drafter, from the target's own previous pass (a window, `jacobi`), or there are none (`ar`).

`decode` is a generator that yields after every step, so progress, streaming and cancelling cost nothing.
Requests share passes but nothing else: each has its own positions, masks, cache lengths and random
streams. With guidance every request is two rows, conditional rows first.

Does not know prompts, pictures, files or backends: it deals in prefix rows and codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from .acceptance import Acceptance, Relaxation, walk, walk_greedy
from .drafter import Children, Drafter
from .engine import Bools, Engine, Floats, Ints, Pass, PassOutput
from .jacobi import Jacobi, Window
from .passes import MINIMUM_NODES, append_nodes, committed_mask, prefill_pass, run_pass, stack_padding
from .sampling import Probabilities, Sampling, draw, guide, shape_distribution
from .statistics import Clock, RequestStatistics, Statistics, summarise
from .streams import Streams, open_streams
from .tree import DraftTree, DynamicTree, TreeShape


@dataclass(frozen=True)
class Method:
    """A decoding method.

    shape: of the drafter's trees. jacobi: a window instead of a drafter. `ar` has neither. children, stop: how a
    static tree is drafted, see `drafting.Drafter`. drafter_cfg_scale: guidance of the drafter of a guided target,
    where it is not the target's; at 1 the drafter runs no unconditional rows. Acceptance stays exact: q is what the
    children were drawn from.
    """

    name: str
    shape: TreeShape | None = None
    relaxation: Relaxation | None = None
    jacobi: Jacobi | None = None
    children: Children = "sampled"
    stop: float = 0.0
    drafter_cfg_scale: float | None = None

    @property
    def nodes(self) -> int:
        """Nodes of the largest draft, the root included."""
        drafts = self.shape or self.jacobi
        return drafts.nodes if drafts else 1


@dataclass(frozen=True)
class DrafterLayout:
    """How drafter slots are laid out; see the manifest's DrafterSpec."""

    position_shift: int = -1
    masks_prefix: bool = True
    prefix_token: int = 0
    code_offset: int = 0


@dataclass(frozen=True)
class Prompt:
    """Prefix of one request: its two rows, which may differ in length and in padding.

    cond, uncond: float32 `[length, width]`, each of a length of its own. real, uncond_real: bool `[length]`,
    False on padding; without `uncond_real` the rows are padded alike. A row's positions count its columns,
    padding included. tokens: int64 `[length]` of either row, what the drafter reads in the prefix; without
    them it reads the layout's `prefix_token` everywhere.
    """

    cond: Floats
    uncond: Floats
    real: NDArray[np.bool_]
    uncond_real: NDArray[np.bool_] | None = None
    tokens: tuple[Ints, Ints] | None = None

    def padding(self, side: str) -> Bools:
        """Which columns of row `cond` or `uncond` are padding, bool `[length]`."""
        real = self.real if side == "cond" or self.uncond_real is None else self.uncond_real
        return ~real

    def drafter_tokens(self, side: str, layout: DrafterLayout) -> Ints:
        """What the drafter's prefix slots of a row read, int64 `[length - 1]`: slot p reads token p + 1."""
        if self.tokens is None:
            return np.full(len(getattr(self, side)) - 1, layout.prefix_token, np.int64)
        return self.tokens[side == "uncond"][1:]


@dataclass(frozen=True)
class Model:
    """Engines and sizes: `codes` per image, `positions` in the rotary table."""

    target: Engine
    drafter: Engine | None
    codes: int
    positions: int
    layout: DrafterLayout = DrafterLayout()


@dataclass(frozen=True)
class RequestStep:
    """One request's part of a step: the codes it committed, and how.

    tree and acceptance are None for the prefill and for `ar`. codes may run past the image's end in the last
    step; `committed` counts those that belong to it.
    """

    request: int
    codes: Ints
    committed: int
    tree: DraftTree | None = None
    acceptance: Acceptance | None = None


@dataclass(frozen=True)
class Step:
    """One step of the batch; finished requests have no part in it. `statistics` comes with the last step."""

    parts: list[RequestStep]
    done: int
    total: int
    statistics: Statistics | None = None


@dataclass
class _Request:
    """What one unfinished or finished request has so far."""

    index: int
    streams: Streams
    window: Window | None = None
    codes: list[int] = field(default_factory=list)
    statistics: RequestStatistics = field(default_factory=RequestStatistics)


def decode(
    model: Model, prompts: Sequence[Prompt], rngs: Sequence[np.random.Generator], sampling: Sampling, method: Method
) -> Iterator[Step]:
    """Decode one image's codes for every prompt; yields a `Step` after the prefill and after every pass.

    `rngs` holds one generator per prompt; the same generator state gives the same codes whatever else is in
    the batch.
    """
    return _Decoding(model, prompts, rngs, sampling, method).steps()


class _Decoding:
    """State of one running decode."""

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Prompt],
        rngs: Sequence[np.random.Generator],
        sampling: Sampling,
        method: Method,
    ) -> None:
        assert len(prompts) == len(rngs) > 0
        self.model, self.sampling, self.method = model, sampling, method
        self.clock = Clock()
        self.requests = [_Request(i, open_streams(rng)) for i, rng in enumerate(rngs)]
        if method.jacobi is not None:
            for request in self.requests:
                request.window = Window(method.jacobi, sampling.greedy, request.streams.draft)
        self.active = list(self.requests)
        sides = ["cond", "uncond"] if sampling.guided else ["cond"]
        self.prefix: list[Floats] = [getattr(prompt, side) for side in sides for prompt in prompts]
        self.prefix_padding = stack_padding([prompt.padding(side) for side in sides for prompt in prompts])
        self.sides = len(sides)
        self.drafter: Drafter | None = None
        if method.shape is not None:
            assert model.drafter is not None
            assert method.jacobi is None
            drafts = sampling
            if method.drafter_cfg_scale is not None and sampling.guided:
                drafts = replace(sampling, cfg_scale=method.drafter_cfg_scale)
            self.drafter_sides = sides[: 2 if drafts.guided else 1]
            self.drafter = Drafter(
                model.drafter,
                method.shape,
                drafts,
                self.clock,
                model.layout.position_shift,
                model.positions - 1,
                model.layout.code_offset,
                children=method.children,
                stop=method.stop,
            )
            self.drafter_prefix = [
                prompt.drafter_tokens(side, model.layout) for side in self.drafter_sides for prompt in prompts
            ]

    def steps(self) -> Iterator[Step]:
        """The prefill, then steps until every request has its codes."""
        yield self._step(self._prefill())
        while self.active:
            yield self._step(self._advance())

    def _step(self, parts: list[RequestStep]) -> Step:
        done = sum(min(len(request.codes), self.model.codes) for request in self.requests)
        statistics = None
        if not self.active:
            records = [request.statistics for request in self.requests]
            statistics = summarise(self.method.name, self.model.codes, self.clock, records)
        return Step(parts, done, self.model.codes * len(self.requests), statistics)

    # ------------------------------------------------------------ prefill

    def _prefill(self) -> list[RequestStep]:
        rows, lengths = len(self.prefix), np.array([len(row) for row in self.prefix])
        prefix = int(lengths.max())
        capacity = prefix + self.model.codes + self._most_nodes()
        self.cache = self.model.target.new_cache(rows, capacity)
        output = self._run(prefill_pass(self.model.target, self.cache, self.prefix, self.prefix_padding))
        append_nodes(self.cache, output.new_kv, [np.arange(length) for length in lengths], self.clock.target)
        last = output.logits[np.arange(rows), lengths - 1]  # [rows, vocabulary]
        parts = []
        for slot, request in enumerate(self.active):
            code = self._choose(self._shape(last[slot :: len(self.active)]), request.streams.residual)
            request.codes.append(code)
            parts.append(RequestStep(request.index, np.array([code]), 1))
        if self.drafter is not None:
            hidden = self.prefix_padding if self.model.layout.masks_prefix else np.zeros_like(self.prefix_padding)
            read = self._drafter_rows()
            self.drafter.start(len(read), capacity, hidden[read, :-1], self.drafter_prefix)
            self.new_codes = [part.codes for part in parts]
            self.new_hidden = [output.hidden[row, : lengths[row]] for row in read]
        self._drop_finished()
        return parts

    def _most_nodes(self) -> int:
        shape = self.method.shape
        if isinstance(shape, DynamicTree):
            return max(shape.nodes, shape.depth * shape.branch) + 2
        return self.method.nodes + 2

    # ------------------------------------------------------------ one step

    def _advance(self) -> list[RequestStep]:
        trees = self._draft()
        output = self._verify(trees)
        drafted = self.method.nodes > 1
        parts, accepted_indices = [], []
        for slot, (request, tree) in enumerate(zip(self.active, trees, strict=True)):
            accepted = self._accept(request, tree, output, slot)
            codes = np.append(tree.tokens[accepted.path[1:]], accepted.bonus)
            committed = min(len(codes), self.model.codes - len(request.codes))
            request.codes.extend(codes.tolist())
            request.statistics.codes_per_step.append(len(codes))
            request.statistics.tried += accepted.tried
            request.statistics.realised_tvd += accepted.realised_tvd
            if request.window is not None and len(request.codes) < self.model.codes:
                request.window.advance(len(accepted.path) - 1, partial(self._distribution, output, slot))
            accepted_indices.append(np.array(accepted.path, np.int64))
            parts.append(
                RequestStep(request.index, codes, committed, tree if drafted else None, accepted if drafted else None)
            )
        append_nodes(self.cache, output.new_kv, accepted_indices * self.sides, self.clock.target)
        if self.drafter is not None:
            self.new_codes = [part.codes for part in parts]
            self.new_hidden = [
                output.hidden[row, accepted_indices[row % len(accepted_indices)]] for row in self._drafter_rows()
            ]
        self._drop_finished()
        return parts

    def _draft(self) -> list[DraftTree]:
        if self.drafter is not None:
            streams = [request.streams for request in self.active]
            return self.drafter.draft(self.new_codes, self.new_hidden, streams)
        trees = []
        for request in self.active:
            if request.window is None:
                trees.append(_root_only(request.codes[-1]))
            else:
                trees.append(request.window.draft(request.codes, self.model.codes - len(request.codes)))
        return trees

    def _verify(self, trees: list[DraftTree]) -> PassOutput:
        """One target pass over all trees, padded to the same number of nodes."""
        rows = len(trees) * self.sides
        largest = max(tree.nodes for tree in trees) if self.method.stop else self.method.nodes
        nodes = max(MINIMUM_NODES, largest)
        lengths = self.cache.lengths
        past_length = self.model.target.next_past_length(self.cache, nodes)
        tokens = np.zeros((rows, nodes), np.int64)
        depths = np.zeros((rows, nodes), np.int64)
        attention_mask = np.zeros((rows, nodes, past_length + nodes), bool)
        attention_mask[:, :, :past_length] = committed_mask(lengths, self.prefix_padding, past_length)[:, None]
        attention_mask[:, np.arange(nodes), past_length + np.arange(nodes)] = True
        for row in range(rows):
            tree = trees[row % len(trees)]
            tokens[row, : tree.nodes], depths[row, : tree.nodes] = tree.tokens, tree.depths
            attention_mask[row, : tree.nodes, past_length : past_length + tree.nodes] = tree.ancestors
        positions = np.minimum(lengths[:, None] + depths, self.model.positions - 1)
        return self._run(Pass(positions=positions, attention_mask=attention_mask, tokens=tokens))

    def _accept(self, request: _Request, tree: DraftTree, output: PassOutput, slot: int) -> Acceptance:
        target = partial(self._distribution, output, slot)
        if self.sampling.greedy:
            return walk_greedy(tree, target, self.method.relaxation)
        return walk(tree, target, self.method.relaxation, request.streams.accept, request.streams.residual)

    # ------------------------------------------------------------ pieces

    def _drafter_rows(self) -> range:
        """The target's rows that the drafter has too: all, or the conditional ones."""
        return range(len(self.active) * len(self.drafter_sides))

    def _run(self, batch: Pass) -> PassOutput:
        return run_pass(self.model.target, batch, self.cache, self.clock.target)

    def _distribution(self, output: PassOutput, slot: int, node: int) -> Probabilities:
        return self._shape(output.logits[slot :: len(self.active), node])

    def _shape(self, logits: Floats) -> Probabilities:
        """The distribution behind the logits of a request's rows `[sides, vocabulary]`."""
        return shape_distribution(guide(logits, self.sampling.cfg_scale), self.sampling)

    def _choose(self, distribution: Probabilities, rng: np.random.Generator) -> int:
        return int(distribution.argmax()) if self.sampling.greedy else draw(distribution, rng)

    def _drop_finished(self) -> None:
        """Go on with the rows of unfinished requests only."""
        kept = [slot for slot, request in enumerate(self.active) if len(request.codes) < self.model.codes]
        if len(kept) == len(self.active):
            return
        rows = np.array([side * len(self.active) + slot for side in range(self.sides) for slot in kept], np.int64)
        drafter_rows = rows[: len(kept) * len(self.drafter_sides)] if self.drafter is not None else rows
        self.active = [self.active[slot] for slot in kept]
        if not kept:
            return
        self.cache.keep_rows(rows)
        self.prefix_padding = self.prefix_padding[rows]
        if self.drafter is not None:
            self.drafter.keep_rows(drafter_rows)
            self.new_codes = [self.new_codes[slot] for slot in kept]
            self.new_hidden = [self.new_hidden[row] for row in drafter_rows]


def _root_only(code: int) -> DraftTree:
    return DraftTree(np.array([code], np.int64), np.array([-1], np.int64))
