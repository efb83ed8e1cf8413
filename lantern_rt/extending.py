"""Methods, inputs and sampling settings of users, which work in this process as the built-in ones do."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, get_args

from .errors import RequestError
from .inputs import format_value
from .methods import (
    BUILT_IN_METHODS,
    METHODS,
    METHODS_BY_PARAMETER,
    SAMPLING,
    MethodConfig,
    Sampling,
    add_method,
    add_sampling_setting,
)
from .options import Options
from .runtime.drafters import DRAFTERS, DrafterFactory
from .runtime.filters import OWN_FILTERS, Filter
from .subjects.base import Part
from .subjects.table import PARAMETER_NAMES, PARTS, WORDS

# Modules that take the options of commands and the fields of HTTP bodies from the tables when they are imported.
BUILT_FROM_TABLES = {f"{__package__}.cli.options", f"{__package__}.serve.protocol"}


def register_method(method_class: type[MethodConfig], factory: DrafterFactory) -> None:
    """Add a method of your own, which then works in this process as the built-in methods do.

    Python takes objects of the class; Python, `lantern-rt`, HTTP and recipes take its method string. If the same class
    is defined and registered again, as by a cell of a notebook, it replaces the earlier one.

    Args:
        method_class: subclass of `lantern_rt.methods.MethodConfig` with a field `method: Literal["NAME"] = "NAME"`. All
            further fields are parameters: numbers or texts, with defaults.
        factory: functions that make the drafter and count the nodes of its drafts.

    Raises:
        RequestError: an argument has another type, or a name is missing or in use.
    """
    _check_method_class(method_class)
    if not isinstance(factory, DrafterFactory):
        raise RequestError(field="factory", found=format_value(factory), expected="a DrafterFactory")
    name = method_class.model_fields["method"].default
    known = METHODS.get(name, method_class)
    is_same = (known.__module__, known.__qualname__) == (method_class.__module__, method_class.__qualname__)
    if known in BUILT_IN_METHODS or not is_same:
        problem = f"is the name of {known.__module__}.{known.__qualname__}"
        raise RequestError(problem, field=f"method {name}", remedy="give the method another name")
    DRAFTERS.pop(known, None)
    DRAFTERS[method_class] = factory
    add_method(method_class)


def register_input(part_class: type[Part]) -> None:
    """Add an input of your own, which takes part in a request beside the prompt as `negative_prompt` does.

    Python, HTTP, `lantern-rt run` and recipes of this process then take it by its name. It replaces an earlier input of
    your own with this name.

    Args:
        part_class: subclass of `lantern_rt.subjects.base.Part` with `words`, each of which has one name everywhere.

    Raises:
        RequestError: there are no `words`, a name is in use, or a command or server of this process came before.
    """
    if not (isinstance(part_class, type) and issubclass(part_class, Part) and hasattr(part_class, "words")):
        raise RequestError(field="part_class", found=format_value(part_class), expected="a subclass of Part with words")
    own_words = {words.parameter: words for words in part_class.words}
    for name, words in own_words.items():
        if {words.field, words.option.name, words.chunk or name} != {name}:
            raise RequestError("needs the same name in Python, HTTP, options and recipes", field=name)
        _check_new_option(name, part_class.__name__, SAMPLING)
    for part in [*PARTS]:
        if any(words.parameter in own_words for words in part.words):
            PARTS.remove(part)
            for words in part.words:
                del WORDS[words.parameter]
    PARTS.append(part_class)
    WORDS.update(own_words)


def register_sampling_setting(name: str, annotation: Any, make_filter: Callable[[Any], Filter]) -> None:
    """Add a sampling setting of your own: a filter, which excludes tokens after the built-in filters.

    Python, HTTP, command lines and recipes of this process then take it by its name. Requests that set it are sampled
    on the host. It replaces an earlier setting of your own with this name.

    Args:
        annotation: type of the values, their limits and the help text, for pydantic, such as
            `Annotated[float | None, Field(gt=0, description="Smallest probability of tokens.")]`.
        make_filter: function that makes a filter, as in `runtime/filters.py`, from a value.

    Raises:
        RequestError: the name is in use, or a command or server of this process came before.
    """
    _check_new_option(name, "name", WORDS)
    OWN_FILTERS[name] = make_filter
    add_sampling_setting(name, annotation)


def _check_method_class(method_class: Any) -> None:
    if not (isinstance(method_class, type) and issubclass(method_class, MethodConfig)):
        expected = "a subclass of MethodConfig"
        raise RequestError(field="method_class", found=format_value(method_class), expected=expected)
    for field, info in method_class.model_fields.items():
        place = f"{method_class.__name__}.{field}"
        if field == "method":
            names = get_args(info.annotation)
            if names != (info.default,) or re.fullmatch(r"[^\s:=]+", names[0]) is None:
                raise RequestError(field=place, expected='Literal["NAME"] = "NAME", a name without spaces, : and =')
        elif info.is_required():
            raise RequestError("has no default", field=place, remedy="give the parameter a default")
        elif (info.alias or field) in ("size", *Sampling.model_fields, *SAMPLING):
            raise RequestError("is the name of another setting", field=place, remedy="give it another name")


def _check_new_option(name: str, place: str, names_of_users: Iterable[str]) -> None:
    """Check the name of an input or a setting, and that no module has taken its options from the tables yet."""
    built_in = {"prompts", *Options.__annotations__, *Sampling.model_fields, *chain(*PARAMETER_NAMES.values())}
    if not name.isidentifier() or name in {*built_in, *METHODS_BY_PARAMETER, *names_of_users}:
        raise RequestError(field=place, found=format_value(name), expected="a name that no other parameter has")
    if sys.modules.keys() & BUILT_FROM_TABLES:
        remedy = "register it before the first command or server of the process"
        raise RequestError("is registered too late", field=name, remedy=remedy)
