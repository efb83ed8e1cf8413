"""Public names of the package: they can be imported, are documented, and include every error class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lantern_rt
from lantern_rt import errors


@pytest.mark.parametrize("name", lantern_rt.__all__)
def test_every_public_name_can_be_imported_and_is_in_dir(name: str) -> None:
    assert getattr(lantern_rt, name)
    assert name in dir(lantern_rt)


def test_every_error_is_public_and_a_lantern_error() -> None:
    error_classes = {name: error_class for name, error_class in vars(errors).items() if inspect.isclass(error_class)}
    assert len(error_classes) > 5
    assert error_classes.keys() == {name for name in lantern_rt.__all__ if name.endswith("Error")}
    assert all(issubclass(error_class, lantern_rt.LanternError) for error_class in error_classes.values())


def list_public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield name and function of every public function, method and `__call__`."""
    for name in lantern_rt.__all__:
        value = getattr(lantern_rt, name)
        members = vars(value) if inspect.isclass(value) else {"": value}
        for attribute, member in members.items():
            function = getattr(member, "__func__", member)  # the function of a class method
            if inspect.isfunction(function) and (attribute == "__call__" or not attribute.startswith("_")):
                yield f"{name}.{attribute}", function


@pytest.mark.parametrize(("name", "function"), list(list_public_functions()))
def test_every_public_function_has_a_docstring(name: str, function: Callable[..., Any]) -> None:
    assert inspect.getdoc(function), name
