"""How many images share passes follows what passes give."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from lantern_rt.planning.width import FIRST, Width, bucket


def serve(width: Width, rate: Callable[[int], float], seconds: float, waiting: int) -> None:
    """Draw for so many seconds with `waiting` images there; `rate(images)` tokens come a second."""
    spent = 0.0
    while spent < seconds:
        images = min(width.images, waiting)
        width.record(images, images, images / rate(images))
        spent += images / rate(images)


def test_images_are_told_apart_by_powers_of_two_and_the_most() -> None:
    assert [bucket(images, 24) for images in (1, 2, 3, 5, 8, 9, 17, 24)] == [1, 2, 4, 8, 8, 16, 24, 24]


def test_more_images_share_passes_for_as_long_as_that_gives_more() -> None:
    for most, best in ((64, 64), (64, 16), (64, 4), (64, 1), (24, 24), (3, 3)):
        width = Width(most)
        assert width.images == min(most, FIRST)
        serve(width, lambda images, best=best: 100.0 * min(images, best) / (1 + max(0, images - best)), 60, 1000)
        assert width.images == best


def test_what_gives_hardly_more_changes_nothing() -> None:
    width = Width(64)
    serve(width, lambda images: 100.0 + images / 100, 60, 1000)
    assert width.images == FIRST


def test_a_width_is_left_when_it_gets_worse() -> None:
    width, good = Width(16), {8: 100.0, 16: 90.0, 4: 80.0}
    serve(width, lambda images: good.get(images, 10.0), 60, 1000)
    assert width.images == 8
    serve(width, lambda images: {**good, 8: 60.0}.get(images, 10.0), 200, 1000)
    assert width.images == 16


def test_with_few_images_nothing_is_decided_for_many() -> None:
    width = Width(64)
    serve(width, lambda images: 100.0 * images, 60, 2)
    assert width.images == FIRST
    serve(width, lambda images: 100.0 * images, 60, 1000)
    assert width.images == 64


@given(st.integers(1, 100), st.lists(st.tuples(st.integers(1, 100), st.integers(1, 1000), st.floats(1e-9, 10))))
@settings(max_examples=200, deadline=None)
def test_the_width_stays_within_its_bounds(most: int, passes: list[tuple[int, int, float]]) -> None:
    width = Width(most)
    for images, tokens, seconds in passes:
        width.record(min(images, most), tokens, seconds)
        assert 1 <= width.images <= most


def test_what_is_long_ago_is_asked_again() -> None:
    width = Width(16)
    serve(width, lambda images: {8: 100.0, 16: 50.0}.get(images, 40.0), 60, 1000)
    assert width.images == 8
    serve(width, lambda images: {8: 100.0, 16: 200.0}.get(images, 40.0), 800, 1000)
    assert width.images == 16
