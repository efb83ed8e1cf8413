"""Caches whose columns fill in any order: what a graph reads from the bits of a pass, against plain lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lantern_rt.engines.columns import WORD, CacheColumns, padded_node_count
from lantern_rt.runtime.engine import Bools, Pass

ROOM = 20  # nodes that a pass may have besides the entries


class Columns:
    """A cache with what stands in its columns: a number for every node that was ever written."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.cache = CacheColumns(np.zeros(rows, np.int64), capacity)
        self.stands = np.full((rows, self.cache.columns), -1)
        self.entries: list[list[int]] = [[] for _ in range(rows)]
        self.next = 0

    def run(self, on_past: Bools, among: Bools) -> np.ndarray:
        """A pass whose nodes see these entries and nodes; checks all of it, and returns the nodes' numbers."""
        (rows, nodes, _) = among.shape
        cache = self.cache
        past_length = cache.past_length()
        mask = np.zeros((rows, nodes, past_length + nodes), bool)
        mask[:, :, : on_past.shape[2]] = on_past
        mask[:, :, past_length:] = among
        feeds = cache.encode(Pass(np.tile(np.arange(nodes), (rows, 1)), mask), padded_node_count(nodes))
        new = self.next + np.arange(rows * nodes).reshape(rows, nodes)
        self.next += rows * nodes
        assert (np.sort(cache.column_of) == np.arange(cache.columns)).all(), "every column once"
        spare = cache.columns - 1
        write = feeds["write"][:, :, 0]
        assert write.shape == (rows, padded_node_count(nodes), 3)
        assert not write[..., 2].any()
        assert (write[..., 0] == np.arange(rows)[:, None]).all()
        assert (write[:, nodes:, 1] == spare).all()
        assert (write[:, :nodes, 1] != spare).all()  # there is room for all of them
        for row, own in enumerate(self.entries):
            held = cache.column_of[row, : len(own)].tolist()
            assert not {*held} & {*write[row, :nodes, 1].tolist()}
            assert len({*write[row, :nodes, 1].tolist()}) == nodes
        for node in range(nodes):
            self.stands[np.arange(rows), write[:, node, 1]] = new[:, node]
        seen = visible(feeds, cache.columns)
        assert not seen[:, :, spare].any()
        assert not seen[:, nodes:, 1:].any()  # what fills up sees the first column alone
        for row in range(rows):
            for node in range(nodes):
                expected = [entry for i, entry in enumerate(self.entries[row]) if on_past[row, node, i]]
                expected += new[row, among[row, node]].tolist()
                assert sorted(self.stands[row, seen[row, node]].tolist()) == sorted(expected)
        return new

    def append(self, new: np.ndarray, accepted: list[list[int]]) -> None:
        self.cache.accept(self.cache.written, [np.array(nodes, np.int64) for nodes in accepted])
        for row, nodes in enumerate(accepted):
            self.entries[row] += new[row, nodes].tolist()
        self.holds()

    def holds(self) -> None:
        """Every entry still stands where the cache says."""
        assert self.cache.lengths.tolist() == [len(own) for own in self.entries]
        for row, own in enumerate(self.entries):
            assert self.stands[row, self.cache.column_of[row, : len(own)]].tolist() == own


def visible(feeds: dict[str, np.ndarray], columns: int) -> Bools:
    """What each node sees, bool `[rows, nodes, columns]`, as the graph reads it."""
    seen: Bools = (feeds["seen"][..., None] >> np.arange(WORD) & 1).astype(bool)
    return seen.reshape(*feeds["seen"].shape[:2], columns)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_graph_reads_what_the_mask_says_after_any_history(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    columns = Columns(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 70)) + ROOM)
    for _ in range(data.draw(st.integers(1, 8))):
        cache = columns.cache
        rows = len(columns.entries)
        action = data.draw(st.sampled_from(["pass", "pass", "pass", "truncate", "select", "join"]))
        if action == "truncate":
            cache.truncate(rng.integers(0, cache.lengths + 1))
            columns.entries = [own[:length] for own, length in zip(columns.entries, cache.lengths, strict=True)]
        elif action == "select":
            kept = rng.permutation(rows)[: rng.integers(1, rows + 1)]
            cache.select(kept)
            columns.stands = columns.stands[kept]
            columns.entries = [columns.entries[row][:] for row in kept]
        elif action == "join":
            other = Columns(data.draw(st.integers(1, 2)), data.draw(st.integers(1, 150)) + ROOM)
            other.next = columns.next
            fill(other, rng)
            cache.join(other.cache)
            both = [np.pad(one, ((0, 0), (0, cache.columns - one.shape[1]))) for one in (columns.stands, other.stands)]
            columns.stands = np.concatenate(both)
            columns.next = other.next
            columns.entries += other.entries
        else:
            fill(columns, rng)
        columns.holds()


