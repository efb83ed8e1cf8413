"""The order of the neighbour table."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from goldens import DATA

from lantern_rt.export.models.fsq import decode_fsq_codes
from lantern_rt.export.neighbours import compute_neighbour_table


def codebook() -> np.ndarray:
    weights = torch.load(DATA / "llamagen-vq/vq_tiny.pt", weights_only=True)["model"]
    rows: np.ndarray = weights["quantize.embedding.weight"].numpy()
    return rows


def test_the_order_agrees_with_the_published_file() -> None:
    published = np.load(DATA / "lantern-accept/top_127_indices.npy")
    table = compute_neighbour_table(codebook())
    np.testing.assert_array_equal(table, published)
    assert table.dtype == np.uint8


@pytest.mark.parametrize("k", [1, 5, 126, 127, 1000])
def test_a_shorter_table_is_the_start_of_the_whole_one(k: int) -> None:
    rows = codebook()
    whole = compute_neighbour_table(rows)
    part = compute_neighbour_table(rows, k)
    assert part.shape == (128, min(k, 127))
    np.testing.assert_array_equal(part, whole[:, :k])


def test_equal_rows_are_neighbours_in_order_of_index() -> None:
    table = compute_neighbour_table(np.ones((5, 3), np.float32))
    assert table[2].tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize("k", [1, 40, 119])
def test_points_of_a_grid_have_the_neighbours_of_a_full_sort(k: int) -> None:
    grid = decode_fsq_codes(torch.arange(120), (8, 5, 3)).double().numpy()
    squares = np.square(grid[:, None] - grid).sum(-1)  # exact, as all numbers are multiples of a quarter
    np.fill_diagonal(squares, -1)
    table = compute_neighbour_table(grid, k)
    assert table.dtype == np.uint8
    np.testing.assert_array_equal(table, squares.argsort(1, kind="stable")[:, 1 : k + 1])
