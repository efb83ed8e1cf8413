"""The public names: each can be imported, and callers can catch every error of the library."""

from __future__ import annotations

import inspect

import pytest

import lantern_rt
from lantern_rt import errors


@pytest.mark.parametrize("name", lantern_rt.__all__)
def test_every_public_name_can_be_imported_and_is_listed(name: str) -> None:
    assert getattr(lantern_rt, name)
    assert name in dir(lantern_rt)


def test_every_error_is_public_and_of_one_kind() -> None:
    kinds = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind)}
    assert len(kinds) > 5
    assert kinds.keys() == {name for name in lantern_rt.__all__ if name.endswith("Error")}
    assert all(issubclass(kind, lantern_rt.LanternError) for kind in kinds.values())
