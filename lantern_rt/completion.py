"""Method strings, their completion from a bundle's defaults, and the check that the bundle supports the method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import ValidationError

from .bundle.manifest import Manifest, explain_unsupported
from .errors import BundleError, RequestError, TreeError
from .inputs import check_int, describe_validation_error, format_value
from .methods import (
    METHODS,
    PARAMETERS,
    Autoregressive,
    FrozenModel,
    GroupDecoding,
    MethodConfig,
    RelaxedMethod,
    TreeMethod,
)
from .runtime.tree import StaticTree
from .runtime.tree_names import parse_tree

C = TypeVar("C", bound=FrozenModel)


def resolve_method(manifest: Manifest, method: Any) -> MethodConfig:
    """Return a method with all its parameters, checked against the bundle.

    Args:
        manifest: manifest of the bundle; its defaults complete a method string.
        method: method object, which is complete, or method string.

    Raises:
        RequestError: the method does not exist, or the bundle lacks a drafter, neighbours or tree for it.
    """
    completed = _complete_method(manifest, method)
    if problem := explain_unsupported(manifest, completed):
        *others, last = supported_methods(manifest, METHODS)
        remedy = f"use method {', '.join(others)} or {last}"
        raise RequestError(f"bundle {manifest.name} {problem}", field=f"method {completed.method}", remedy=remedy)
    if isinstance(completed, TreeMethod):
        _check_draft_tree(manifest, completed.tree, is_default="tree=" not in str(method))
    return completed


def check_method(method: str) -> MethodConfig:
    """Return a method, with the general defaults for missing parameters.

    Raises:
        RequestError: the method does not exist, or a parameter is invalid for every bundle.
    """
    name, parameters = parse_method(method)
    kind = METHODS[name]
    fields = kind(method=name).parameters() | parameters
    if issubclass(kind, RelaxedMethod) and fields.keys() & {"delta", "lambda"}:
        fields.setdefault("neighbors", 1)
    completed = validate_model(kind, fields)
    if isinstance(completed, TreeMethod):
        parse_tree(completed.tree)
    return completed


def supported_methods(manifest: Manifest, methods: Iterable[str]) -> list[str]:
    """Return the method strings of `methods` that a bundle supports."""
    return [method for method in methods if explain_unsupported(manifest, _complete_method(manifest, method)) is None]


def parse_method(text: Any) -> tuple[str, dict[str, Any]]:
    """Parse a method string, `NAME` or `NAME:PARAMETER=VALUE:...`, without checking the values.

    Returns:
        The name of the method and its parameters.

    Raises:
        RequestError: the value is not text, the method does not exist, or a part is not PARAMETER=VALUE with a
            parameter of the method.
    """
    name, *parts = text.split(":") if isinstance(text, str) else [text]
    *others, last = METHODS
    if name not in (*others, last):
        raise RequestError(field="method", found=format_value(name), expected=f"{', '.join(others)} or {last}")
    parameters: dict[str, Any] = {}
    for part in parts:
        parameter, _, value = part.partition("=")
        if parameter not in PARAMETERS or not value:
            known = [key for key, methods in PARAMETERS.items() if name in methods] or [*PARAMETERS]
            similar = get_close_matches(parameter, known, 1)
            raise RequestError(
                field="method",
                found=f"{part!r} in {text!r}",
                expected=f"PARAMETER=VALUE, of {', '.join(known)}",
                remedy=f"did you mean {similar[0]}=VALUE?" if similar else "",
            )
        if name not in PARAMETERS[parameter]:
            remedy = f"omit {parameter}, or use method {' or '.join(PARAMETERS[parameter])}"
            raise RequestError(f"method {name} does not take it", field=parameter, remedy=remedy)
        parameters[parameter] = _parse_value(value)
    return name, parameters


def _parse_value(text: str) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def validate_model(model_class: type[C], fields: Mapping[str, Any]) -> C:
    """Return an object of a pydantic model. Raises: RequestError: names the first invalid field."""
    try:
        return model_class.model_validate(fields)
    except ValidationError as error:
        raise RequestError(**describe_validation_error(error)) from error


def _complete_method(manifest: Manifest, method: Any) -> MethodConfig:
    """Return a method with all its parameters, which the bundle may not support."""
    if isinstance(method, MethodConfig):
        name = method.method
        parameters = method.parameters()
        fields = method.model_dump()
    else:
        name, parameters = parse_method(method)
        fields = _find_default_parameters(manifest, name) | parameters
    kind = METHODS[name]
    if kind is Autoregressive and manifest.order is not None:
        return GroupDecoding()  # plain decoding is the bundle's order
    if issubclass(kind, RelaxedMethod) and (isinstance(method, str) or "neighbors" in parameters):
        fields |= _complete_relaxed_parameters(manifest, name, parameters)
    if issubclass(kind, TreeMethod) and fields.get("drafter") is None and manifest.heads is not None:
        fields["drafter"] = "heads"
    return validate_model(kind, fields)


def _find_default_parameters(manifest: Manifest, method_name: str) -> dict[str, Any]:
    default = next((method for method in manifest.decoding.methods if method.method == method_name), None)
    return (default or METHODS[method_name](method=method_name)).parameters()


def _complete_relaxed_parameters(manifest: Manifest, method_name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return neighbors, bound and residual of relaxed acceptance; all are None if the method is exact."""
    bounds = [bound for bound in ("delta", "lambda") if method_name in PARAMETERS[bound]]
    default_bound = bounds[0] if len(bounds) == 1 else None
    bound = next((bound for bound in bounds if bound in parameters), default_bound)
    if bound is None:
        if unused := [parameter for parameter in ("neighbors", "residual") if parameter in parameters]:
            problem = f"method {method_name} adds no neighbors without a bound"
            raise RequestError(problem, field=unused[0], remedy="give delta or lambda, too")
        return dict.fromkeys([*bounds, "neighbors", "residual"])
    defaults = _find_default_parameters(manifest, "lantern" if bound == "delta" else "lantern++")
    limit = manifest.neighbors or 1_000_000  # no bundle without a table supports the method
    default = min(defaults.get("neighbors", 0), limit)
    neighbors = check_int("neighbors", parameters.get("neighbors"), default, 1, limit)
    return {"residual": "aggregated", bound: defaults.get(bound), **parameters, "neighbors": neighbors}


def _check_draft_tree(manifest: Manifest, tree_name: str, is_default: bool) -> None:
    """Raise an error unless a draft tree exists and fits the codebook.

    Args:
        is_default: whether the name comes from the bundle, so that the bundle is at fault.
    """
    try:
        shape = parse_tree(tree_name)
    except TreeError as error:
        if is_default:
            raise BundleError(
                f"default tree {format_value(tree_name)}: {error}", field=f"bundle {manifest.name}"
            ) from error
        raise
    max_children = max(map(len, shape.children)) if isinstance(shape, StaticTree) else 0
    if max_children > manifest.codebook_size:
        expected = f"at most codebook_size {manifest.codebook_size}"
        raise TreeError(field="tree", found=f"a node with {max_children} children", expected=expected)
