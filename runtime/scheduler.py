"""The decode loop: draft trees, verify them in one target pass, accept a path of each, commit it; repeat.

Requests join, leave and change their method between passes. They share passes but nothing else: each has its own
positions, masks, cache lengths, sampling and random numbers, so its tokens are those it would get alone. With guidance
a request is two rows that come and go together. A request's cache columns are reserved for the whole image.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from functools import partial
from itertools import compress, islice
from typing import NamedTuple

import numpy as np

from ..methods import Drafted
from .acceptance import Acceptance, Relaxation, follow, walk, walk_greedy
from .device import DeviceLogits, Resident, SampleRequest
from .drafter import EagleDrafter
from .drafting import Commit, Drafter
from .engine import Cache, Floats, HiddenView, Ints, Pass, PassOutput
from .grid import PassLayout, Placed, RowBatch
from .jacobi import JacobiDrafter
from .likelihood import recompute_logits, tie_margin
from .passes import MINIMUM_NODES, identity_mask, prefill_pass, stack_padding, unmask_committed
from .rows import RowDrafter
from .state import Model, Request
from .statistics import Clock
from .target import TargetOutput, choose_together
from .tree import DraftTree

UNLIMITED = 1 << 30
IDLE = 0.25  # of the tokens of all places


class RequestStep(NamedTuple):
    """One request's part of a step: the tokens it committed, and how.

    request: its index. codes may run past the image's end in the last step; `committed` counts those that belong to it.
    tree and acceptance are None for the prefill, `ar` and `rows`. placed: cells and codes of a pass that did not draw
    just the next ones; nodes: those that it took for them.
    """

    request: int
    codes: Ints
    committed: int
    tree: DraftTree | None = None
    acceptance: Acceptance | None = None
    placed: Placed | None = None
    nodes: int = 0


class Scheduler:
    """Requests of one model; one that finds no room waits for others to leave.

    rows: most of a pass. images: most that share passes; to be changed between passes, if need be.
    """

    def __init__(self, model: Model, rows: int = UNLIMITED, images: int = UNLIMITED) -> None:
        self.model, self.rows, self.images = model, rows, images
        self.target_clock, self.drafter_clock = Clock(), Clock()
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        self._cache: Cache | None = None  # of the active requests' rows, in their order
        self._windows, self._plain = JacobiDrafter(), Drafter()
        self._row_drafter = RowDrafter(model.most_nodes)
        self._sources: dict[str, Drafter] = {"ar": self._plain, "sjd": self._windows, "rows": self._row_drafter}
        self._trees: dict[Request, EagleDrafter] = {}  # one for all requests that may be drawn by the same methods
        self._quiet = copy_context()  # NumPy need not warn of logits that are then refused
        self._quiet.run(np.seterr, over="ignore", invalid="ignore")
        self._arrange()

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.active or self.waiting)

    @property
    def joining(self) -> bool:
        """Whether the next step is a prefill: somebody waits for whom there is room."""
        return bool(self._next(1))

    def submit(self, request: Request) -> None:
        """Have a request drawn as soon as there is room, after those that came before.

        Raises: ValueError: it has more rows than a pass may have.
        """
        if len(request.rows) > self.rows:
            raise ValueError(f"a request of {len(request.rows)} rows, expected at most {self.rows}")
        request.tie_margin = tie_margin(self.model, request.sampling)
        self.waiting.append(request)

    def cancel(self, requests: Sequence[Request]) -> None:
        """Drop requests, waiting or not; those that have left already are none."""
        self.waiting = deque(request for request in self.waiting if request not in requests)
        if going := [request for request in self.active if request in requests]:
            self._leave(going)

    def step(self) -> list[RequestStep]:
        """One target pass: the prefill of requests for which there is room, or else a pass over all active ones."""
        return self._quiet.run(self._step)

    def _step(self) -> list[RequestStep]:
        if joining := self._next(UNLIMITED):
            for _ in joining:
                self.waiting.popleft()
            return self._prefill(joining)
        return self._advance() if self.active else []

    def _next(self, most: int) -> list[Request]:
        """The first of those who wait, as far as there is room for them.

        If they fill all places, they wait to begin together, unless too much stands idle until the last of those before
        them is done: a pass reads as many columns of every row as the longest has, so rows of one length cost less.
        """
        if not self.waiting:
            return []
        if self.active and len(self.waiting) >= self.images:
            idle = (self.images - len(self.active)) * max(request.missing for request in self.active)
            if idle <= IDLE * self.images * max(request.raster.codes for request in self.active):
                return []
        places = min(most, self.images - len(self.active))
        rows, joining = self.rows - len(self._padding), list[Request]()
        for request in islice(self.waiting, max(0, places)):
            rows -= len(request.rows)
            if rows < 0:
                break
            joining.append(request)
        return joining

    def _prefill(self, requests: list[Request]) -> list[RequestStep]:
        target, rows = self.model.target, [row for request in requests for row in request.rows]
        lengths, padding = np.array([len(row.embeds) for row in rows]), stack_padding([~row.real for row in rows])
        cache = target.new_cache(len(rows), max(request.columns for request in requests))
        batch = prefill_pass(target, cache, [row.embeds for row in rows], padding)
        output = self.target_clock.run(target, batch, cache)
        last = output.logits[np.arange(len(rows)), lengths - 1][:, None]  # [rows, 1, vocab_size]
        nothing = DraftTree(np.zeros(1, np.int64), np.array([-1], np.int64))
        parts, committed, first = [], [], 0
        for request in requests:
            own, first = slice(first, first + len(request.rows)), first + len(request.rows)
            answers = self._answers(request, nothing, output._replace(logits=last), own)
            codes, nodes = np.array([answers.choice(0)]), [np.arange(length) for length in lengths[own]]
            request.codes += codes.tolist()
            parts.append(RequestStep(request.index, codes, 1))
            hidden = partial(_hidden, output, own, nodes)
            committed.append(Commit(request, self._plain, codes, nodes, hidden, answers))
        self.target_clock.append(cache, output.new_kv, [np.arange(length) for length in lengths])
        if self.active and self._cache is not None:
            self._cache.extend(cache)
        else:
            self._cache = cache
        for request in requests:
            if methods := [method for method in request.methods if isinstance(method, Drafted)]:
                same = (self._trees[other] for other in self._trees if other.methods == request.methods)
                self._trees[request] = next(same, None) or EagleDrafter(self.model, methods, self.drafter_clock)
        self.active += requests
        self._arrange()
        self._tell(committed)
        return parts

    def _advance(self) -> list[RequestStep]:
        drafted = [self._source(request) for request in self.active]
        trees: dict[Request, DraftTree | RowBatch] = {}
        for source in {*drafted}:
            own = [one for one, drawn_by in zip(self.active, drafted, strict=True) if drawn_by is source]
            trees.update(zip(own, source.draft(own), strict=True))
        layouts = {request: self._layout(request, tree) for request, tree in trees.items()}
        output = self._verify(trees, layouts)
        everybody = [self._answers(one, trees[one], output, self._rows[one], layouts[one].last) for one in self.active]
        if not isinstance(output.logits, np.ndarray) and isinstance(output.logits, DeviceLogits):
            self._ask_device(output.logits, trees, everybody)
        elif len(everybody) > 1:
            exact = [request.exact for request in self.active]
            choose_together(output.logits, compress(zip(everybody, self._rows.values(), strict=True), exact))
        parts, committed = [], []
        for request, source, answers in zip(self.active, drafted, everybody, strict=True):
            tree, rows = trees[request], self._rows[request]
            if isinstance(tree, RowBatch):
                codes, kept, placed = self._row_drafter.take(request, tree, answers.draw(tree.drawn))
                count = min(len(codes), request.missing)
                part = RequestStep(request.index, codes, count, placed=placed, nodes=tree.nodes)
                request.statistics.codes_per_step.append(len(placed.codes))
            else:
                accepted = self._accept(request, tree, answers)
                kept = layouts[request].kept(accepted.path)
                codes = np.array([*(int(tree.tokens[node]) for node in accepted.path[1:]), accepted.bonus])
                part = RequestStep(request.index, codes, min(len(codes), request.missing))
                if source is not self._plain:
                    part = part._replace(tree=tree, acceptance=accepted)
                request.statistics.codes_per_step.append(len(codes))
                request.statistics.realised_tvd += accepted.realised_tvd
            request.codes += codes.tolist()
            request.noise.forget(len(request.codes))
            nodes = [kept] * len(request.rows)
            hidden = partial(_hidden, output, rows, nodes)
            committed.append(Commit(request, source, codes, nodes, hidden, answers))
            parts.append(part)
        assert self._cache is not None
        self.target_clock.append(self._cache, output.new_kv, [nodes for one in committed for nodes in one.nodes])
        self._tell(committed)
        return parts

    def _verify(
        self, trees: Mapping[Request, DraftTree | RowBatch], layouts: Mapping[Request, PassLayout]
    ) -> PassOutput:
        """One target pass over all trees and fronts as they are laid out, padded to the same number of nodes."""
        assert self._cache is not None
        target, lengths = self.model.target, self._cache.lengths
        nodes = max(MINIMUM_NODES, *(max(request.nodes, len(layout.tokens)) for request, layout in layouts.items()))
        past_length = target.next_past_length(self._cache, nodes)
        tokens, positions = np.zeros((2, len(lengths), nodes), np.int64)
        attention_mask = np.zeros((len(lengths), nodes, past_length + nodes), bool)
        unmask_committed(attention_mask, lengths, self._padding)
        attention_mask[:, :, past_length:] = identity_mask(nodes)
        for request, tree in trees.items():
            layout, rows = layouts[request], self._rows[request]
            count, place = len(layout.tokens), request.raster.place(self._first_cell(request, tree))
            tokens[rows, :count] = layout.tokens
            attention_mask[rows, :count, past_length : past_length + count] = layout.ancestors
            for row, prefix in enumerate(request.prefixes, rows.start):
                positions[row, :count] = layout.depths + (prefix + place)
            if isinstance(tree, RowBatch):
                seen = tree.sees(tree.order)  # [nodes, entries]
                for row, prefix in enumerate(request.prefixes, rows.start):
                    attention_mask[row, :count, prefix : prefix + len(tree.order)] &= seen
        positions = np.minimum(positions, self.model.positions - 1)
        return self.target_clock.run(target, Pass(positions, attention_mask, tokens), self._cache)

    def _first_cell(self, request: Request, tree: DraftTree | RowBatch) -> int:
        """The cell that depth 0 stands in."""
        return 0 if isinstance(tree, RowBatch) else len(request.codes) - 1

    def _layout(self, request: Request, tree: DraftTree | RowBatch) -> PassLayout:
        """The nodes of a tree or front in a pass."""
        if isinstance(tree, RowBatch):
            return PassLayout(tree.tokens, tree.structure.depths, tree.structure.ancestors)
        return request.raster.lay_out(tree, self._first_cell(request, tree))

    def _answers(
        self, request: Request, tree: DraftTree | RowBatch, output: PassOutput, rows: slice, last: Ints | None = None
    ) -> TargetOutput:
        """What a pass says of a request's tree. last: as `PassLayout` has it."""
        first, sampling, structure = self._first_cell(request, tree) + 1, request.sampling, tree.structure
        margin = request.tie_margin if request.exact else 0.0
        recompute = partial(self._recompute, request, tree, first) if margin and isinstance(tree, DraftTree) else None
        cells: Sequence[int] = range(first, first + tree.nodes)
        if not structure.chain:
            cells = (tree.following if isinstance(tree, RowBatch) else first + structure.depths).tolist()
        return TargetOutput(
            partial(_logits, output, rows), structure, request.noise, cells, sampling, margin, recompute, last
        )

    def _ask_device(
        self, logits: DeviceLogits, trees: Mapping[Request, DraftTree | RowBatch], everybody: Sequence[TargetOutput]
    ) -> None:
        """Have all choices made where the logits are, as far as that is possible there."""
        asking, asked = list[tuple[TargetOutput, Sequence[int]]](), list[SampleRequest]()
        for request, answers in zip(self.active, everybody, strict=True):
            tree, rows = trees[request], self._rows[request]
            choosing = request.exact or isinstance(tree, RowBatch)
            if not choosing or answers.recompute or not logits.draws(request.sampling):
                continue
            nodes: Sequence[int] = tree.drawn if isinstance(tree, RowBatch) else range(tree.nodes)
            own = np.array(nodes, np.int64)
            places = np.tile(own if answers.last is None else answers.last[own], (rows.stop - rows.start, 1))
            noise = None if request.sampling.greedy else request.noise
            asking.append((answers, nodes))
            asked.append(
                SampleRequest(rows, places, request.sampling, noise, np.array([answers.cells[i] for i in nodes]))
            )
        for (answers, nodes), (codes, _) in zip(asking, logits.best(asked, 1) if asked else (), strict=True):
            answers.know(nodes, codes[:, 0])

    def _recompute(self, request: Request, tree: DraftTree, before: int, node: int) -> Floats:
        """Logits after a node of the request's tree below its first `before` tokens, for a tie; see `ties.py`."""
        codes = [*request.codes[:before], *tree.tokens[tree.path_to(node)[1:]].tolist(), 0]  # the last one is dropped
        tokens = request.raster.spell(codes)[:-1]
        calls = self.target_clock.calls
        logits = recompute_logits(self.model, request.rows, tokens, request.sampling, self.target_clock)
        request.statistics.tie_passes += self.target_clock.calls - calls
        return logits

    def _accept(self, request: Request, tree: DraftTree, target: TargetOutput) -> Acceptance:
        relaxation = None if request.exact else Relaxation.of(request.method, self.model.neighbors)
        if relaxation is None:
            return follow(tree, target.choice)
        if request.sampling.greedy:
            return walk_greedy(tree, target.distribution, relaxation)
        return walk(tree, target.distribution, target.choice, relaxation, target.decisions)

    def _source(self, request: Request) -> Drafter:
        """Where drafts of the method in use come from."""
        return self._sources.get(request.method.method) or self._trees[request]

    def _tell(self, committed: Sequence[Commit]) -> None:
        """Tell all sources of drafts what a pass committed, then drop finished requests."""
        for trees in {*self._trees.values()}:
            trees.commit([one for one in committed if self._trees.get(one.request) is trees])
        self._windows.commit(committed)
        if finished := [one.request for one in committed if not one.request.missing]:
            self._leave(finished)

    def _leave(self, requests: Sequence[Request]) -> None:
        before = self.active
        self.active = [request for request in before if request not in requests]
        if not self.active:
            self._cache = None
        elif self._cache is not None:
            rows = np.arange(len(self._padding))
            self._cache.keep_rows(np.concatenate([rows[self._rows[request]] for request in self.active]))
        for source in (self._windows, self._row_drafter, *dict.fromkeys(self._trees.values())):
            source.leave(requests)
        for request in requests:
            self._trees.pop(request, None)
        self._arrange()

    def _arrange(self) -> None:
        """Count the rows of the active requests."""
        self._rows: dict[Request, slice] = {}
        padding = stack_padding([~row.real for request in self.active for row in request.rows])  # [rows, longest]
        self._padding = padding if padding.any() else padding[:, :0]
        first = 0
        for request in self.active:
            self._rows[request] = slice(first, first + len(request.rows))
            first += len(request.rows)


def _logits(output: PassOutput, rows: slice, nodes: slice | Sequence[int]) -> Floats:
    logits: Floats = output.logits[rows, nodes]  # [sides, nodes, vocab_size]
    return logits


def _hidden(output: PassOutput, rows: slice, nodes: list[Ints]) -> list[Floats | HiddenView]:
    stays, places = isinstance(output.hidden, Resident), zip(range(rows.start, rows.stop), nodes, strict=True)
    taken = (HiddenView(output.hidden, np.full(len(own), row), own) for row, own in places)
    return [states if stays else states.read() for states in taken]
