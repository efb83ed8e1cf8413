"""`CacheColumnMap`: KV caches whose columns fill in any order, compared with plain lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lantern_rt.engines.columns import MASK_WORD_BITS, CacheColumnMap, compute_padded_node_count
from lantern_rt.engines.kv_cache import KVCache
from lantern_rt.runtime.engine import Bools, PassInput

MAX_NODES = 20  # per pass


class CheckedCache:
    """A column map, and the number of the node in each column, `[rows, columns]`, -1 where no node was written."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.cache = CacheColumnMap(np.zeros(rows, np.int64), capacity)
        self.numbers = np.full((rows, self.cache.num_columns), -1)
        self.entries: list[list[int]] = [[] for _ in range(rows)]
        self.next_number = 0

    def run_pass(self, attends_to_entries: Bools, attends_to_nodes: Bools) -> np.ndarray:
        """Run a pass and check columns and mask; return the numbers of its nodes, `[rows, nodes]`."""
        (rows, nodes, _) = attends_to_nodes.shape
        cache = self.cache
        past_length = cache.past_length()
        mask = np.zeros((rows, nodes, past_length + nodes), bool)
        mask[:, :, : attends_to_entries.shape[2]] = attends_to_entries
        mask[:, :, past_length:] = attends_to_nodes
        batch = PassInput(np.tile(np.arange(nodes), (rows, 1)), mask)
        feeds = cache.encode_pass_inputs(batch, compute_padded_node_count(nodes))
        new_numbers = self.next_number + np.arange(rows * nodes).reshape(rows, nodes)
        self.next_number += rows * nodes
        assert (np.sort(cache.column_of) == np.arange(cache.num_columns)).all(), "a row is no permutation"
        spare = cache.num_columns - 1  # column that only padding nodes write
        write = feeds["write"][:, :, 0]
        assert write.shape == (rows, compute_padded_node_count(nodes), 3)
        assert not write[..., 2].any()
        assert (write[..., 0] == np.arange(rows)[:, None]).all()
        assert (write[:, nodes:, 1] == spare).all()
        assert (write[:, :nodes, 1] != spare).all()  # every node has a column of the cache
        for row, entries in enumerate(self.entries):
            entry_columns = cache.column_of[row, : len(entries)].tolist()
            assert not {*entry_columns} & {*write[row, :nodes, 1].tolist()}
            assert len({*write[row, :nodes, 1].tolist()}) == nodes
        for node in range(nodes):
            self.numbers[np.arange(rows), write[:, node, 1]] = new_numbers[:, node]
        attended = unpack_mask(feeds, cache.num_columns)
        assert not attended[:, :, spare].any()
        assert not attended[:, nodes:, 1:].any()  # padding nodes attend only to the first column
        for row in range(rows):
            for node in range(nodes):
                expected = [entry for i, entry in enumerate(self.entries[row]) if attends_to_entries[row, node, i]]
                expected += new_numbers[row, attends_to_nodes[row, node]].tolist()
                assert sorted(self.numbers[row, attended[row, node]].tolist()) == sorted(expected)
        return new_numbers

    def accept(self, new_numbers: np.ndarray, accepted: list[list[int]]) -> None:
        self.cache.accept_nodes(self.cache.written_columns, [np.array(nodes, np.int64) for nodes in accepted])
        for row, nodes in enumerate(accepted):
            self.entries[row] += new_numbers[row, nodes].tolist()
        self.check_entries()

    def check_entries(self) -> None:
        assert self.cache.lengths.tolist() == [len(entries) for entries in self.entries]
        for row, entries in enumerate(self.entries):
            assert self.numbers[row, self.cache.column_of[row, : len(entries)]].tolist() == entries


def unpack_mask(feeds: dict[str, np.ndarray], columns: int) -> Bools:
    """Return the attention mask that is encoded in the bits of the graph input `seen`, `[rows, nodes, columns]`."""
    mask: Bools = (feeds["seen"][..., None] >> np.arange(MASK_WORD_BITS) & 1).astype(bool)
    return mask.reshape(*feeds["seen"].shape[:2], columns)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_graph_inputs_encode_the_mask_after_any_operations(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    model = CheckedCache(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 70)) + MAX_NODES)
    for _ in range(data.draw(st.integers(1, 8))):
        cache = model.cache
        rows = len(model.entries)
        action = data.draw(st.sampled_from(["pass", "pass", "pass", "truncate", "select", "join"]))
        if action == "truncate":
            cache.truncate(rng.integers(0, cache.lengths + 1))
            model.entries = [entries[:length] for entries, length in zip(model.entries, cache.lengths, strict=True)]
        elif action == "select":
            selected = rng.permutation(rows)[: rng.integers(1, rows + 1)]
            cache.select_rows(selected)
            model.numbers = model.numbers[selected]
            model.entries = [model.entries[row][:] for row in selected]
        elif action == "join":
            joining_model = CheckedCache(data.draw(st.integers(1, 2)), data.draw(st.integers(1, 150)) + MAX_NODES)
            joining_model.next_number = model.next_number
            run_random_pass(joining_model, rng)
            cache.append_rows(joining_model.cache)
            padding = [((0, 0), (0, cache.num_columns - item.numbers.shape[1])) for item in (model, joining_model)]
            model.numbers = np.concatenate(
                [np.pad(model.numbers, padding[0]), np.pad(joining_model.numbers, padding[1])]
            )
            model.next_number = joining_model.next_number
            model.entries += joining_model.entries
        else:
            run_random_pass(model, rng)
        model.check_entries()


