"""Output of the target after the nodes of a draft: tokens and distributions, computed from logits of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Protocol

import numpy as np

from ..methods import Sampling
from .engine import DeviceArray, Floats, Ints
from .layout import PassLayout
from .sampling import (
    NO_CODE,
    Probabilities,
    apply_guidance,
    apply_repetition_penalty,
    choose_codes,
    choose_codes_with_margins,
    compute_distribution,
    make_invalid_logits_error,
    stays_best_under_rounding,
)
from .state import ImageSequence
from .tree import TreeStructure

MAX_BLOCK_NODES = 256  # maximum number of nodes of several sequences for which tokens are sampled at once


@dataclass(slots=True)
class LogitBlock:
    """Guided logits that are computed together for consecutive nodes: a whole chain, or one node of a tree."""

    first_node: int  # first node of the block
    logits: Floats  # guided logits, float32 `[nodes, vocab_size]`
    # Gumbel noise of the sampled tokens, float32 `[nodes, vocab_size]`; None if greedy or not sampled yet.
    noise: Floats | None = None
    margins: Sequence[float] = ()  # margin of each node, see `choose_codes_with_margins`; empty before sampling


class DraftNodes(Protocol):
    """Interface to the nodes of a draft; the target samples a token after each node."""

    @property
    def tree_structure(self) -> TreeStructure:
        """Depths, children and ancestor mask of the nodes."""

    @property
    def next_code_indices(self) -> Sequence[int]:
        """Index of the code that is sampled after each node, `[nodes]`."""

    def preceding_codes(self, node: int) -> Ints:
        """Return the codes that precede the code sampled after `node`, int64 `[codes]`."""


class TargetOutput:
    """Output of the target after the nodes of one sequence's draft, computed on demand.

    The token chosen after a node is the token that autoregressive decoding would sample after the same codes.

    Args:
        sequence: sequence of the draft, with its sampling settings, guidance and noise.
        draft: draft of the sequence.
        layout: layout of the draft in the pass.
        logits: logits of the pass, float32 `[rows, pass nodes, vocab_size]`.
        rows: batch rows of the sequence.
        recompute_node_logits: function from a node to the guided logits `[1, vocab_size]` after the node, computed
            again from the whole sequence. It is called if rounding could change the chosen token. None: near-ties are
            not recomputed.
    """

    def __init__(
        self,
        sequence: ImageSequence,
        draft: DraftNodes,
        layout: PassLayout,
        logits: DeviceArray,
        rows: slice,
        recompute_node_logits: Callable[[int], Floats] | None = None,
    ) -> None:
        self.sequence = sequence
        self.layout = layout
        self.rows = rows
        self.recompute_node_logits = recompute_node_logits
        self.next_code_indices = draft.next_code_indices
        self.tree_structure = draft.tree_structure
        self.sampling = sequence.plan.sampling
        self.guidance = sequence.plan.guidance
        self.noise = sequence.noise
        self._draft = draft
        self._logits = logits
        self._block: LogitBlock | None = None  # the block that was used last
        self._choices: dict[int, int] = {}  # {node: token chosen after the node}
        self._distributions: dict[int, Probabilities] = {}  # {node: distribution after the node}

    def choose_token(self, node: int) -> int:
        """Return the token that the target chooses after `node`; a near-tie costs additional forward passes.

        Raises:
            EngineError: the logits are NaN or infinite.
        """
        code = self.choose_token_without_recompute(node)
        if (
            self.recompute_node_logits is not None
            and code != NO_CODE
            and not self._stays_best_under_rounding(node, code)
        ):
            logits = self.recompute_node_logits(node)
            code = self._choices[node] = int(choose_codes(logits, self._read_noise(node, logits), self.sampling)[0])
        if code == NO_CODE:
            raise make_invalid_logits_error()
        return code

    def choose_token_without_recompute(self, node: int) -> int:
        """Return the token that the target chooses after `node`, without recomputing near-ties; maybe `NO_CODE`.

        At a near-tie, the token may differ from the token of `choose_token`. This is sufficient for a draft.
        """
        if node not in self._choices:
            block = self._get_logit_block(node)
            block.noise = self._read_noise(block.first_node, block.logits)
            if self.recompute_node_logits is None:
                codes = choose_codes(block.logits, block.noise, self.sampling).tolist()
            else:
                codes, block.margins = choose_codes_with_margins(block.logits, block.noise, self.sampling)
            self._choices.update(enumerate(codes, block.first_node))
        return self._choices[node]

    def guided_logits(self, node: int) -> Floats:
        """Return the guided logits after `node`, float32 `[vocab_size]`."""
        block = self._get_logit_block(node)
        logits: Floats = block.logits[node - block.first_node]
        return logits

    def distribution(self, node: int) -> Probabilities:
        """Return the target's distribution after `node`, float64 `[vocab_size]`."""
        if node not in self._distributions:
            self._distributions[node] = compute_distribution(self.guided_logits(node), self.sampling)
        return self._distributions[node]

    def acceptance_rng(self, node: int) -> np.random.Generator:
        """Return the random number generator with which relaxed acceptance decides on the children of `node`."""
        return self.noise.acceptance_rng(self.next_code_indices[node])

    def choose_tokens(self, nodes: Sequence[int]) -> Ints:
        """Return the tokens that the target chooses after `nodes`, in ascending order, without recomputing near-ties.

        The token is `NO_CODE` where the logits are NaN or infinite.
        """
        if not all(node in self._choices for node in nodes):
            # NumPy reads a slice without a copy, but copies the logits of a list of nodes.
            consecutive = self.layout.nodes_match_draft and nodes[-1] - nodes[0] + 1 == len(nodes)
            guided = self._read_guided_logits(slice(nodes[0], nodes[-1] + 1) if consecutive else nodes)
            noise = None
            if not self.sequence.plan.sampling.greedy:
                size = guided.shape[1]
                noise = np.concatenate([self.noise.gumbel(self.next_code_indices[node], 1, size) for node in nodes])
            self.store_chosen_codes(nodes, choose_codes(guided, noise, self.sampling).tolist())
        return np.array([self._choices[node] for node in nodes], np.int64)

    def store_chosen_codes(self, nodes: Sequence[int], codes: Sequence[int], block: LogitBlock | None = None) -> None:
        """Store tokens that were sampled elsewhere, on a device or together with other sequences.

        `block` has logits and noise of the nodes; None if they are on a device.
        """
        self._choices.update(zip(nodes, codes, strict=True))
        self._block = block

    def _stays_best_under_rounding(self, node: int, code: int) -> bool:
        block = self._get_logit_block(node)
        index = node - block.first_node
        if len(block.margins):
            return block.margins[index] > self.sequence.rounding_margin
        assert block.noise is not None or self.sampling.greedy, "the block of a sampled node contains the noise"
        noise = None if block.noise is None else block.noise[index]
        return stays_best_under_rounding(block.logits[index], noise, code, self.sampling, self.sequence.rounding_margin)

    def _get_logit_block(self, node: int) -> LogitBlock:
        """Return the block of logits that contains a node: the whole chain, or in a tree the node alone."""
        block = self._block
        if block is None or not block.first_node <= node < block.first_node + len(block.logits):
            # Acceptance reads most nodes of a chain, so their logits are computed at once. It reads only one path of a
            # tree, so logits are computed node by node.
            first, nodes = (0, len(self.tree_structure.depths)) if self.tree_structure.is_chain else (node, 1)
            block = self._block = LogitBlock(first, self._read_guided_logits(slice(first, first + nodes)))
        return block

    def _read_noise(self, first_node: int, logits: Floats) -> Floats | None:
        # The nodes of a block are consecutive codes, so their noise is a consecutive range, too: [nodes, vocab_size].
        return (
            None
            if self.sequence.plan.sampling.greedy
            else self.noise.gumbel(self.next_code_indices[first_node], *logits.shape)
        )

    def _read_guided_logits(self, nodes: slice | Sequence[int]) -> Floats:
        logits = self.layout.logits(self._logits, self.rows, nodes)
        draft_nodes = range(len(self.tree_structure.depths))[nodes] if isinstance(nodes, slice) else nodes
        if self.sampling.has_repetition_penalty:
            preceding = [self._draft.preceding_codes(node) for node in draft_nodes]
            logits = apply_repetition_penalty(logits, preceding, self.sampling)
        return self.guidance.mix_logits(logits, [self.next_code_indices[node] for node in draft_nodes])


