"""The decode loop: draft a tree, verify it in one target pass, accept a path, commit it; repeat.

`decode` yields after every step, so progress, streaming and cancelling cost nothing. Requests share passes but nothing
else: each has its own positions, masks, cache lengths and random numbers. With guidance every request is two rows,
conditional rows first.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..methods import Drafted, MethodConfig, Sampling, Sjd
from .acceptance import Acceptance, follow
from .drafter import TreeDrafts
from .drafts import Answers, Batch, Committed, Drafts, Model, Prompt, Request, prefix_rows
from .engine import Floats, Ints, Pass, PassOutput
from .jacobi import WindowDrafts
from .noise import Noise
from .passes import MINIMUM_NODES, committed_mask, prefill_pass
from .relaxation import Relaxation, walk, walk_greedy
from .statistics import Statistics, summarise
from .ties import settled_logits, slack
from .tree import DraftTree


@dataclass(frozen=True)
class RequestStep:
    """One request's part of a step: the tokens it committed, and how.

    codes may run past the image's end in the last step; `committed` counts those that belong to it. tree and acceptance
    are None for the prefill and for `ar`.
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


def decode(
    model: Model,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    sampling: Sampling,
    method: MethodConfig,
    others: Sequence[MethodConfig] = (),
) -> Generator[Step, MethodConfig | None, None]:
    """Decode one image's tokens for every prompt; yields a `Step` after the prefill and after every pass.

    `send` the generator one of `others`, or the method again, to go on with it: exact methods give the same tokens.

    seeds: one per prompt, 0 .. 2^64 - 1. A seed gives the same tokens under every exact method, and under any method
    whatever else is in the batch.
    """
    requests = [Request(i, Noise(seed)) for i, seed in enumerate(seeds)]
    return _Decoding(Batch(model, sampling, requests, prefix_rows(prompts, sampling)), [method, *others]).steps()