def run_random_pass(model: CheckedCache, rng: np.random.Generator) -> None:
    rows = len(model.entries)
    nodes = int(rng.integers(1, MAX_NODES))
    longest = max(map(len, model.entries))
    everywhere = rng.random((rows, 1, longest)) < 0.7
    attends_to_entries = everywhere | (rng.random((rows, nodes, longest)) < 0.3)
    attends_to_entries &= (np.arange(longest) < model.cache.lengths[:, None])[:, None]
    attends_to_nodes = (rng.random((rows, nodes, nodes)) < 0.3) | np.eye(nodes, dtype=bool)
    new_numbers = model.run_pass(attends_to_entries, attends_to_nodes)
    remaining = model.cache.capacity - MAX_NODES - model.cache.lengths
    accepted = [rng.permutation(nodes)[: max(0, min(int(rng.integers(0, nodes + 1)), count))] for count in remaining]
    model.accept(new_numbers, [indices.tolist() for indices in accepted])


def make_masks_without_entries(nodes: int) -> tuple[Bools, Bools]:
    """Return two masks: each node attends to no committed node, and in the same pass only to itself."""
    return np.zeros((1, nodes, 0), bool), np.eye(nodes, dtype=bool)[None]


def test_cache_columns_of_rejected_nodes_are_used_again() -> None:
    model = CheckedCache(1, 60)
    new_numbers = model.run_pass(*make_masks_without_entries(5))
    model.accept(new_numbers, [[3, 1]])
    assert model.cache.column_of[0, :2].tolist() == [3, 1]
    model.run_pass(np.ones((1, 4, 2), bool), np.eye(4, dtype=bool)[None])
    assert model.cache.written_columns.tolist() == [[0, 2, 4, 5]]
    model.cache.truncate(np.array([1]))
    model.entries = [model.entries[0][:1]]
    model.run_pass(np.ones((1, 4, 1), bool), np.eye(4, dtype=bool)[None])
    assert model.cache.written_columns.tolist() == [[0, 1, 2, 4]]


def test_a_nearly_full_row_shares_a_pass_with_many_nodes() -> None:
    cache = CacheColumnMap(np.array([120, 0]), 127)
    cache.column_of[0, :120] = np.arange(120)
    mask = np.zeros((2, 16, 128 + 16), bool)
    mask[0, :, :120] = True
    mask[:, :, 128:] = np.eye(16, dtype=bool)
    feeds = cache.encode_pass_inputs(PassInput(np.zeros((2, 16), np.int64), mask), 16)
    assert feeds["write"][0, :, 0, 1].tolist() == [*range(120, 127), *[127] * 9]
    assert feeds["write"][1, :, 0, 1].tolist() == [*range(16)]
    with pytest.raises(ValueError, match="a padding node cannot be accepted"):
        cache.accept_nodes(cache.written_columns, [np.array([7]), np.array([0])])
    cache.accept_nodes(cache.written_columns, [np.arange(7), np.array([0, 15])])
    assert cache.lengths.tolist() == [127, 2]
    assert cache.column_of[0, :127].tolist() == [*range(127)]


def test_accepting_nodes_of_an_earlier_pass_is_an_error() -> None:
    model = CheckedCache(1, 60)
    model.run_pass(*make_masks_without_entries(2))
    earlier = model.cache.written_columns
    model.run_pass(*make_masks_without_entries(2))
    no_indices = [np.array([], np.int64)]
    with pytest.raises(ValueError, match="not from the last pass"):
        model.cache.accept_nodes(earlier, no_indices)
    model.cache.accept_nodes(model.cache.written_columns, no_indices)


def test_the_nodes_of_a_pass_are_rounded_up_to_few_sizes() -> None:
    """Check that no pass has a single node, as TensorRT engines need at least two nodes."""
    assert [compute_padded_node_count(nodes) for nodes in (1, 2, 3, 33, 64, 65, 129)] == [2, 2, 4, 64, 64, 128, 192]


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
