"""Decode loop of a batch. Each step drafts tokens, verifies all drafts in one target pass, and commits accepted tokens.

Sequences join and leave the batch between forward passes. They share only the passes. Every sequence has separate
positions, attention masks, cache lengths, sampling settings and random numbers. So the tokens of a sequence do not
depend on the other sequences. With guidance, a sequence has a conditional and an unconditional batch row. The cache
columns for the whole image are reserved when a sequence joins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from ..errors import EngineError
from .device import DeviceLogits
from .drafters import BatchDrafters
from .drafting import CommitCallback, CommittedTokens, Draft, SequenceStep
from .engine import Cache, DeviceArray, Floats, PassOutput
from .likelihood import recompute_logits
from .passes import PrefixBatch
from .state import ImageSequence, LoadedModel
from .statistics import EngineTimer
from .target import TargetOutput, choose_tokens_on_device, choose_tokens_together
from .tree_drafts import TreeDraft, make_chain

_NO_NODES = np.zeros(0, np.int64)


class Batch:
    """Sequences of one model that share forward passes. The caller decides which sequences join, and when.

    Args:
        on_commit: callback that gets the committed tokens after every forward pass.
        timers: timers of the target and of the drafter; None: new timers.
    """

    def __init__(
        self,
        model: LoadedModel,
        on_commit: CommitCallback | None = None,
        timers: tuple[EngineTimer, EngineTimer] | None = None,
    ) -> None:
        self.model = model
        self._on_commit = on_commit
        self.target_timer, self.drafter_timer = timers or (EngineTimer(), EngineTimer())
        self.active_sequences: list[ImageSequence] = []  # sequences in the next pass, in the order of their batch rows
        # Sequences that the last step removed because of an `error`, such as NaN in their logits.
        self.failed_sequences: list[ImageSequence] = []
        self._cache: Cache | None = None  # its rows are the batch rows of `active_sequences`
        self._drafters = BatchDrafters(model, self.drafter_timer)
        self._update_rows()

    def add(self, sequences: Sequence[ImageSequence]) -> list[SequenceStep]:
        """Add sequences to the batch: run one target pass over their prefixes, and sample their first codes.

        Returns:
            The step of each sequence, except of failed sequences.

        Raises:
            EngineError: the pass failed. No sequence has joined.
        """
        # NumPy's warnings are not needed, because sampling raises EngineError for NaN and infinity.
        with np.errstate(over="ignore", invalid="ignore"):
            return self._prefill(sequences)

    def remove(self, sequences: Sequence[ImageSequence]) -> None:
        """Remove sequences from the batch; sequences that have already left are ignored."""
        if leaving := [sequence for sequence in self.active_sequences if sequence in sequences]:
            self._remove(leaving)

    def step(self) -> list[SequenceStep]:
        """Run one target pass over the drafts of all sequences, and commit the accepted tokens; otherwise as `add`."""
        if not self.active_sequences:
            return []
        with np.errstate(over="ignore", invalid="ignore"):  # see `add`
            drafts, num_nodes = self._make_drafts()
            pass_output = self._verify_drafts(drafts, num_nodes)
            outputs = {
                sequence: self._make_target_output(sequence, drafts[sequence], pass_output.logits, rows)
                for sequence, rows in self._rows.items()
            }
            self._sample_tokens(pass_output.logits, outputs.values())
            steps: list[SequenceStep] = []
            commits: list[CommittedTokens] = []
            # Nodes to append to the cache for each row. A failed sequence appends none; `_commit_tokens` removes it.
            row_nodes = [_NO_NODES] * self.num_rows
            for sequence, output in outputs.items():
                draft = drafts[sequence]
                if sequence.error is not None:
                    continue
                try:
                    step, tokens, accepted = draft.accept(output, self.model)
                except EngineError as error:
                    sequence.error = error
                    continue
                sequence.noise.discard_noise_before(len(sequence.codes))
                # Both batch rows of a guided sequence have the same tokens, so both append the same nodes.
                nodes = row_nodes[output.rows] = [accepted] * len(sequence.rows)
                commits.append(CommittedTokens(sequence, tokens, nodes, output.rows, pass_output.hidden, output, draft))
                steps.append(step)
            assert self._cache is not None
            # This must come before `_commit_tokens`, which removes the cache rows of finished sequences.
            self.target_timer.append_to_cache(self._cache, pass_output.new_kv, row_nodes)
            self._commit_tokens(commits)
        return steps

    def _prefill(self, sequences: Sequence[ImageSequence]) -> list[SequenceStep]:
        target = self.model.target
        prefixes = PrefixBatch([row for sequence in sequences for row in sequence.rows])
        lengths = prefixes.lengths
        cache = target.make_cache(len(lengths), max(sequence.num_cache_columns for sequence in sequences))
        pass_output = self.target_timer.run_pass(target, prefixes.build_prefill_input(target, cache), cache)
        # Rows are padded at their end, so the last prefix node of a row has index length - 1. [rows, 1, vocab_size]
        last_logits = pass_output.logits[np.arange(len(lengths)), lengths - 1][:, None]
        steps: list[SequenceStep] = []
        commits: list[CommittedTokens] = []
        for sequence, rows in _assign_rows(sequences).items():
            draft = TreeDraft(sequence, make_chain([0]))  # the root stands for the last token of the prefix
            output = self._make_target_output(sequence, draft, last_logits, rows)
            preserved, _ = sequence.next_preserved_codes()
            # A preserved first code is not sampled. The next pass commits further preserved codes as a chain.
            try:
                codes = preserved[:1] if len(preserved) else np.array([output.choose_token(0)])
            except EngineError as error:
                sequence.error = error
                cache.forbid_memory_reuse()
                continue
            steps.append(SequenceStep.append_codes(sequence, codes))
            nodes = [np.arange(length) for length in lengths[rows]]
            commits.append(CommittedTokens(sequence, codes, nodes, rows, pass_output.hidden, output))
        self.target_timer.append_to_cache(cache, pass_output.new_kv, [np.arange(length) for length in lengths])
        if self._cache is None:
            self._cache = cache
        else:
            self._cache.extend(cache)
        self._drafters.add(sequences)
        self.active_sequences += sequences
        self._update_rows()
        self._commit_tokens(commits)
        return steps

    def _make_drafts(self) -> tuple[dict[ImageSequence, Draft], int]:
        """Return a draft for every active sequence, and the number of nodes to which the pass is padded."""
        drafts: dict[ImageSequence, Draft] = {}
        num_nodes = 0
        for drafter, sequences in self._drafters.drafters_with_sequences:
            num_nodes = max(
                num_nodes,
                *(drafter.count_min_nodes_per_pass(sequence, len(self.active_sequences)) for sequence in sequences),
            )
            drafts.update(zip(sequences, drafter.draft(sequences), strict=True))
        return drafts, num_nodes

    def _verify_drafts(self, drafts: Mapping[ImageSequence, Draft], num_nodes: int) -> PassOutput:
        assert self._cache is not None
        target = self.model.target
        num_nodes = max(num_nodes, *(len(draft.layout.tokens) for draft in drafts.values()))
        placed = ((self._rows[sequence], draft.layout) for sequence, draft in drafts.items())
        batch = self._prefixes.build_pass_input(target, self._cache, placed, num_nodes, self.model.num_positions - 1)
        return self.target_timer.run_pass(target, batch, self._cache)

    def _make_target_output(
        self, sequence: ImageSequence, draft: Draft, logits: DeviceArray, rows: slice
    ) -> TargetOutput:
        output = TargetOutput(sequence, draft, logits, rows)
        # Only an exact method must return the same token in spite of rounding. A bound of 0 turns this off.
        if sequence.plan.method.exact and self.model.rounding_bound > 0:
            sampler = sequence.plan.sampler
            output.rounding_margin = sampler.compute_rounding_margin(self.model.rounding_bound, len(sequence.rows))
            output.recompute_node_logits = partial(self._recompute_logits, sequence, draft)
        return output

    def _recompute_logits(self, sequence: ImageSequence, draft: Draft, node: int) -> Floats:
        """Compute the guided logits after a draft node again, with new passes over the whole sequence.

        The shapes of these passes do not depend on the method, so rounding is the same for all methods.
        """
        calls = self.target_timer.calls
        preceding = draft.preceding_codes(node)
        logits = recompute_logits(self.model, sequence, preceding, draft.next_code_indices[node], self.target_timer)
        sequence.statistics.tie_passes += self.target_timer.calls - calls
        return logits

    def _sample_tokens(self, logits: DeviceArray, outputs: Iterable[TargetOutput]) -> None:
        """Sample the tokens of several sequences at once where this is faster; others are sampled on demand."""
        if not isinstance(logits, np.ndarray) and isinstance(logits, DeviceLogits):
            choose_tokens_on_device(logits, outputs)
        elif len(self.active_sequences) > 1:
            choose_tokens_together(logits, (output for output in outputs if output.sequence.plan.method.exact))

    def _commit_tokens(self, commits: Sequence[CommittedTokens]) -> None:
        commit_of = {commit.sequence: commit for commit in commits}
        for drafter, sequences in self._drafters.drafters_with_sequences:
            if drafted := [commit_of[sequence] for sequence in sequences if sequence in commit_of]:
                drafter.store_committed_tokens(drafted)
        if self._on_commit is not None:
            self._on_commit(commits)
        self.failed_sequences = [sequence for sequence in self.active_sequences if sequence.error is not None]
        finished = [commit.sequence for commit in commits if not commit.sequence.num_remaining_codes]
        unguided = [commit.sequence for commit in commits if commit.sequence.end_guidance()]
        if finished or unguided or self.failed_sequences:
            self._remove([*finished, *self.failed_sequences])

    def _remove(self, sequences: Sequence[ImageSequence]) -> None:
        """Remove sequences, and the unconditional batch rows of sequences whose guidance has ended."""
        self.active_sequences = [sequence for sequence in self.active_sequences if sequence not in sequences]
        assert self._cache is not None
        if self.failed_sequences:
            self._cache.forbid_memory_reuse()  # the cache may contain NaN
        if not self.active_sequences:
            self._cache = None
        else:
            # `_rows` still describes the rows before this change. A sequence whose guidance has ended keeps its first
            # row, which is the conditional row.
            starts = [(self._rows[sequence].start, len(sequence.rows)) for sequence in self.active_sequences]
            self._cache.keep_rows(np.concatenate([np.arange(start, start + count) for start, count in starts]))
        self._drafters.remove(sequences)
        self._update_rows()

    def _update_rows(self) -> None:
        rows = [row for sequence in self.active_sequences for row in sequence.rows]
        self.num_rows = len(rows)
        self._prefixes = PrefixBatch(rows)
        self._rows = _assign_rows(self.active_sequences)


def _assign_rows(sequences: Iterable[ImageSequence]) -> dict[ImageSequence, slice]:
    rows: dict[ImageSequence, slice] = {}
    first = 0
    for sequence in sequences:
        rows[sequence] = slice(first, first + len(sequence.rows))
        first += len(sequence.rows)
    return rows