def fill(columns: Columns, rng: np.random.Generator) -> None:
    """A pass over nodes with any mask, of which every row keeps some."""
    rows = len(columns.entries)
    nodes = int(rng.integers(1, ROOM))
    longest = max(map(len, columns.entries))
    everywhere = rng.random((rows, 1, longest)) < 0.7
    on_past = everywhere | (rng.random((rows, nodes, longest)) < 0.3)
    on_past &= (np.arange(longest) < columns.cache.lengths[:, None])[:, None]
    among = (rng.random((rows, nodes, nodes)) < 0.3) | np.eye(nodes, dtype=bool)
    new = columns.run(on_past, among)
    room = columns.cache.capacity - ROOM - columns.cache.lengths
    kept = [rng.permutation(nodes)[: max(0, min(int(rng.integers(0, nodes + 1)), most))] for most in room]
    columns.append(new, [own.tolist() for own in kept])


def empty(nodes: int) -> tuple[Bools, Bools]:
    return np.zeros((1, nodes, 0), bool), np.eye(nodes, dtype=bool)[None]


def test_columns_of_nodes_that_were_not_accepted_are_written_again() -> None:
    columns = Columns(1, 60)
    new = columns.run(*empty(5))
    columns.append(new, [[3, 1]])
    assert columns.cache.column_of[0, :2].tolist() == [3, 1]
    columns.run(np.ones((1, 4, 2), bool), np.eye(4, dtype=bool)[None])
    assert columns.cache.written.tolist() == [[0, 2, 4, 5]]
    columns.cache.truncate(np.array([1]))
    columns.entries = [columns.entries[0][:1]]
    columns.run(np.ones((1, 4, 1), bool), np.eye(4, dtype=bool)[None])
    assert columns.cache.written.tolist() == [[0, 1, 2, 4]]


def test_a_row_with_little_room_left_shares_passes_with_rows_of_many_nodes() -> None:
    cache = CacheColumns(np.array([120, 0]), 127)
    cache.column_of[0, :120] = np.arange(120)
    mask = np.zeros((2, 16, 128 + 16), bool)
    mask[0, :, :120] = True
    mask[:, :, 128:] = np.eye(16, dtype=bool)
    feeds = cache.encode(Pass(np.zeros((2, 16), np.int64), mask), 16)
    assert feeds["write"][0, :, 0, 1].tolist() == [*range(120, 127), *[127] * 9]
    assert feeds["write"][1, :, 0, 1].tolist() == [*range(16)]
    with pytest.raises(ValueError, match="a padding node cannot be accepted"):
        cache.accept(cache.written, [np.array([7]), np.array([0])])
    cache.accept(cache.written, [np.arange(7), np.array([0, 15])])
    assert cache.lengths.tolist() == [127, 2]
    assert cache.column_of[0, :127].tolist() == [*range(127)]


def test_what_another_pass_wrote_is_refused() -> None:
    columns = Columns(1, 60)
    columns.run(*empty(2))
    earlier = columns.cache.written
    columns.run(*empty(2))
    nothing = [np.array([], np.int64)]
    with pytest.raises(ValueError, match="not from the last pass"):
        columns.cache.accept(earlier, nothing)
    columns.cache.accept(columns.cache.written, nothing)


def test_passes_are_filled_up_to_few_numbers_of_nodes() -> None:
    """Never to one: TensorRT engines need at least two."""
    assert [padded_node_count(nodes) for nodes in (1, 2, 3, 33, 64, 65, 129)] == [2, 2, 4, 64, 64, 128, 192]
