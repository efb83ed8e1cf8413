"""Functions that run an exported bundle's graphs, for comparison with arrays recorded from published programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from guided_logits import mix_guided_logits
from numpy.typing import NDArray

from lantern_rt.bundle.manifest import Manifest
from lantern_rt.export.compare import GraphFileSession
from lantern_rt.export.graph.graphs import HIDDEN
from lantern_rt.methods import Sampling

Arrays = dict[str, NDArray[Any]]
TOLERANCE = 1e-4  # largest absolute difference of float32 values
GUIDED_TOLERANCE = 3e-4  # larger, since guidance multiplies the difference of two rows by the guidance scale
DATA = Path(__file__).parent.parent / "data"
ROW_NAMES = ("cond", "uncond")  # batch rows in the names of recorded arrays


def load_golden(folder: str) -> Arrays:
    """Load the recorded arrays of a folder by name; logits of text tokens are NaN where no test reads them."""
    with np.load(DATA / folder / "golden.npz") as file:
        return dict(file)


def read_manifest(bundle: Path) -> Manifest:
    return Manifest.model_validate_json((bundle / "bundle.json").read_text())


def assert_same_bundles(first: Path, second: Path, differing_role: str = "") -> None:
    """Compare the manifests of two bundles, with the hashes of all files but one, and without provenance."""
    fields, other_fields = (read_manifest(folder).model_dump(exclude={"provenance"}) for folder in (first, second))
    for manifest in (fields, other_fields):
        manifest["files"].pop(differing_role, None)
    assert fields == other_fields


def assert_close(values: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(values, expected, rtol=0, atol=tolerance, strict=True)


def log_softmax(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return log-probabilities over the last axis; -inf stays -inf."""
    scores64 = scores.astype(np.float64)
    total = np.log(np.exp(scores64 - scores64.max(-1, keepdims=True)).sum(-1, keepdims=True))
    return (scores64 - scores64.max(-1, keepdims=True) - total).astype(np.float32)


def mix_guided(logits: NDArray[np.float32], scale: float = 3.0) -> NDArray[np.float32]:
    """Return guided logits `[tokens, codes]` of conditional and unconditional logits `[2, tokens, codes]`."""
    return mix_guided_logits(logits, Sampling(cfg_scale=scale))


def embed_tokens(bundle: Path, ids: Any) -> NDArray[np.float32]:
    """Compute the embeddings of token ids `[tokens]` or `[rows, tokens]` with the condition graph of a bundle."""
    tokens = np.atleast_2d(np.array(ids, np.int64))
    out = GraphFileSession(bundle / "condition.onnx").run({"token_ids": tokens, "uncond_ids": tokens[:, :1]})
    np.testing.assert_array_equal(out["uncond_embeds"], out["prefix_embeds"][:, :1])
    return out["prefix_embeds"]


class GraphRunner:
    """Runner of a decoder graph, with a KV cache that grows with every forward pass."""

    def __init__(self, bundle: Path, role: str = "target", rows: int = 1) -> None:
        spec = read_manifest(bundle).decoders[role]
        self.session = GraphFileSession(bundle / f"{role}.onnx")
        parts = [f"{i}.{part}" for i in range(spec.num_layers) for part in ("key", "value")]
        self.past = {part: np.zeros((0, rows, spec.num_kv_heads, spec.head_dim), np.float32) for part in parts}
        self.visible_nodes = np.zeros((rows, 0), bool)  # [rows, cached nodes]: true if later nodes attend to the node
        self.rows = rows

    @property
    def length(self) -> int:
        return self.visible_nodes.shape[1]

    def step(
        self,
        visible: NDArray[np.bool_] | None = None,
        visible_later: Any = True,
        positions: NDArray[Any] | None = None,
        **inputs: NDArray[Any],
    ) -> Arrays:
        """Run new nodes and append them to the KV cache; masks are true where the first node attends to the second."""
        nodes = next(iter(inputs.values())).shape[1]
        new_mask = np.tri(nodes, dtype=bool) if visible is None else visible
        past_mask = np.broadcast_to(self.visible_nodes[:, None], (self.rows, nodes, self.length))
        mask = np.concatenate([past_mask, np.broadcast_to(new_mask, (self.rows, nodes, nodes))], 2)
        new_positions = self.length + np.arange(nodes) if positions is None else positions
        out = self.session.run(
            {
                **{name: np.ascontiguousarray(array) for name, array in inputs.items()},
                "position_ids": np.broadcast_to(new_positions, (self.rows, nodes)).astype(np.int64),
                "attention_mask": np.where(mask, 0, HIDDEN).astype(np.float32)[:, None],
                **{f"past_key_values.{part}": tensor for part, tensor in self.past.items()},
            }
        )
        for part, tensor in self.past.items():
            self.past[part] = np.concatenate([tensor, out[f"new_key_values.{part}"]])
        new_visible_nodes = np.broadcast_to(np.asarray(visible_later, bool), (self.rows, nodes))
        self.visible_nodes = np.concatenate([self.visible_nodes, new_visible_nodes], 1)
        return out


class PromptRunner:
    """Runner of the conditional and the unconditional row of a prompt, with one KV cache for each row.

    Args:
        uncond: token ids of the unconditional prompt; None without guidance.
        first_code: token id of code 0, if the condition graph embeds only text tokens; None if it embeds all tokens.
    """

    def __init__(
        self, bundle: Path, cond: Sequence[int], uncond: Sequence[int] | None, first_code: int | None = None
    ) -> None:
        text_embeddings = [] if first_code is None else [embed_tokens(bundle, range(first_code))[0]]
        # [tokens, width], or empty if the condition graph also embeds image tokens
        self.table = text_embeddings and np.concatenate([*text_embeddings, np.load(bundle / "code_embeddings.npy")])
        prompts = [cond] if uncond is None else [cond, uncond]
        self.bundle = bundle
        self.row_runs = [GraphRunner(bundle) for _ in prompts]
        self.outputs = [
            run.step(input_embeds=embed_tokens(bundle, ids)) for run, ids in zip(self.row_runs, prompts, strict=True)
        ]

    def step(self, tokens: NDArray[np.int64], depth: NDArray[np.int64] | None = None, **visible: Any) -> list[Arrays]:
        """Run tokens in all rows; return the outputs of each row."""
        embeds = embed_tokens(self.bundle, tokens) if len(self.table) == 0 else self.table[tokens][None]
        positions = [None if depth is None else run.length + depth for run in self.row_runs]
        return [
            run.step(input_embeds=embeds, positions=row_positions, **visible)
            for run, row_positions in zip(self.row_runs, positions, strict=True)
        ]

    def compute_logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits `[rows, tokens, codes]` from which each of the tokens after the prompt is predicted."""
        last_logits = [output["logits"][:, -1:] for output in self.outputs]
        logits = [output["logits"] for output in self.step(np.array(ids[:-1], np.int64))]
        return np.concatenate([np.concatenate(last_logits), np.concatenate(logits)], 1)
