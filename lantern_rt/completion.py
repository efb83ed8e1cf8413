"""Method strings, their completion from a bundle's defaults, and the check that the bundle supports the method."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from pydantic import ValidationError

from .bundle.manifest import Manifest, explain_unsupported_method
from .errors import BundleError, RequestError, TreeError
from .hints import suggest_name
from .inputs import check_int, describe_validation_error, format_value
from .methods import (
    METHODS,
    METHODS_BY_PARAMETER,
    Autoregressive,
    FrozenModel,
    GroupDecoding,
    MethodConfig,
    RelaxedMethod,
    TreeMethod,
)
from .runtime.tree import StaticTreeShape
from .runtime.tree_names import parse_tree

METHOD_LIMIT = 1 << 14  # maximum number of characters of a method string; a tree may take 10,000
C = TypeVar("C", bound=FrozenModel)


def resolve_method(manifest: Manifest, method: Any) -> MethodConfig:
    """Complete a method string from the bundle's defaults, and check that the bundle supports the method.

    A method object already has all parameters.
    """
    with _name_method(method):
        completed = _fill_in_method_defaults(manifest, method)
        if problem := explain_unsupported_method(manifest, completed):
            *others, last = list_supported_methods(manifest, METHODS)
            remedy = f"use method {', '.join(others)} or {last}"
            raise RequestError(f"bundle {manifest.name} {problem}", field=f"method {completed.method}", remedy=remedy)
        if isinstance(completed, TreeMethod):
            # If a method string names no tree, the bundle's default is used, and the bundle is at fault.
            _check_draft_tree(manifest, completed.tree, is_default="tree=" not in str(method))
        return completed


def parse_method_config(method: str) -> MethodConfig:
    """Parse and check a method string without a bundle; missing parameters get the defaults of the method."""
    name, parameters = parse_method(method)
    kind = METHODS[name]
    fields = kind(method=name).parameters() | parameters
    if issubclass(kind, RelaxedMethod) and fields.keys() & {"delta", "lambda"}:
        fields.setdefault("neighbors", 1)  # a bound requires neighbours, whose default number only a bundle knows
    with _name_method(method):
        completed = validate_model(kind, fields)
        if isinstance(completed, TreeMethod):
            parse_tree(completed.tree)  # raises an error if the tree does not exist
    return completed


def list_supported_methods(manifest: Manifest, methods: Iterable[str]) -> list[str]:
    """Return the method strings in `methods` that a bundle supports."""
    return [
        method
        for method in methods
        if explain_unsupported_method(manifest, _fill_in_method_defaults(manifest, method)) is None
    ]


def parse_method(text: Any) -> tuple[str, dict[str, Any]]:
    """Parse a method string, `NAME` or `NAME:PARAMETER=VALUE:...`, without checking the values."""
    name, *parts = [text]
    if isinstance(text, str):
        if len(text) > METHOD_LIMIT:
            raise RequestError(field="method", found=f"{len(text):,} characters", expected=f"at most {METHOD_LIMIT:,}")
        name, *parts = text.split(":")
    *others, last = METHODS
    if name not in (*others, last):
        raise RequestError(field="method", found=format_value(name), expected=f"{', '.join(others)} or {last}")
    parameters: dict[str, Any] = {}
    for part in parts:
        parameter, _, value = part.partition("=")
        if parameter not in METHODS_BY_PARAMETER or not value:
            known = [key for key, methods in METHODS_BY_PARAMETER.items() if name in methods] or [*METHODS_BY_PARAMETER]
            hint = suggest_name(parameter, known)
            raise RequestError(
                field="method",
                found=f"{part!r} in {text!r}",
                expected=f"PARAMETER=VALUE, of {', '.join(known)}",
                remedy=hint,
            )
        if name not in METHODS_BY_PARAMETER[parameter]:
            remedy = f"omit {parameter}, or use method {' or '.join(METHODS_BY_PARAMETER[parameter])}"
            raise RequestError(f"method {name} does not take it", field=parameter, remedy=remedy)
        parameters[parameter] = _parse_value(value)
    return name, parameters


def _parse_value(text: str) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def validate_model(model_class: type[C], fields: Mapping[str, Any]) -> C:
    """Create a pydantic object, or raise RequestError with the name of the first invalid field."""
    try:
        return model_class.model_validate(fields)
    except ValidationError as error:
        raise RequestError(**describe_validation_error(error)) from error


def _fill_in_method_defaults(manifest: Manifest, method: Any) -> MethodConfig:
    if isinstance(method, MethodConfig):
        name = method.method
        if METHODS.get(name) is not type(method):
            problem = f"{type(method).__name__} is not registered"
            raise RequestError(problem, field="method", remedy="call lantern_rt.register_method with the class")
        parameters = method.parameters()
        fields = method.model_dump()
    else:
        name, parameters = parse_method(method)
        fields = _find_default_parameters(manifest, name) | parameters
    kind = METHODS[name]
    if kind is Autoregressive and manifest.order is not None:
        return GroupDecoding()  # the model of this bundle generates groups of cells
    if issubclass(kind, RelaxedMethod) and (isinstance(method, str) or "neighbors" in parameters):
        fields |= _complete_relaxed_parameters(manifest, name, parameters)
    if issubclass(kind, TreeMethod) and fields.get("drafter") is None and manifest.heads is not None:
        fields["drafter"] = "heads"
    return validate_model(kind, fields)


@contextmanager
def _name_method(method: Any) -> Iterator[None]:
    """Add the method string to an error about a parameter, whose name alone is no option."""
    try:
        yield
    except RequestError as error:
        if error.remedy or error.field not in METHODS_BY_PARAMETER:
            raise
        remedy = f"correct method {format_value(str(method))}"
        raise type(error)(error.problem, error.field, error.found, error.expected, remedy) from error


def _find_default_parameters(manifest: Manifest, method_name: str) -> dict[str, Any]:
    """Return the bundle's default parameters of a method or, if the bundle has none, the method's defaults."""
    default = next((method for method in manifest.decoding.methods if method.method == method_name), None)
    return (default or METHODS[method_name](method=method_name)).parameters()


def _complete_relaxed_parameters(manifest: Manifest, method_name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of relaxed acceptance: neighbors, bound and residual; all None if the method is exact."""
    bounds = [bound for bound in ("delta", "lambda") if method_name in METHODS_BY_PARAMETER[bound]]
    # `lantern` and `lantern++` have one bound each. `sjd` has two, and is exact unless a request names a bound.
    default_bound = bounds[0] if len(bounds) == 1 else None
    bound = next((bound for bound in bounds if bound in parameters), default_bound)
    if bound is None:
        if unused := [parameter for parameter in ("neighbors", "residual") if parameter in parameters]:
            problem = f"method {method_name} is exact without a bound"
            raise RequestError(problem, field=unused[0], remedy="also give delta or lambda")
        return dict.fromkeys([*bounds, "neighbors", "residual"])
    defaults = _find_default_parameters(manifest, "lantern" if bound == "delta" else "lantern++")
    limit = manifest.neighbors or 1_000_000  # without a neighbour table, `resolve_method` rejects the method later
    default = min(defaults.get("neighbors", 0), limit)
    try:
        neighbors = check_int("neighbors", parameters.get("neighbors"), default, 1, limit)
    except RequestError as error:
        error.remedy = f"the bundle's table has {limit} neighbours of each code"
        raise
    return {"residual": "aggregated", bound: defaults.get(bound), **parameters, "neighbors": neighbors}


def _check_draft_tree(manifest: Manifest, tree_name: str, is_default: bool) -> None:
    """Raise an error if a draft tree does not exist, or has more children per node than the codebook has codes.

    If the tree is the bundle's default, the error names the bundle instead of the request.
    """
    try:
        shape = parse_tree(tree_name)
    except TreeError as error:
        if is_default:
            raise BundleError(
                f"default tree {format_value(tree_name)}: {error}", field=f"bundle {manifest.name}"
            ) from error
        raise
    # Siblings are different tokens, so a node cannot have more children than the codebook has entries.
    max_children = max(map(len, shape.children)) if isinstance(shape, StaticTreeShape) else 0
    if max_children > manifest.codebook_size:
        expected = f"at most codebook_size {manifest.codebook_size}"
        raise TreeError(field="tree", found=f"a node with {max_children} children", expected=expected)
