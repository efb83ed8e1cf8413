"""The KV cache in NumPy arrays, compared with Python lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lantern_rt.engines.kv_cache import KVCache

NODES = 4


@given(data=st.data(), rows=st.integers(1, 3), steps=st.integers(1, 4), same_nodes_in_all_rows=st.booleans())
def test_every_row_of_the_cache_holds_the_accepted_nodes(
    data: st.DataObject, rows: int, steps: int, same_nodes_in_all_rows: bool
) -> None:
    rng = np.random.default_rng(0)
    cache = KVCache.empty(rows, NODES * steps, num_layers=2, num_kv_heads=1, head_dim=2, dtype=np.float32)
    expected_entries: list[list[np.ndarray]] = [[] for _ in range(rows)]
    for _ in range(steps):
        new_kv = [rng.standard_normal((NODES, rows, 1, 2), np.float32) for _ in range(4)]
        node_lists = st.lists(st.integers(0, NODES - 1), max_size=NODES, unique=True)
        accepted_indices = [data.draw(node_lists) for _ in range(rows)]
        if same_nodes_in_all_rows:
            accepted_indices = [accepted_indices[0]] * rows
        cache.append(new_kv, [np.array(accepted, np.int64) for accepted in accepted_indices])
        for row, accepted in enumerate(accepted_indices):
            expected_entries[row] += [np.stack([tensor[node, row] for tensor in new_kv]) for node in accepted]
    assert cache.lengths.tolist() == [len(entries) for entries in expected_entries]
    for row, entries in enumerate(expected_entries):
        for column, entry in enumerate(entries):
            np.testing.assert_array_equal(np.stack([tensor[column, row] for tensor in cache.tensors]), entry)
