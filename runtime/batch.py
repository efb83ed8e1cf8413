"""The forward passes of a batch: draft, verify in one target pass, accept, commit; repeat.

Requests join and leave between passes. They share passes but nothing else: each has its own positions, masks, cache
lengths, sampling and random numbers, so its tokens are those it would get alone. With guidance a request is two rows
that come and go together. A request's cache columns are reserved for the whole image.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from ..methods import Drafted
from .device import DeviceLogits, SampleRequest
from .drafter import EagleDrafter
from .drafting import Commit, Draft, Drafter, RequestStep
from .engine import Cache, Floats, Ints, Pass, PassOutput
from .head_drafter import HeadDrafter
from .jacobi import JacobiDrafter
from .likelihood import recompute_logits, tie_margin
from .passes import MINIMUM_NODES, identity_mask, prefill_pass, stack_padding, unmask_committed
from .raster import PassLayout
from .rows import RowDrafter
from .state import Model, Request
from .statistics import Clock
from .target import TargetOutput, choose_together
from .tree_drafts import TreeDraft, TreeDrafter, chain


class Batch:
    """Requests of one model that share forward passes. Who joins, and when, is decided by its caller.

    Args:
        model: engines and sizes.
        listener: hears of every pass what it committed, too.
        clocks: of the target and the drafter; None: new ones.

    Attributes:
        active: requests that take part in passes, in the order of their rows.
    """

    def __init__(
        self, model: Model, listener: Drafter | None = None, clocks: tuple[Clock, Clock] | None = None
    ) -> None:
        self.model = model
        self.listener = listener
        self.target_clock, self.drafter_clock = clocks or (Clock(), Clock())
        self.active: list[Request] = []
        self._cache: Cache | None = None  # of the active requests' rows, in their order
        self._plain = TreeDrafter(model.max_nodes)
        # windows, and trees with heads
        self._windows = HeadDrafter(model.heads) if model.heads else JacobiDrafter(model.max_nodes)
        self._row_drafter = RowDrafter(model.max_nodes)
        self._drafters: dict[str, Drafter] = {"ar": self._plain, "sjd": self._windows, "rows": self._row_drafter}
        self._eagles: dict[Request, EagleDrafter] = {}  # one for all requests of a method, greedy ones apart
        self._arrange()

    @property
    def rows(self) -> int:
        """Rows of a pass over the active requests."""
        return len(self._padding)

    def join(self, requests: Sequence[Request]) -> list[RequestStep]:
        """Have requests take part from now on: a target pass over their prefixes, which samples their first codes.

        Returns:
            What each of them got of it.

        Raises:
            EngineError: the target gave NaN or infinity; none of them takes part then.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # of logits that are refused
            return self._prefill(requests)

    def leave(self, requests: Sequence[Request]) -> None:
        """Have requests take part no more; those that have left already are ignored."""
        if leaving := [request for request in self.active if request in requests]:
            self._leave(leaving)

    def step(self) -> list[RequestStep]:
        """Run one target pass over the drafts of all active requests, each of which commits what is accepted.

        Returns:
            What every request got of it.

        Raises:
            EngineError: the target gave NaN or infinity.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # of logits that are refused
            return self._advance() if self.active else []

    def _prefill(self, requests: Sequence[Request]) -> list[RequestStep]:
        target = self.model.target
        rows = [row for request in requests for row in request.rows]
        lengths = np.array([len(row.embeds) for row in rows])
        padding = stack_padding([~row.real for row in rows])  # [rows, longest]
        cache = target.new_cache(len(rows), max(request.columns for request in requests))
        batch = prefill_pass(target, cache, [row.embeds for row in rows], padding)
        output = self.target_clock.run(target, batch, cache)
        last = output.logits[np.arange(len(rows)), lengths - 1][:, None]  # [rows, 1, vocab_size]
        steps: list[RequestStep] = []
        commits: list[Commit] = []
        for request, own in _rows_of(requests).items():
            request.tie_margin = tie_margin(self.model, request.sampling)
            draft = TreeDraft(request, chain([0]))  # the root stands for the last token of the prefix
            answer = self._target_output(request, draft, output._replace(logits=last), own)
            kept, _ = request.run()
            codes = kept[:1] if len(kept) else np.array([answer.choice(0)])
            steps.append(RequestStep(request.index, request.take(codes)))
            nodes = [np.arange(length) for length in lengths[own]]
            commits.append(Commit(request, codes, nodes, own, output.hidden, answer))
        self.target_clock.append(cache, output.new_kv, [np.arange(length) for length in lengths])
        self._join(requests, cache)
        self._commit(commits)
        return steps

    def _join(self, requests: Sequence[Request], cache: Cache) -> None:
        if self.active and self._cache is not None:
            self._cache.extend(cache)
        else:
            self._cache = cache
        for request in requests:
            method = request.method
            if isinstance(method, Drafted) and not method.uses_draft_heads:
                kind = method, request.sampling.greedy
                same = (own for one, own in self._eagles.items() if (one.method, one.sampling.greedy) == kind)
                self._eagles[request] = next(same, None) or EagleDrafter(self.model, method, self.drafter_clock)
        self.active += requests
        self._arrange()

    def _advance(self) -> list[RequestStep]:
        drafts = self._draft()
        layouts = {request: draft.layout() for request, draft in drafts.items()}
        output = self._verify(layouts)
        answers = {
            request: self._target_output(request, drafts[request], output, self._rows[request], layouts[request].last)
            for request in self.active
        }
        self._choose(output, drafts, answers)
        steps: list[RequestStep] = []
        commits: list[Commit] = []
        for request, answer in answers.items():
            draft, rows = drafts[request], self._rows[request]
            step, tokens, kept = draft.accept(answer, layouts[request], self.model)
            request.noise.forget(len(request.codes))
            nodes = [kept] * len(request.rows)
            commits.append(Commit(request, tokens, nodes, rows, output.hidden, answer, draft))
            steps.append(step)
        assert self._cache is not None
        self.target_clock.append(self._cache, output.new_kv, [nodes for one in commits for nodes in one.nodes])
        self._commit(commits)
        return steps

    def _draft(self) -> dict[Request, Draft]:
        """The drafts of all active requests: every drafter makes those of its requests at once."""
        requests: dict[Drafter, list[Request]] = {}
        for request in self.active:
            request.adapt_window(len(self.active))
            requests.setdefault(self._drafter(request), []).append(request)
        drafts: dict[Request, Draft] = {}
        for drafter, own in requests.items():
            drafts.update(zip(own, drafter.draft(own), strict=True))
        return drafts

    def _drafter(self, request: Request) -> Drafter:
        """Where drafts of the method in use come from; some drafters have none behind codes that are kept."""
        method = request.method
        usual = self._drafters.get(method.method, self._windows)
        if isinstance(method, Drafted) and not method.uses_draft_heads:
            usual = self._eagles[request]
        return self._plain if usual.needs_new_codes and len(request.run()[0]) else usual

    def _verify(self, layouts: Mapping[Request, PassLayout]) -> PassOutput:
        """Run one target pass over all drafts as they are laid out, padded to the same number of nodes."""
        assert self._cache is not None
        target, lengths = self.model.target, self._cache.lengths
        nodes = max(MINIMUM_NODES, *(max(request.nodes, len(layout.tokens)) for request, layout in layouts.items()))
        past_length = target.next_past_length(self._cache, nodes)
        tokens, positions = np.zeros((2, len(lengths), nodes), np.int64)
        attention_mask = np.zeros((len(lengths), nodes, past_length + nodes), bool)
        unmask_committed(attention_mask, lengths, self._padding)
        attention_mask[:, :, past_length:] = identity_mask(nodes)
        for request, layout in layouts.items():
            rows, count = self._rows[request], len(layout.tokens)
            tokens[rows, :count] = layout.tokens
            attention_mask[rows, :count, past_length : past_length + count] = layout.ancestors
            for row, prefix in enumerate(request.prefixes, rows.start):
                positions[row, :count] = layout.positions + prefix
                if layout.past is not None:
                    attention_mask[row, :count, prefix : prefix + layout.past.shape[1]] &= layout.past
        positions = np.minimum(positions, self.model.positions - 1)
        return self.target_clock.run(target, Pass(positions, attention_mask, tokens), self._cache)

    def _target_output(
        self, request: Request, draft: Draft, output: PassOutput, rows: slice, last: Ints | None = None
    ) -> TargetOutput:
        """Return what a pass says after the nodes of a request's draft. last: as of `PassLayout`."""
        margin = request.tie_margin if request.exact else 0.0
        return TargetOutput(
            lambda nodes: output.logits[rows, nodes],
            draft.structure,
            request.noise,
            draft.cells,
            request.sampling,
            margin,
            partial(self._recompute, request, draft) if margin else None,
            draft.before,
            last,
        )

    def _recompute(self, request: Request, draft: Draft, node: int) -> Floats:
        """Return logits after a node of the request's draft, computed from the start; see `likelihood.py`."""
        codes = np.append(draft.before(node), 0)  # the last one is dropped
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
        """Have all choices made where the logits are, as far as that is possible there."""
        choosing: list[tuple[TargetOutput, Sequence[int]]] = []
        samples: list[SampleRequest] = []
        for request, answer in answers.items():
            nodes, rows = drafts[request].sampled, self._rows[request]
            if nodes is None or answer.recompute or not logits.draws(request.sampling):
                continue
            own = np.array(nodes, np.int64)
            places = np.tile(own if answer.last is None else answer.last[own], (rows.stop - rows.start, 1))
            noise = None if request.sampling.greedy else request.noise
            cells = np.array([answer.cells[node] for node in nodes])
            choosing.append((answer, nodes))
            samples.append(SampleRequest(rows, places, request.sampling, noise, cells))
        best = logits.best(samples, 1) if samples else []
        for (answer, nodes), (codes, _) in zip(choosing, best, strict=True):
            answer.know(nodes, codes[:, 0])

    def _commit(self, commits: Sequence[Commit]) -> None:
        """Tell all drafters what a pass committed, then drop finished requests."""
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
        """Count the rows of the active requests."""
        padding = stack_padding([~row.real for request in self.active for row in request.rows])  # [rows, longest]
        self._padding = padding if padding.any() else padding[:, :0]
        self._rows = _rows_of(self.active)


def _rows_of(requests: Iterable[Request]) -> dict[Request, slice]:
    """The rows of each request in a pass over all of them."""
    rows: dict[Request, slice] = {}
    first = 0
    for request in requests:
        rows[request] = slice(first, first + len(request.rows))
        first += len(request.rows)
    return rows