class _Decoding:
    """State of one running decode."""

    def __init__(self, batch: Batch, methods: Sequence[MethodConfig]) -> None:
        assert len(methods) == 1 or all(method.exact for method in methods)
        self.batch = batch
        self.model, self.sampling, self.clock = batch.model, batch.sampling, batch.target_clock
        self.relaxation = Relaxation.of(methods[0], batch.model.neighbors)
        self.slack = slack(self.model, self.sampling) if methods[0].exact else 0.0
        self.sources = [Drafts()]
        if trees := [method for method in methods if isinstance(method, Drafted)]:
            self.sources.append(TreeDrafts(batch, trees))
        if windows := [method for method in methods if isinstance(method, Sjd)]:
            self.sources.append(WindowDrafts(batch, windows))
        self.use(methods[0])
        self.active = list(batch.requests)
        self.prefix_padding = batch.prefix_padding
        self.cache = self.model.target.new_cache(
            len(batch.rows), batch.capacity(max(one.slots for one in self.sources))
        )

    def use(self, method: MethodConfig) -> None:
        """Go on with this method."""
        kind = TreeDrafts if isinstance(method, Drafted) else WindowDrafts if isinstance(method, Sjd) else Drafts
        self.method, self.drafts = method, next(source for source in self.sources if type(source) is kind)
        self.drafts.use(method)
        self.themselves = np.eye(max(MINIMUM_NODES, self.drafts.nodes), dtype=bool)  # what every node sees at least

    def steps(self) -> Generator[Step, MethodConfig | None, None]:
        """The prefill, then steps until every request has its tokens."""
        codes, requests = self.model.codes, self.batch.requests
        parts, statistics = self._prefill(), None
        while statistics is None:
            done = sum(min(len(request.codes), codes) for request in requests)
            if not self.active:
                records = [request.statistics for request in requests]
                statistics = summarise(self.method.method, codes, self.clock, self.batch.drafter_clock, records)
            following = yield Step(parts, done, codes * len(requests), statistics)
            if following is not None:
                self.use(following)
            parts = self._advance() if self.active else []

    def _prefill(self) -> list[RequestStep]:
        target, lengths = self.model.target, self.batch.lengths
        batch = prefill_pass(target, self.cache, [row.embeds for row in self.batch.rows], self.prefix_padding)
        output = self.clock.run(target, batch, self.cache)
        last = output.logits[np.arange(len(lengths)), lengths - 1][:, None]  # [rows, 1, vocab_size]
        parts, nothing = [], DraftTree(np.zeros(1, np.int64), np.array([-1], np.int64))
        for slot, request in enumerate(self.active):
            code = self._answers(slot, nothing, replace(output, logits=last)).choice(0)
            request.codes.append(code)
            parts.append(RequestStep(request.index, np.array([code]), 1))
        self._commit(parts, [np.arange(length) for length in lengths], output, [])
        return parts

    def _advance(self) -> list[RequestStep]:
        trees = self.drafts.draft(self.active)
        output = self._verify(trees)
        parts, accepted_indices, answers = [], [], []
        for slot, (request, tree) in enumerate(zip(self.active, trees, strict=True)):
            answer = self._answers(slot, tree, output)
            accepted = self._accept(tree, answer)
            codes = np.array([*(int(tree.tokens[node]) for node in accepted.path[1:]), accepted.bonus])
            committed = min(len(codes), self.batch.missing(request))
            request.codes.extend(codes.tolist())
            request.noise.forget(len(request.codes))
            request.statistics.codes_per_step.append(len(codes))
            request.statistics.realised_tvd += accepted.realised_tvd
            accepted_indices.append(np.array(accepted.path, np.int64))
            answers.append(answer)
            how = (tree, accepted) if self.drafts.nodes > 1 else ()
            parts.append(RequestStep(request.index, codes, committed, *how))
        self._commit(parts, accepted_indices * self.batch.sides, output, answers)
        return parts

    def _accept(self, tree: DraftTree, target: Answers) -> Acceptance:
        if self.relaxation is None:
            return follow(tree, target.choice)
        if self.sampling.greedy:
            return walk_greedy(tree, target.distribution, self.relaxation)
        return walk(tree, target.distribution, target.choice, self.relaxation, target.decisions)

    def _answers(self, slot: int, tree: DraftTree, output: PassOutput) -> Answers:
        """What a pass says of an active request's tree."""
        request, logits = self.active[slot], partial(self._logits, output, slot)
        position = len(request.codes)
        settle = partial(self._settle, request, tree, position) if self.slack else None
        return Answers(logits, tree.structure, request.noise, position, self.sampling, self.slack, settle)

    def _settle(self, request: Request, tree: DraftTree, before: int, node: int) -> Floats:
        """Logits after a node of the request's tree below its first `before` tokens, for a tie; see `ties.py`."""
        tokens = np.array([*request.codes[:before], *tree.tokens[tree.path_to(node)[1:]].tolist()], np.int64)
        rows, calls = self.batch.rows[request.index :: len(self.batch.requests)], self.clock.calls
        logits = settled_logits(self.model, rows, tokens, self.sampling, self.clock)
        request.statistics.settling_passes += self.clock.calls - calls
        return logits

    def _verify(self, trees: list[DraftTree]) -> PassOutput:
        """One target pass over all trees, padded to the same number of nodes."""
        rows, nodes = len(trees) * self.batch.sides, len(self.themselves)
        lengths = self.cache.lengths
        past_length = self.model.target.next_past_length(self.cache, nodes)
        tokens, depths = np.zeros((2, rows, nodes), np.int64)
        attention_mask = np.zeros((rows, nodes, past_length + nodes), bool)
        attention_mask[:, :, :past_length] = committed_mask(lengths, self.prefix_padding, past_length)[:, None]
        attention_mask[:, :, past_length:] = self.themselves
        for slot, tree in enumerate(trees):
            own, count = slice(slot, None, len(trees)), tree.nodes
            tokens[own, :count], depths[own, :count] = tree.tokens, tree.structure.depths
            attention_mask[own, :count, past_length : past_length + count] = tree.structure.ancestors
        positions = np.minimum(lengths[:, None] + depths, self.model.positions - 1)
        return self.clock.run(self.model.target, Pass(positions, attention_mask, tokens), self.cache)

    def _commit(
        self, parts: list[RequestStep], accepted_indices: list[Ints], output: PassOutput, answers: list[Answers]
    ) -> None:
        """Keep keys and values of accepted nodes, tell the source of drafts, and drop finished requests."""
        self.clock.append(self.cache, output.new_kv, accepted_indices)
        committed = Committed([part.codes for part in parts], accepted_indices, output, answers)
        for source in self.sources:
            source.commit(self.active, committed)
        count = len(self.active)
        kept = [slot for slot, request in enumerate(self.active) if self.batch.missing(request) > 0]
        self.active = [self.active[slot] for slot in kept]
        if kept and len(kept) < count:
            rows = np.array([side * count + slot for side in range(self.batch.sides) for slot in kept], np.int64)
            self.cache.keep_rows(rows)
            self.prefix_padding = self.prefix_padding[rows]
            for source in self.sources:
                source.keep(kept, rows)

    def _logits(self, output: PassOutput, slot: int, nodes: slice) -> Floats:
        logits: Floats = output.logits[slot :: len(self.active), nodes]  # [sides, nodes, vocab_size]
        return logits
