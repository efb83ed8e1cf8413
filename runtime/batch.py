"""The forward passes of a batch: draft, verify all drafts in one target pass, accept, commit; repeat.

Sequences join and leave between passes. They share passes and nothing else. Positions, attention masks, cache lengths,
sampling settings and random numbers are separate, so a sequence's tokens do not depend on the other sequences. With
guidance a sequence has two batch rows, which join and leave together. Its cache columns are reserved for the whole
image.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from ..methods import Drafted
from .device import DeviceLogits, SampleRequest
from .drafting import Commit, Draft, Drafter, OnCommit, SequenceStep
from .eagle import EagleDrafter
from .engine import Cache, Floats, Pass, PassOutput
from .groups import GroupDrafter
from .guidance import scales_of
from .head_drafter import HeadDrafter
from .jacobi import JacobiDrafter
from .likelihood import recompute_logits, tie_margin
from .order import average_logits
from .pass_layout import PassLayout
from .passes import MIN_NODES, identity_mask, prefill_pass, stack_padding, unmask_committed
from .rows import RowDrafter
from .state import ImageSequence, Model
from .statistics import Clock
from .target import TargetOutput, choose_for_sequences
from .tree_drafts import TreeDraft, TreeDrafter, chain


class Batch:
    """Sequences of one model that share forward passes. The caller decides which sequences join, and when.

    Args:
        model: engines and sizes.
        on_commit: callback that gets the commits of every forward pass, None for none.
        clocks: clocks of the target and the drafter; None: new clocks.

    Attributes:
        active: sequences in the next pass, in the order of their batch rows.
    """

    def __init__(
        self, model: Model, on_commit: OnCommit | None = None, clocks: tuple[Clock, Clock] | None = None
    ) -> None:
        self.model = model
        self._on_commit = on_commit
        self.target_clock, self.drafter_clock = clocks or (Clock(), Clock())
        self.active: list[ImageSequence] = []
        self._cache: Cache | None = None  # its rows are the batch rows of `active`
        self._plain_drafter = TreeDrafter(model.max_nodes)
        # drafts windows, and with draft heads trees, too
        self._window_drafter = HeadDrafter(model.heads) if model.heads else JacobiDrafter(model.max_nodes)
        self._row_drafter = RowDrafter(model.max_nodes)
        self._drafters: dict[str, Drafter] = {
            "ar": self._plain_drafter,
            "sjd": self._window_drafter,
            "rows": self._row_drafter,
            "groups": GroupDrafter(),
        }
        # Sequences of one method share a drafter, except that greedy and sampled sequences are apart.
        self._eagle_drafters: dict[ImageSequence, EagleDrafter] = {}
        self._update_rows()

    @property
    def num_rows(self) -> int:
        """Number of batch rows of the active sequences."""
        return len(self._prefix_padding)

    def join(self, sequences: Sequence[ImageSequence]) -> list[SequenceStep]:
        """Add sequences to the batch: run one target pass over their prefixes, and sample their first codes.

        Returns:
            Each sequence's part of the step.

        Raises:
            EngineError: the target gave NaN or infinity. No sequence has joined.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # EngineError reports them
            return self._prefill(sequences)

    def leave(self, sequences: Sequence[ImageSequence]) -> None:
        """Remove sequences from the batch; sequences that have left already are ignored."""
        if leaving := [sequence for sequence in self.active if sequence in sequences]:
            self._leave(leaving)

    def step(self) -> list[SequenceStep]:
        """Run one target pass over the drafts of all active sequences, and commit the accepted tokens.

        Returns:
            Each active sequence's part of the step.

        Raises:
            EngineError: the target gave NaN or infinity.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # EngineError reports them
            return self._decode_step() if self.active else []

    def _prefill(self, sequences: Sequence[ImageSequence]) -> list[SequenceStep]:
        target = self.model.target
        prefixes = [row for sequence in sequences for row in sequence.rows]
        lengths = np.array([len(row.embeds) for row in prefixes])
        padding = stack_padding([~row.real for row in prefixes])  # [rows, longest prefix]
        cache = target.new_cache(len(prefixes), max(sequence.cache_columns for sequence in sequences))
        offsets = np.array([row.offset for row in prefixes])
        prefill = prefill_pass(target, cache, [row.embeds for row in prefixes], padding, offsets)
        pass_output = self.target_clock.run(target, prefill, cache)
        last_logits = pass_output.logits[np.arange(len(prefixes)), lengths - 1][:, None]  # [rows, 1, vocab_size]
        if self.model.order is not None:
            last_logits = self.model.order.prefix_logits(last_logits)
        steps: list[SequenceStep] = []
        commits: list[Commit] = []
        for sequence, rows in _assign_rows(sequences).items():
            sequence.tie_margin = tie_margin(self.model, sequence.sampling)
            draft = TreeDraft(sequence, chain([0]))  # the root stands for the last token of the prefix
            output = self._target_output(sequence, draft, pass_output._replace(logits=last_logits), rows)
            preserved, _ = sequence.next_preserved()
            codes = preserved[:1] if len(preserved) else np.array([output.choice(0)])
            steps.append(SequenceStep.of(sequence, codes))
            nodes = [np.arange(length) for length in lengths[rows]]
            commits.append(Commit(sequence, codes, nodes, rows, pass_output.hidden, output))
        self.target_clock.append(cache, pass_output.new_kv, [np.arange(length) for length in lengths])
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
                drafters = self._eagle_drafters.items()
                shared = (drafter for user, drafter in drafters if (user.method, user.sampling.greedy) == kind)
                drafter = next(shared, None) or EagleDrafter(self.model, method, self.drafter_clock)
                self._eagle_drafters[sequence] = drafter
        self.active += sequences
        self._update_rows()

    def _decode_step(self) -> list[SequenceStep]:
        drafts = self._draft()
        layouts = {sequence: draft.layout() for sequence, draft in drafts.items()}
        pass_output = self._verify(layouts)
        outputs = {
            sequence: self._target_output(
                sequence, drafts[sequence], pass_output, self._rows[sequence], layouts[sequence]
            )
            for sequence in self.active
        }
        self._sample_together(pass_output, drafts, outputs)
        steps: list[SequenceStep] = []
        commits: list[Commit] = []
        for sequence, output in outputs.items():
            draft = drafts[sequence]
            step, tokens, accepted_nodes = draft.accept(output, layouts[sequence], self.model)
            sequence.noise.forget(len(sequence.codes))
            nodes = [accepted_nodes] * len(sequence.rows)
            commits.append(Commit(sequence, tokens, nodes, self._rows[sequence], pass_output.hidden, output, draft))
            steps.append(step)
        assert self._cache is not None
        accepted = [row_nodes for commit in commits for row_nodes in commit.nodes]
        self.target_clock.append(self._cache, pass_output.new_kv, accepted)
        self._commit(commits)
        return steps

    def _draft(self) -> dict[ImageSequence, Draft]:
        """Draft for all active sequences; every drafter is called once, with all its sequences."""
        sequences_of: dict[Drafter, list[ImageSequence]] = {}
        for sequence in self.active:
            sequence.adapt_window(len(self.active))
            sequences_of.setdefault(self._drafter(sequence), []).append(sequence)
        drafts: dict[ImageSequence, Draft] = {}
        for drafter, sequences in sequences_of.items():
            drafts.update(zip(sequences, drafter.draft(sequences), strict=True))
        return drafts

    def _drafter(self, sequence: ImageSequence) -> Drafter:
        """Return the drafter of a sequence's next draft.

        Some drafters cannot draft after preserved codes, and rows begin after the codes of a smaller grid.
        """
        method = sequence.method
        drafter = self._drafters.get(method.method, self._window_drafter)
        if isinstance(method, Drafted) and not method.uses_draft_heads:
            drafter = self._eagle_drafters[sequence]
        after_preserved = drafter.needs_new_codes and len(sequence.next_preserved()[0])
        before_rows = drafter is self._row_drafter and len(sequence.codes) <= sequence.raster.first_codes
        return self._plain_drafter if after_preserved or before_rows else drafter

    def _verify(self, layouts: Mapping[ImageSequence, PassLayout]) -> PassOutput:
        """Run one target pass over all drafts, padded to the same number of nodes."""
        assert self._cache is not None
        target = self.model.target
        lengths = self._cache.lengths
        num_nodes = max(
            MIN_NODES, *(max(sequence.max_nodes, len(layout.tokens)) for sequence, layout in layouts.items())
        )
        past_length = target.next_past_length(self._cache, num_nodes)
        tokens, positions = np.zeros((2, len(lengths), num_nodes), np.int64)
        attention_mask = np.zeros((len(lengths), num_nodes, past_length + num_nodes), bool)
        unmask_committed(attention_mask, lengths, self._prefix_padding)
        attention_mask[:, :, past_length:] = identity_mask(num_nodes)
        for sequence, layout in layouts.items():
            rows = self._rows[sequence]
            count = len(layout.tokens)
            tokens[rows, :count] = layout.tokens
            attention_mask[rows, :count, past_length : past_length + count] = layout.ancestors
            positions[rows, :count] = layout.positions + self._first_positions[rows]
            if layout.past is not None:
                for row, prefix in enumerate(sequence.prefix_lengths, rows.start):
                    attention_mask[row, :count, prefix : prefix + layout.past.shape[1]] &= layout.past
        positions = np.minimum(positions, self.model.num_positions - 1)
        return self.target_clock.run(target, Pass(positions, attention_mask, tokens), self._cache)

    def _target_output(
        self,
        sequence: ImageSequence,
        draft: Draft,
        pass_output: PassOutput,
        rows: slice,
        layout: PassLayout | None = None,
    ) -> TargetOutput:
        margin = sequence.tie_margin if sequence.exact else 0.0

        def read(nodes: slice | Sequence[int]) -> Floats:
            if layout is None or layout.averaged is None:
                logits: Floats = pass_output.logits[rows, nodes]
                return logits
            return average_logits(pass_output.logits[rows, : len(layout.tokens)], layout.averaged[nodes])

        return TargetOutput(
            logits=read,
            structure=draft.structure,
            noise=sequence.noise,
            cells=draft.cells,
            sampling=sequence.sampling,
            num_guided=sequence.num_guided,
            scales=sequence.scales,
            tie_margin=margin,
            recompute=partial(self._recompute, sequence, draft) if margin else None,
            preceding_codes=draft.preceding_codes,
            sampling_nodes=None if layout is None else layout.sampling_nodes,
        )

    def _recompute(self, sequence: ImageSequence, draft: Draft, node: int) -> Floats:
        """Compute the logits after a draft node again, by passes over the whole sequence; see `likelihood.py`."""
        codes = draft.preceding_codes(node)
        calls = self.target_clock.calls
        rows = sequence.rows[: sequence.num_rows(draft.cells[node])]
        cell = draft.cells[node]
        scales = scales_of(sequence.scales, [cell])
        place = sequence.raster, rows, codes, cell
        logits = recompute_logits(self.model, *place, sequence.sampling, self.target_clock, scales)
        sequence.statistics.tie_passes += self.target_clock.calls - calls
        return logits

    def _sample_together(
        self,
        pass_output: PassOutput,
        drafts: Mapping[ImageSequence, Draft],
        outputs: Mapping[ImageSequence, TargetOutput],
    ) -> None:
        """Sample tokens for several sequences at once where that costs less: on a device, and for exact chains."""
        logits = pass_output.logits
        if self.model.order is not None and self.model.order.two_heads:
            return  # a code is drawn from two nodes' logits, on the host
        if not isinstance(logits, np.ndarray) and isinstance(logits, DeviceLogits):
            self._sample_on_device(logits, drafts, outputs)
        else:
            exact = ((output, self._rows[sequence]) for sequence, output in outputs.items() if sequence.exact)
            choose_for_sequences(logits, exact)

    def _sample_on_device(
        self, logits: DeviceLogits, drafts: Mapping[ImageSequence, Draft], outputs: Mapping[ImageSequence, TargetOutput]
    ) -> None:
        """Sample tokens on the device that holds the logits, for the sequences whose sampling it supports."""
        device_outputs: list[tuple[TargetOutput, Sequence[int]]] = []
        requests: list[SampleRequest] = []
        for sequence, output in outputs.items():
            sampled = drafts[sequence].sampled
            if sampled is None or output.recompute or not logits.can_sample(sequence.sampling):
                continue
            first_row = self._rows[sequence].start
            noise = None if sequence.sampling.greedy else sequence.noise
            for num_rows in (1, 2):  # a draft may have guided cells and cells after them
                part = [node for node in sampled if sequence.num_rows(output.cells[node]) == num_rows]
                if not part:
                    continue
                nodes = np.array([part] * num_rows, np.int64)
                if output.sampling_nodes is not None:
                    nodes = output.sampling_nodes[nodes]
                cells = [output.cells[node] for node in part]
                scales = scales_of(sequence.scales, cells)
                rows = slice(first_row, first_row + num_rows)
                requests.append(SampleRequest(rows, nodes, sequence.sampling, noise, np.array(cells), scales))
                device_outputs.append((output, part))
        best = logits.best_codes(requests, 1) if requests else []
        for (output, sampled), (codes, _) in zip(device_outputs, best, strict=True):
            output.store_choices(sampled, codes[:, 0])

    def _commit(self, commits: Sequence[Commit]) -> None:
        """Send the committed tokens to all drafters, then remove finished sequences."""
        for drafter in {*self._eagle_drafters.values()}:
            drafter.commit([commit for commit in commits if self._eagle_drafters.get(commit.sequence) is drafter])
        self._window_drafter.commit(commits)
        if self._on_commit is not None:
            self._on_commit(commits)
        finished = [commit.sequence for commit in commits if not commit.sequence.remaining]
        unguided = [commit.sequence for commit in commits if commit.sequence.end_guidance()]
        for sequence in unguided:
            sequence.tie_margin = tie_margin(self.model, sequence.sampling)
        if finished or unguided:
            self._leave(finished)

    def _leave(self, sequences: Sequence[ImageSequence]) -> None:
        """Remove sequences, and the rows that guidance does not need any more."""
        self.active = [sequence for sequence in self.active if sequence not in sequences]
        if not self.active:
            self._cache = None
        elif self._cache is not None:
            starts = [(self._rows[sequence].start, len(sequence.rows)) for sequence in self.active]
            self._cache.keep_rows(np.concatenate([np.arange(start, start + count) for start, count in starts]))
        for drafter in (self._window_drafter, self._row_drafter, *dict.fromkeys(self._eagle_drafters.values())):
            drafter.leave(sequences)
        for sequence in sequences:
            self._eagle_drafters.pop(sequence, None)
        self._update_rows()

    def _update_rows(self) -> None:
        """Update the batch rows of the active sequences, and the padding and length of their prefixes."""
        padding = stack_padding([~row.real for sequence in self.active for row in sequence.rows])  # [rows, longest]
        self._prefix_padding = padding if padding.any() else padding[:, :0]
        self._rows = _assign_rows(self.active)
        ends = [len(row.embeds) + row.offset for sequence in self.active for row in sequence.rows]
        self._first_positions = np.array(ends, np.int64)[:, None]  # position of each row's first code, [rows, 1]


def _assign_rows(sequences: Iterable[ImageSequence]) -> dict[ImageSequence, slice]:
    """Return the batch rows of each sequence in a pass over all sequences."""
    rows: dict[ImageSequence, slice] = {}
    first = 0
    for sequence in sequences:
        rows[sequence] = slice(first, first + len(sequence.rows))
        first += len(sequence.rows)
    return rows
