"""Tables of the nearest codes of each code, nearest first."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from goldens import DATA

from lantern_rt.export.models.fsq import decode_fsq_codes
from lantern_rt.export.neighbours import compute_neighbour_table


def load_codebook() -> np.ndarray:
    weights = torch.load(DATA / "llamagen-vq/vq_tiny.pt", weights_only=True)["model"]
    rows: np.ndarray = weights["quantize.embedding.weight"].numpy()
    return rows


def test_the_neighbour_table_equals_lanterns_published_table() -> None:
    published = np.load(DATA / "lantern-accept/top_127_indices.npy")
    table = compute_neighbour_table(load_codebook())
    np.testing.assert_array_equal(table, published)
    assert table.dtype == np.uint8


@pytest.mark.parametrize("k", [1, 5, 126, 127, 1000])
def test_fewer_neighbours_are_the_first_columns_of_the_table(k: int) -> None:
    codebook = load_codebook()
    whole_table = compute_neighbour_table(codebook)
    table = compute_neighbour_table(codebook, k)
    assert table.shape == (128, min(k, 127))  # a code is not its neighbour
    np.testing.assert_array_equal(table, whole_table[:, :k])


def test_neighbours_at_equal_distances_are_sorted_by_index() -> None:
    table = compute_neighbour_table(np.ones((5, 3), np.float32))
    assert table[2].tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize("k", [1, 40, 119])
def test_the_table_of_fsq_codes_equals_a_sort_by_distance(k: int) -> None:
    vectors = decode_fsq_codes(torch.arange(120), (8, 5, 3)).double().numpy()
    # No rounding: all coordinates are multiples of a quarter.
    squared_distances = np.square(vectors[:, None] - vectors).sum(-1)
    np.fill_diagonal(squared_distances, -1)  # sorts each code before its neighbours
    table = compute_neighbour_table(vectors, k)
    assert table.dtype == np.uint8
    np.testing.assert_array_equal(table, squared_distances.argsort(1, kind="stable")[:, 1 : k + 1])
