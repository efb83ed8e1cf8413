"""The decode loop: draft trees, verify them in one target pass, accept a path of each, commit it; repeat.

Requests join and leave between passes. They share passes but nothing else: each has its own
positions, masks, cache lengths, sampling and random numbers, so its tokens are those it would get alone. With guidance
a request is two rows that come and go together. A request's cache columns are reserved for the whole image.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from ..methods import Drafted
from .acceptance import Acceptance, Relaxation, follow, walk, walk_greedy
from .device import DeviceLogits, SampleRequest
from .drafter import EagleDrafter
from .drafting import Commit, Draft, Drafter, codes_before, first_cell
from .engine import Cache, Floats, Ints, Pass, PassOutput
from .grid import PassLayout, Placed, RowBatch
from .head_drafter import HeadDrafter
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
    """One request's part of a step: the tokens it committed, and how."""

    request: int  # its index
    codes: Ints  # int64 `[count]`
    tree: DraftTree | None = None  # the draft, None for the prefill, `ar` and `rows`
    acceptance: Acceptance | None = None  # of the tree
    placed: Placed | None = None  # what a pass of `rows` drew, which is not just the next codes


class Scheduler:
    """Requests of one model; one that finds no room waits for others to leave.

    Args:
        model: engines and sizes.
        rows: of a pass at most.
        images: that share passes at most; may be changed between passes.
        listener: that hears of every pass what it committed, too.
    """

    def __init__(
        self, model: Model, rows: int = UNLIMITED, images: int = UNLIMITED, listener: Drafter | None = None
    ) -> None:
        self.model, self.rows, self.images, self.listener = model, rows, images, listener
        self.target_clock, self.drafter_clock = Clock(), Clock()
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        self._cache: Cache | None = None  # of the active requests' rows, in their order
        self._plain = Drafter(model.most_nodes)
        # windows, and trees with heads
        self._windows = HeadDrafter(model.heads) if model.heads else JacobiDrafter(model.most_nodes)
        self._row_drafter = RowDrafter(model.most_nodes)
        self._drafters: dict[str, Drafter] = {"ar": self._plain, "sjd": self._windows, "rows": self._row_drafter}
        self._eagles: dict[Request, EagleDrafter] = {}  # one for all requests of a method, greedy ones apart
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

        Raises:
            ValueError: it has more rows than a pass may have.
        """
        if len(request.rows) > self.rows:
            raise ValueError(f"a request of {len(request.rows)} rows, expected at most {self.rows}")
        request.tie_margin = tie_margin(self.model, request.sampling)
        self.waiting.append(request)

    def cancel(self, requests: Sequence[Request]) -> None:
        """Drop requests, waiting or not; those that have left already are none."""
        self.waiting = deque(request for request in self.waiting if request not in requests)
        if leaving := [request for request in self.active if request in requests]:
            self._leave(leaving)

    def step(self) -> list[RequestStep]:
        """One target pass: the prefill of requests for which there is room, or else a pass over all active ones.

        Returns:
            What every request that took part got of it.

        Raises:
            EngineError: the target gave NaN or infinity.
        """
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
        rows = self.rows - len(self._padding)
        joining: list[Request] = []
        for request in islice(self.waiting, max(0, places)):
            rows -= len(request.rows)
            if rows < 0:
                break
            joining.append(request)
        return joining

    def _prefill(self, requests: list[Request]) -> list[RequestStep]:
        target = self.model.target
        rows = [row for request in requests for row in request.rows]
        lengths = np.array([len(row.embeds) for row in rows])
        padding = stack_padding([~row.real for row in rows])  # [rows, longest]
        cache = target.new_cache(len(rows), max(request.columns for request in requests))
        batch = prefill_pass(target, cache, [row.embeds for row in rows], padding)
        output = self.target_clock.run(target, batch, cache)
        last = output.logits[np.arange(len(rows)), lengths - 1][:, None]  # [rows, 1, vocab_size]
        root = DraftTree(np.zeros(1, np.int64), np.array([-1], np.int64))
        steps: list[RequestStep] = []
        commits: list[Commit] = []
        for request, own in _rows_of(requests).items():
            answer = self._target_output(request, root, output._replace(logits=last), own)
            kept, _ = request.run()
            codes = kept[:1] if len(kept) else np.array([answer.choice(0)])
            steps.append(RequestStep(request.index, request.take(codes)))
            nodes = [np.arange(length) for length in lengths[own]]
            commits.append(Commit(request, codes, nodes, own, output.hidden, answer))
        self.target_clock.append(cache, output.new_kv, [np.arange(length) for length in lengths])
        self._join(requests, cache)
        self._commit(commits)
        return steps

    def _join(self, requests: list[Request], cache: Cache) -> None:
        if self.active and self._cache is not None:
            self._cache.extend(cache)
        else:
            self._cache = cache
        for request in requests:
            method = request.method
            if isinstance(method, Drafted) and not method.by_heads:
                kind = method, request.sampling.greedy
                same = (own for one, own in self._eagles.items() if (one.method, one.sampling.greedy) == kind)
                self._eagles[request] = next(same, None) or EagleDrafter(self.model, method, self.drafter_clock)
        self.active += requests
        self._arrange()

    def _advance(self) -> list[RequestStep]:
        drafts = self._draft()
        layouts = {request: self._layout(request, draft) for request, draft in drafts.items()}
        output = self._verify(drafts, layouts)
        answers = {
            request: self._target_output(request, drafts[request], output, self._rows[request], layouts[request].last)
            for request in self.active
        }
        self._choose(output, drafts, answers)
        steps: list[RequestStep] = []
        commits: list[Commit] = []
        for request, answer in answers.items():
            step, kept = self._accept(request, drafts[request], layouts[request], answer)
            tokens = step.codes
            if step.placed is None:
                step = step._replace(codes=request.take(tokens))
            else:
                request.codes += tokens.tolist()
            request.noise.forget(len(request.codes))
            nodes = [kept] * len(request.rows)
            commits.append(Commit(request, tokens, nodes, self._rows[request], output.hidden, answer, drafts[request]))
            steps.append(step)
        assert self._cache is not None
        self.target_clock.append(self._cache, output.new_kv, [nodes for one in commits for nodes in one.nodes])
        self._commit(commits)
        return steps

    def _draft(self) -> dict[Request, Draft]:
        requests: dict[Drafter, list[Request]] = {}
        for request in self.active:
            request.adapt_window(len(self.active))
            requests.setdefault(self._drafter(request), []).append(request)
        drafts: dict[Request, Draft] = {}
        for drafter, own in requests.items():
            drafts.update(zip(own, drafter.draft(own), strict=True))
        return drafts

    def _drafter(self, request: Request) -> Drafter:
        method = request.method
        usual = self._drafters.get(method.method, self._windows)
        if isinstance(method, Drafted) and not method.by_heads:
            usual = self._eagles[request]
        return self._plain if isinstance(usual, EagleDrafter | HeadDrafter) and len(request.run()[0]) else usual

    def _verify(self, drafts: Mapping[Request, Draft], layouts: Mapping[Request, PassLayout]) -> PassOutput:
        assert self._cache is not None
        target, lengths = self.model.target, self._cache.lengths
        nodes = max(MINIMUM_NODES, *(max(request.nodes, len(layout.tokens)) for request, layout in layouts.items()))
        past_length = target.next_past_length(self._cache, nodes)
        tokens, positions = np.zeros((2, len(lengths), nodes), np.int64)
        attention_mask = np.zeros((len(lengths), nodes, past_length + nodes), bool)
        unmask_committed(attention_mask, lengths, self._padding)
        attention_mask[:, :, past_length:] = identity_mask(nodes)
        for request, draft in drafts.items():
            layout, rows = layouts[request], self._rows[request]
            count = len(layout.tokens)
            place = request.raster.place(first_cell(request, draft))
            tokens[rows, :count] = layout.tokens
            attention_mask[rows, :count, past_length : past_length + count] = layout.ancestors
            for row, prefix in enumerate(request.prefixes, rows.start):
                positions[row, :count] = layout.depths + (prefix + place)
            if isinstance(draft, RowBatch):
                seen = draft.sees(draft.cached)  # [nodes, entries]
                for row, prefix in enumerate(request.prefixes, rows.start):
                    attention_mask[row, :count, prefix : prefix + len(draft.cached)] &= seen
        positions = np.minimum(positions, self.model.positions - 1)
        return self.target_clock.run(target, Pass(positions, attention_mask, tokens), self._cache)

    def _layout(self, request: Request, draft: Draft) -> PassLayout:
        if isinstance(draft, RowBatch):
            return PassLayout(draft.tokens, draft.structure.depths, draft.structure.ancestors)
        return request.raster.lay_out(draft, first_cell(request, draft))

    def _target_output(
        self, request: Request, draft: Draft, output: PassOutput, rows: slice, last: Ints | None = None
    ) -> TargetOutput:
        first = first_cell(request, draft) + 1
        structure = draft.structure
        margin = request.tie_margin if request.exact else 0.0
        recompute = None
        if margin and isinstance(draft, DraftTree):
            recompute = partial(self._recompute, request, draft, first)
        cells: Sequence[int] = range(first, first + draft.nodes)
        if not structure.chain:
            cells = (draft.next_codes if isinstance(draft, RowBatch) else first + structure.depths).tolist()
        return TargetOutput(
            lambda nodes: output.logits[rows, nodes],
            structure,
            request.noise,
            cells,
            request.sampling,
            margin,
            recompute,
            draft.before if isinstance(draft, RowBatch) else partial(codes_before, request, draft, first),
            last,
        )

    def _recompute(self, request: Request, tree: DraftTree, before: int, node: int) -> Floats:
        """Logits after a node of the request's tree below its first `before` tokens; see `likelihood.py`."""
        codes = np.append(codes_before(request, tree, before, node), 0)  # the last one is dropped
        tokens = request.raster.spell(codes)[:-1]
        calls = self.target_clock.calls
        logits = recompute_logits(self.model, request.rows, tokens, request.sampling, self.target_clock)
        request.statistics.tie_passes += self.target_clock.calls - calls
        return logits

    def _choose(
        self, output: PassOutput, drafts: Mapping[Request, Draft], answers: Mapping[Request, TargetOutput]
    ) -> None:
        """Make the choices of several requests at once where that costs less: on a device, or those of exact chains."""
        logits = output.logits
        if not isinstance(logits, np.ndarray) and isinstance(logits, DeviceLogits):
            self._choose_on_device(logits, drafts, answers)
        else:
            exact = ((answer, self._rows[request]) for request, answer in answers.items() if request.exact)
            choose_together(logits, exact)

    def _choose_on_device(
        self, logits: DeviceLogits, drafts: Mapping[Request, Draft], answers: Mapping[Request, TargetOutput]
    ) -> None:
        choosing: list[tuple[TargetOutput, Sequence[int]]] = []
        samples: list[SampleRequest] = []
        for request, answer in answers.items():
            draft, rows = drafts[request], self._rows[request]
            relaxed = not request.exact and isinstance(draft, DraftTree)
            if relaxed or answer.recompute or not logits.draws(request.sampling):
                continue
            nodes: Sequence[int] = draft.sampled if isinstance(draft, RowBatch) else range(draft.nodes)
            own = np.array(nodes, np.int64)
            places = np.tile(own if answer.last is None else answer.last[own], (rows.stop - rows.start, 1))
            noise = None if request.sampling.greedy else request.noise
            cells = np.array([answer.cells[node] for node in nodes])
            choosing.append((answer, nodes))
            samples.append(SampleRequest(rows, places, request.sampling, noise, cells))
        best = logits.best(samples, 1) if samples else []
        for (answer, nodes), (codes, _) in zip(choosing, best, strict=True):
            answer.know(nodes, codes[:, 0])

    def _accept(
        self, request: Request, draft: Draft, layout: PassLayout, answer: TargetOutput
    ) -> tuple[RequestStep, Ints]:
        """What a request gets of a pass, and the pass's nodes whose keys and values stay, int64 `[kept]`."""
        if isinstance(draft, RowBatch):
            codes, kept, placed = self._row_drafter.take(request, draft, answer.draw(draft.sampled))
            request.record_draft(draft.nodes - 1, len(placed.codes) - 1)
            return RequestStep(request.index, codes, placed=placed), kept
        accepted = self._walk(request, draft, answer)
        request.statistics.realised_tvd += accepted.realised_tvd
        request.record_draft(draft.nodes - 1 - draft.known, len(accepted.path) - 1 - draft.known)
        codes = draft.tokens[accepted.path[1:]]
        path = accepted.path[:-1]  # the last one is the next root
        if accepted.bonus is not None:
            path, codes = accepted.path, np.append(codes, accepted.bonus)
        step = RequestStep(request.index, codes)
        if request.method.method != "ar":
            step = step._replace(tree=draft, acceptance=accepted)
        return step, layout.kept(path)

    def _walk(self, request: Request, tree: DraftTree, answer: TargetOutput) -> Acceptance:
        relaxation = Relaxation.of(request.method, self.model.neighbors)
        missing = tree.known + request.room(tree.known)
        if relaxation is None:
            return follow(tree, answer.choice, missing)
        if request.sampling.greedy:
            return walk_greedy(tree, answer.distribution, relaxation, missing)
        return walk(tree, answer.distribution, answer.choice, relaxation, answer.decisions, missing)

    def _commit(self, commits: Sequence[Commit]) -> None:
        for eagle in {*self._eagles.values()}:
            eagle.commit([one for one in commits if self._eagles.get(one.request) is eagle])
        self._windows.commit(commits)
        if self.listener is not None:
            self.listener.commit(commits)
        if finished := [one.request for one in commits if not one.request.missing]:
            self._leave(finished)

    def _leave(self, requests: Sequence[Request]) -> None:
        before = self.active
        self.active = [request for request in before if request not in requests]
        if not self.active:
            self._cache = None
        elif self._cache is not None:
            rows = np.arange(len(self._padding))
            self._cache.keep_rows(np.concatenate([rows[self._rows[request]] for request in self.active]))
        for drafter in (self._windows, self._row_drafter, *dict.fromkeys(self._eagles.values())):
            drafter.leave(requests)
        for request in requests:
            self._eagles.pop(request, None)
        self._arrange()

    def _arrange(self) -> None:
        padding = stack_padding([~row.real for request in self.active for row in request.rows])  # [rows, longest]
        self._padding = padding if padding.any() else padding[:, :0]
        self._rows = _rows_of(self.active)


def _rows_of(requests: Iterable[Request]) -> dict[Request, slice]:
    rows: dict[Request, slice] = {}
    first = 0
    for request in requests:
        rows[request] = slice(first, first + len(request.rows))
        first += len(request.rows)
    return rows
