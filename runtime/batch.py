"""The forward passes of a batch: draft, verify in one target pass, accept, commit; repeat.

Sequences join and leave between passes. They share passes but nothing else: each has its own positions, masks, cache
lengths, sampling and random numbers, so its tokens are those it would get alone. With guidance a sequence is two rows
that come and go together. A sequence's cache columns are reserved for the whole image.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from ..methods import Drafted
from .device import DeviceLogits, SampleRequest
from .drafting import Commit, Draft, Drafter, SequenceStep
from .eagle import EagleDrafter
from .engine import Cache, Floats, Ints, Pass, PassOutput
from .head_drafter import HeadDrafter
from .jacobi import JacobiDrafter
from .likelihood import recompute_logits, tie_margin
from .passes import MIN_NODES, identity_mask, prefill_pass, stack_padding, unmask_committed
from .raster import PassLayout
from .rows import RowDrafter
from .state import ImageSequence, Model
from .statistics import Clock
from .target import TargetOutput, choose_for_sequences
from .tree_drafts import TreeDraft, TreeDrafter, chain


class Batch:
    """Sequences of one model that share forward passes. Who joins, and when, is decided by its caller.

    Args:
        model: engines and sizes.
        listener: hears of every pass what it committed, too.
        clocks: of the target and the drafter; None: new ones.

    Attributes:
        active: sequences that take part in passes, in the order of their rows.
    """

    def __init__(
        self, model: Model, listener: Drafter | None = None, clocks: tuple[Clock, Clock] | None = None
    ) -> None:
        self.model = model
        self.listener = listener
        self.target_clock, self.drafter_clock = clocks or (Clock(), Clock())
        self.active: list[ImageSequence] = []
        self._cache: Cache | None = None  # of the active sequences' rows, in their order
        self._plain = TreeDrafter(model.max_nodes)
        # windows, and trees with heads
        self._windows = HeadDrafter(model.heads) if model.heads else JacobiDrafter(model.max_nodes)
        self._row_drafter = RowDrafter(model.max_nodes)
        self._drafters: dict[str, Drafter] = {"ar": self._plain, "sjd": self._windows, "rows": self._row_drafter}
        self._eagles: dict[ImageSequence, EagleDrafter] = {}  # one for all sequences of a method, greedy ones apart
        self._arrange()

    @property
    def num_rows(self) -> int:
        """Rows of a pass over the active sequences."""
        return len(self._padding)

    def join(self, sequences: Sequence[ImageSequence]) -> list[SequenceStep]:
        """Have sequences take part from now on: a target pass over their prefixes, which samples their first codes.

        Returns:
            What each of them got of it.

        Raises:
            EngineError: the target gave NaN or infinity; none of them takes part then.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # of logits that are refused
            return self._prefill(sequences)

    def leave(self, sequences: Sequence[ImageSequence]) -> None:
        """Have sequences take part no more; those that have left already are ignored."""
        if leaving := [sequence for sequence in self.active if sequence in sequences]:
            self._leave(leaving)

    def step(self) -> list[SequenceStep]:
        """Run one target pass over the drafts of all active sequences, each of which commits what is accepted.

        Returns:
            What every sequence got of it.

        Raises:
            EngineError: the target gave NaN or infinity.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # of logits that are refused
            return self._advance() if self.active else []

    def _prefill(self, sequences: Sequence[ImageSequence]) -> list[SequenceStep]:
        target = self.model.target
        rows = [row for sequence in sequences for row in sequence.rows]
        lengths = np.array([len(row.embeds) for row in rows])
        padding = stack_padding([~row.real for row in rows])  # [rows, longest]
        cache = target.new_cache(len(rows), max(sequence.columns for sequence in sequences))
        batch = prefill_pass(target, cache, [row.embeds for row in rows], padding)
        output = self.target_clock.run(target, batch, cache)
        last = output.logits[np.arange(len(rows)), lengths - 1][:, None]  # [rows, 1, vocab_size]
        steps: list[SequenceStep] = []
        commits: list[Commit] = []
        for sequence, own in _rows_of(sequences).items():
            sequence.tie_margin = tie_margin(self.model, sequence.sampling)
            draft = TreeDraft(sequence, chain([0]))  # the root stands for the last token of the prefix
            answer = self._target_output(sequence, draft, output._replace(logits=last), own)
            preserved, _ = sequence.next_preserved()
            codes = preserved[:1] if len(preserved) else np.array([answer.choice(0)])
            steps.append(SequenceStep(sequence.index, sequence.append(codes)))
            nodes = [np.arange(length) for length in lengths[own]]
            commits.append(Commit(sequence, codes, nodes, own, output.hidden, answer))
        self.target_clock.append(cache, output.new_kv, [np.arange(length) for length in lengths])
        self._join(sequences, cache)
        self._commit(commits)
        return steps

    def _join(self, sequences: Sequence[ImageSequence], cache: Cache) -> None:
        if self.active and self._cache is not None:
            self._cache.extend(cache)
        else:
            self._cache = cache
        for sequence in sequences:
            method = sequence.method
            if isinstance(method, Drafted) and not method.uses_draft_heads:
                kind = method, sequence.sampling.greedy
                same = (own for one, own in self._eagles.items() if (one.method, one.sampling.greedy) == kind)
                self._eagles[sequence] = next(same, None) or EagleDrafter(self.model, method, self.drafter_clock)
        self.active += sequences
        self._arrange()

    def _advance(self) -> list[SequenceStep]:
        drafts = self._draft()
        layouts = {sequence: draft.layout() for sequence, draft in drafts.items()}
        output = self._verify(layouts)
        answers = {
            sequence: self._target_output(
                sequence, drafts[sequence], output, self._rows[sequence], layouts[sequence].sampling_nodes
            )
            for sequence in self.active
        }
        self._choose(output, drafts, answers)
        steps: list[SequenceStep] = []
        commits: list[Commit] = []
        for sequence, answer in answers.items():
            draft, rows = drafts[sequence], self._rows[sequence]
            step, tokens, kept = draft.accept(answer, layouts[sequence], self.model)
            sequence.noise.forget(len(sequence.codes))
            nodes = [kept] * len(sequence.rows)
            commits.append(Commit(sequence, tokens, nodes, rows, output.hidden, answer, draft))
            steps.append(step)
        assert self._cache is not None
        self.target_clock.append(self._cache, output.new_kv, [nodes for one in commits for nodes in one.nodes])
        self._commit(commits)
        return steps

    def _draft(self) -> dict[ImageSequence, Draft]:
        """The drafts of all active sequences: every drafter makes those of its sequences at once."""
        sequences: dict[Drafter, list[ImageSequence]] = {}
        for sequence in self.active:
            sequence.adapt_window(len(self.active))
            sequences.setdefault(self._drafter(sequence), []).append(sequence)
        drafts: dict[ImageSequence, Draft] = {}
        for drafter, own in sequences.items():
            drafts.update(zip(own, drafter.draft(own), strict=True))
        return drafts

    def _drafter(self, sequence: ImageSequence) -> Drafter:
        """Where drafts of the method in use come from; some drafters have none behind codes that are kept."""
        method = sequence.method
        usual = self._drafters.get(method.method, self._windows)
        if isinstance(method, Drafted) and not method.uses_draft_heads:
            usual = self._eagles[sequence]
        return self._plain if usual.needs_new_codes and len(sequence.next_preserved()[0]) else usual

    def _verify(self, layouts: Mapping[ImageSequence, PassLayout]) -> PassOutput:
        """Run one target pass over all drafts as they are laid out, padded to the same number of nodes."""
        assert self._cache is not None
        target, lengths = self.model.target, self._cache.lengths
        nodes = max(MIN_NODES, *(max(sequence.nodes, len(layout.tokens)) for sequence, layout in layouts.items()))
        past_length = target.next_past_length(self._cache, nodes)
        tokens, positions = np.zeros((2, len(lengths), nodes), np.int64)
        attention_mask = np.zeros((len(lengths), nodes, past_length + nodes), bool)
        unmask_committed(attention_mask, lengths, self._padding)
        attention_mask[:, :, past_length:] = identity_mask(nodes)
        for sequence, layout in layouts.items():
            rows, count = self._rows[sequence], len(layout.tokens)
            tokens[rows, :count] = layout.tokens
            attention_mask[rows, :count, past_length : past_length + count] = layout.ancestors
            for row, prefix in enumerate(sequence.prefixes, rows.start):
                positions[row, :count] = layout.positions + prefix
                if layout.past is not None:
                    attention_mask[row, :count, prefix : prefix + layout.past.shape[1]] &= layout.past
        positions = np.minimum(positions, self.model.positions - 1)
        return self.target_clock.run(target, Pass(positions, attention_mask, tokens), self._cache)

    def _target_output(
        self, sequence: ImageSequence, draft: Draft, output: PassOutput, rows: slice, sampling_nodes: Ints | None = None
    ) -> TargetOutput:
        """Return what a pass says after the nodes of a sequence's draft. sampling_nodes: as of `PassLayout`."""
        margin = sequence.tie_margin if sequence.exact else 0.0
        return TargetOutput(
            lambda nodes: output.logits[rows, nodes],
            draft.structure,
            sequence.noise,
            draft.cells,
            sequence.sampling,
            margin,
            partial(self._recompute, sequence, draft) if margin else None,
            draft.preceding_codes,
            sampling_nodes,
        )

    def _recompute(self, sequence: ImageSequence, draft: Draft, node: int) -> Floats:
        """Return logits after a node of the sequence's draft, computed from the start; see `likelihood.py`."""
        codes = np.append(draft.preceding_codes(node), 0)  # the last one is dropped
        tokens = sequence.raster.insert_row_ends(codes)[:-1]
        calls = self.target_clock.calls
        logits = recompute_logits(self.model, sequence.rows, tokens, sequence.sampling, self.target_clock)
        sequence.statistics.tie_passes += self.target_clock.calls - calls
        return logits

    def _choose(
        self, output: PassOutput, drafts: Mapping[ImageSequence, Draft], answers: Mapping[ImageSequence, TargetOutput]
    ) -> None:
        """Choose tokens for several sequences at once where that costs less: on a device, and for exact chains."""
        logits = output.logits
        if not isinstance(logits, np.ndarray) and isinstance(logits, DeviceLogits):
            self._choose_on_device(logits, drafts, answers)
        else:
            exact = ((answer, self._rows[sequence]) for sequence, answer in answers.items() if sequence.exact)
            choose_for_sequences(logits, exact)

    def _choose_on_device(
        self, logits: DeviceLogits, drafts: Mapping[ImageSequence, Draft], answers: Mapping[ImageSequence, TargetOutput]
    ) -> None:
        """Have all choices made where the logits are, as far as that is possible there."""
        choosing: list[tuple[TargetOutput, Sequence[int]]] = []
        samples: list[SampleRequest] = []
        for sequence, answer in answers.items():
            nodes, rows = drafts[sequence].sampled, self._rows[sequence]
            if nodes is None or answer.recompute or not logits.can_sample(sequence.sampling):
                continue
            own = np.array(nodes, np.int64)
            places = np.tile(
                own if answer.sampling_nodes is None else answer.sampling_nodes[own], (rows.stop - rows.start, 1)
            )
            noise = None if sequence.sampling.greedy else sequence.noise
            cells = np.array([answer.cells[node] for node in nodes])
            choosing.append((answer, nodes))
            samples.append(SampleRequest(rows, places, sequence.sampling, noise, cells))
        best = logits.best(samples, 1) if samples else []
        for (answer, nodes), (codes, _) in zip(choosing, best, strict=True):
            answer.store_choices(nodes, codes[:, 0])

    def _commit(self, commits: Sequence[Commit]) -> None:
        """Tell all drafters what a pass committed, then drop finished sequences."""
        for eagle in {*self._eagles.values()}:
            eagle.commit([one for one in commits if self._eagles.get(one.sequence) is eagle])
        self._windows.commit(commits)
        if self.listener is not None:
            self.listener.commit(commits)
        if finished := [one.sequence for one in commits if not one.sequence.remaining]:
            self._leave(finished)

    def _leave(self, sequences: Sequence[ImageSequence]) -> None:
        before = self.active
        self.active = [sequence for sequence in before if sequence not in sequences]
        if not self.active:
            self._cache = None
        elif self._cache is not None:
            rows = np.arange(len(self._padding))
            self._cache.keep_rows(np.concatenate([rows[self._rows[sequence]] for sequence in self.active]))
        for drafter in (self._windows, self._row_drafter, *dict.fromkeys(self._eagles.values())):
            drafter.leave(sequences)
        for sequence in sequences:
            self._eagles.pop(sequence, None)
        self._arrange()

    def _arrange(self) -> None:
        """Count the rows of the active sequences."""
        padding = stack_padding([~row.real for sequence in self.active for row in sequence.rows])  # [rows, longest]
        self._padding = padding if padding.any() else padding[:, :0]
        self._rows = _rows_of(self.active)


def _rows_of(sequences: Iterable[ImageSequence]) -> dict[ImageSequence, slice]:
    """The rows of each sequence in a pass over all of them."""
    rows: dict[ImageSequence, slice] = {}
    first = 0
    for sequence in sequences:
        rows[sequence] = slice(first, first + len(sequence.rows))
        first += len(sequence.rows)
    return rows
