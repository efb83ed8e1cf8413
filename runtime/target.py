"""Output of the target after the nodes of a draft: tokens and distributions, computed from logits of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Protocol

import numpy as np

from ..methods import Sampling
from .device import DeviceLogits, SamplingRequest
from .engine import DeviceArray, Floats, Ints
from .layout import PassLayout
from .sampler import guide_together
from .sampling import NO_CODE, Probabilities, make_invalid_logits_error
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
    margins: Sequence[float] = ()  # margin of each node, see `Sampler.choose`; empty before sampling


class DraftNodes(Protocol):
    """Interface to the nodes of a draft; the target samples a token after each node."""

    @property
    def layout(self) -> PassLayout:
        """Tokens, positions and ancestor mask of the nodes in a forward pass."""

    @property
    def tree_structure(self) -> TreeStructure:
        """Depths, children and ancestor mask of the nodes."""

    @property
    def next_code_indices(self) -> Sequence[int]:
        """Index of the code that is sampled after each node, `[nodes]`."""

    @property
    def sampled_nodes(self) -> Sequence[int] | None:
        """Nodes after which acceptance needs a sampled token; None if acceptance needs distributions, too."""

    def preceding_codes(self, node: int) -> Ints:
        """Return the codes that precede the code sampled after `node`, int64 `[codes]`."""


class TargetOutput:
    """Output of the target after the nodes of one sequence's draft, computed on demand.

    The token chosen after a node is the token that autoregressive decoding would sample after the same codes.

    Args:
        logits: logits of the pass, float32 `[rows, pass nodes, vocab_size]`.
        rows: batch rows of the sequence.
    """

    rounding_margin = 0.0  # maximum rounding error of the difference of two guided logits
    # Returns the guided logits `[1, vocab_size]` after a node, computed again from the whole sequence. It is called if
    # rounding could change the chosen token. None: near-ties are not recomputed.
    recompute_node_logits: Callable[[int], Floats] | None = None

    def __init__(self, sequence: ImageSequence, draft: DraftNodes, logits: DeviceArray, rows: slice) -> None:
        self.sequence = sequence
        self.layout = draft.layout
        self.rows = rows
        self.next_code_indices = draft.next_code_indices
        self.tree_structure = draft.tree_structure
        self.sampler = sequence.plan.sampler
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
            start = self.sequence.noise, self.next_code_indices[node]
            (code,), _ = self.sampler.choose(logits, self.sampler.draw_noise([start], *logits.shape))
            self._choices[node] = code
        if code == NO_CODE:
            raise make_invalid_logits_error()
        return code

    def choose_token_without_recompute(self, node: int) -> int:
        """Return the token that the target chooses after `node`, without recomputing near-ties; maybe `NO_CODE`.

        At a near-tie, the token may differ from the token of `choose_token`. This is sufficient for a draft.
        """
        if node not in self._choices:
            block = self._get_logit_block(node)
            start = self.sequence.noise, self.next_code_indices[block.first_node]
            block.noise = self.sampler.draw_noise([start], *block.logits.shape)
            codes, block.margins = self.sampler.choose(block.logits, block.noise)
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
            self._distributions[node] = self.sampler.compute_distribution(self.guided_logits(node))
        return self._distributions[node]

    def acceptance_rng(self, node: int) -> np.random.Generator:
        """Return the random number generator with which relaxed acceptance decides on the children of `node`."""
        return self.sequence.noise.acceptance_rng(self.next_code_indices[node])

    def choose_tokens(self, nodes: Sequence[int]) -> Ints:
        """Return the tokens that the target chooses after `nodes`, in ascending order, without recomputing near-ties.

        The token is `NO_CODE` where the logits are NaN or infinite.
        """
        if not all(node in self._choices for node in nodes):
            # NumPy reads a slice without a copy, but copies the logits of a list of nodes.
            consecutive = self.layout.nodes_match_draft and nodes[-1] - nodes[0] + 1 == len(nodes)
            guided = self._read_guided_logits(slice(nodes[0], nodes[-1] + 1) if consecutive else nodes)
            starts = [(self.sequence.noise, self.next_code_indices[node]) for node in nodes]
            codes, _ = self.sampler.choose(guided, self.sampler.draw_noise(starts, 1, guided.shape[1]))
            self.store_chosen_codes(nodes, codes)
        return np.array([self._choices[node] for node in nodes], np.int64)

    def store_chosen_codes(self, nodes: Sequence[int], codes: Sequence[int], block: LogitBlock | None = None) -> None:
        """Store tokens that were sampled elsewhere; `block` has their logits and noise, unless they are on a device."""
        self._choices.update(zip(nodes, codes, strict=True))
        self._block = block

    def _stays_best_under_rounding(self, node: int, code: int) -> bool:
        block = self._get_logit_block(node)
        index = node - block.first_node
        if len(block.margins):
            return block.margins[index] > self.rounding_margin
        noise = None if block.noise is None else block.noise[index]
        return self.sampler.stays_best_under_rounding(block.logits[index], noise, code, self.rounding_margin)

    @property
    def device_nodes(self) -> Sequence[int]:
        """Nodes whose tokens a device may sample; none if acceptance needs distributions or near-ties recomputed."""
        return () if self.recompute_node_logits else self._draft.sampled_nodes or ()

    def make_sampling_request(self, nodes: Sequence[int]) -> SamplingRequest:
        rows = np.arange(self.rows.start, self.rows.stop)
        pass_nodes = self.layout.find_sampling_nodes(np.array(nodes, np.int64))
        codes = [self.next_code_indices[node] for node in nodes]
        return self.sampler.make_request(rows, pass_nodes, codes, self.sequence.noise)

    def _get_logit_block(self, node: int) -> LogitBlock:
        """Return the block of logits that contains a node: the whole chain, or in a tree the node alone."""
        block = self._block
        if block is None or not block.first_node <= node < block.first_node + len(block.logits):
            # Acceptance reads most nodes of a chain, so their logits are computed at once. It reads only one path of a
            # tree, so logits are computed node by node.
            first, nodes = (0, len(self.tree_structure.depths)) if self.tree_structure.is_chain else (node, 1)
            block = self._block = LogitBlock(first, self._read_guided_logits(slice(first, first + nodes)))
        return block

    def _read_guided_logits(self, nodes: slice | Sequence[int]) -> Floats:
        logits = self.layout.logits(self._logits, self.rows, nodes)
        draft_nodes = range(len(self.tree_structure.depths))[nodes] if isinstance(nodes, slice) else nodes
        codes = [self.next_code_indices[node] for node in draft_nodes]
        return self.sampler.guide(logits, codes, map(self._draft.preceding_codes, draft_nodes))


def choose_tokens_on_device(logits: DeviceLogits, target_outputs: Iterable[TargetOutput]) -> None:
    """Sample on the device that holds the logits where the device supports the settings, and store the tokens."""
    outputs = [
        (output, nodes)
        for output in target_outputs
        if (nodes := output.device_nodes) and logits.supports_sampling(output.sampler.sampling)
    ]
    requests = [output.make_sampling_request(nodes) for output, nodes in outputs]
    best = logits.sample_top_codes(requests, 1) if requests else []
    for (output, nodes), (codes, scores) in zip(outputs, best, strict=True):
        output.store_chosen_codes(nodes, np.where(np.isfinite(scores[:, 0]), codes[:, 0], NO_CODE).tolist())


def choose_tokens_together(logits: DeviceArray, target_outputs: Iterable[TargetOutput]) -> None:
    """Sample the tokens of several sequences together, which is faster, and store the tokens in their outputs.

    Sequences are sampled together if they are neighbours in the batch, have the same sampling settings, and have drafts
    that are chains of the same length. The other sequences are skipped; their tokens are sampled on demand.
    """
    for (nodes, num_rows, _), group in groupby(target_outputs, _sampling_group_key):
        # The limit on the nodes saves memory. The other sequences of the group are sampled on demand.
        outputs = list(islice(group, MAX_BLOCK_NODES // max(1, nodes)))
        rows = slice(outputs[0].rows.start, outputs[-1].rows.stop)
        adjacent = rows.stop - rows.start == len(outputs) * num_rows  # no rows of other sequences in between
        if nodes == 0 or len(outputs) < 2 or not adjacent:
            continue
        samplers = [output.sampler for output in outputs]
        guided = guide_together(samplers, logits[rows, :nodes], [output.next_code_indices for output in outputs])
        starts = [(output.sequence.noise, output.next_code_indices[0]) for output in outputs]
        noise = samplers[0].draw_noise(starts, nodes, guided.shape[1])
        codes, margins = samplers[0].choose(guided, noise)
        for i, output in enumerate(outputs):
            part = slice(i * nodes, (i + 1) * nodes)
            block = LogitBlock(0, guided[part], None if noise is None else noise[part], margins[part])
            output.store_chosen_codes(range(nodes), codes[part], block)


def _sampling_group_key(output: TargetOutput) -> tuple[int, int, Sampling]:
    """Return the length of the chain (0 if it is not sampled together), the number of batch rows, and the settings."""
    num_rows = output.rows.stop - output.rows.start
    together = (
        output.tree_structure.is_chain
        and output.layout.nodes_match_draft
        and output.sampler.can_guide_together(num_rows, output.next_code_indices[-1])
    )
    return len(output.tree_structure.depths) if together else 0, num_rows, output.sampler.sampling