def choose_tokens_together(logits: DeviceArray, target_outputs: Iterable[TargetOutput]) -> None:
    """Sample the tokens of several sequences together, which is faster, and store the tokens in their outputs.

    Sequences are sampled together if they are neighbours in the batch, have the same sampling settings, and have drafts
    that are chains of the same length. The other sequences are skipped; their tokens are sampled on demand.
    """
    for (nodes, num_rows, sampling), group in groupby(target_outputs, _sampling_group_key):
        # The limit on the nodes saves memory. The other sequences of the group are sampled on demand.
        outputs = list(islice(group, MAX_BLOCK_NODES // max(1, nodes)))
        count = len(outputs)
        start = outputs[0].rows.start
        stop = outputs[-1].rows.stop
        adjacent = stop - start == count * num_rows  # no rows of other sequences in between
        if nodes == 0 or count < 2 or not adjacent:
            continue
        # The rows of a sequence are neighbours. `apply_guidance` needs the conditional and unconditional logits on the
        # first axis: [num_rows, sequences, nodes, vocab_size].
        guided = logits[start:stop, :nodes].reshape(count, num_rows, nodes, -1).swapaxes(0, 1)
        if num_rows == 1:
            guided = guided[0]
        else:
            guided = apply_guidance(
                guided, np.stack([output.guidance.scales(output.next_code_indices) for output in outputs])
            )
        guided = guided.reshape(count * nodes, -1)
        noise = None  # [sequences * nodes, vocab_size], like `guided`
        if not sampling.greedy:
            size = guided.shape[1]
            noise = np.concatenate(
                [output.noise.gumbel(output.next_code_indices[0], nodes, size) for output in outputs]
            )
        codes, margins = choose_codes_with_margins(guided, noise, sampling)
        for i, output in enumerate(outputs):
            part = slice(i * nodes, (i + 1) * nodes)
            block = LogitBlock(0, guided[part], None if noise is None else noise[part], margins[part])
            output.store_chosen_codes(range(nodes), codes[part], block)


def _sampling_group_key(output: TargetOutput) -> tuple[int, int, Sampling]:
    """Return the key by which drafts are grouped for sampling them together.

    Returns:
        Length of the chain (0 for drafts that are not sampled together), number of batch rows, sampling settings.
    """
    num_rows = output.rows.stop - output.rows.start
    together = (
        output.tree_structure.is_chain
        and output.layout.nodes_match_draft
        and not output.sampling.has_repetition_penalty
    )
    # The batch rows must fit every code of the draft. Guided codes come first, so the last code decides: if the last
    # code is guided, all codes are guided.
    together &= num_rows == output.guidance.count_batch_rows(output.next_code_indices[-1])
    return len(output.tree_structure.depths) if together else 0, num_rows, output.sampling
