"""The public names: each can be imported, and callers can catch every error of the library."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

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


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in lantern_rt.__all__:
        value = getattr(lantern_rt, name)
        members = vars(value) if inspect.isclass(value) else {"": value}
        for attribute, member in members.items():
            function = getattr(member, "__func__", member)  # the function of a class method
            if inspect.isfunction(function) and (attribute == "__call__" or not attribute.startswith("_")):
                yield f"{name}.{attribute}", function


@pytest.mark.parametrize(("name", "function"), list(public_functions()))
def test_every_public_function_documents_its_parameters_its_result_and_its_errors(
    name: str, function: Callable[..., Any]
) -> None:
    documented = inspect.getdoc(function) or ""
    signature = inspect.signature(function)
    needed = ["Args:"] if signature.parameters.keys() - {"self", "cls"} else []
    result = "Yields:" if inspect.isasyncgenfunction(function) else "Returns:"
    needed += [result] if signature.return_annotation != "None" else []
    needed += [] if name.endswith(".close") else ["Raises:"]
    assert [section for section in needed if section not in documented] == []
