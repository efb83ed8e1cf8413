"""Contents of a bundle before the bundle is written: graphs, arrays and files from a family's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .graph.graphs import Graph
from .neighbours import MAX_NEIGHBORS


@dataclass(frozen=True)
class BundleContents:
    """Contents of a bundle. Weights stay memory-mapped or deferred until they are written.

    Args:
        code_embeddings: the target's input embeddings of codes, `[codes, hidden_size]`.
        codebook: codebook vectors, by which neighbours are sorted, `[codes, code_dim]`.
        manifest_fields: fields of `Manifest` that the exporter does not fill in.
        sources: role and path of each checkpoint file, for the bundle's provenance record.
        extra_files: file name and content by role, such as `tokenizer`: `("tokenizer.json", ...)`.
        weights: set of weights that was exported, `model` or `ema`; None if the user did not choose.
        target_sha256: sha256 of the target weights that the drafter was trained on, None if unknown.
    """

    graphs: Sequence[Graph]
    code_embeddings: Tensor
    codebook: NDArray[np.floating[Any]]
    manifest_fields: Mapping[str, Any]
    sources: Sequence[tuple[str, Path]] = ()
    extra_files: Mapping[str, tuple[str, bytes]] = field(default_factory=dict)
    num_neighbors: int = MAX_NEIGHBORS
    licence: str = "unknown (see the checkpoint's source)"
    weights: str | None = None
    target_sha256: str | None = None
