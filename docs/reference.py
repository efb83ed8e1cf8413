"""Writes the Python reference, made of the docstrings of the public names: `python docs/reference.py reference.md`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lantern_rt

HEAD = """# Python reference

Made of the docstrings. These names of `lantern_rt` are public, and the objects of
methods in `lantern_rt.methods`.
"""


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for name in sorted(lantern_rt.__all__, key=str.lower):
        value = getattr(lantern_rt, name)
        if name == "__version__":
            parts.append("## \\_\\_version\\_\\_\n\nThe version, as text.\n")
        elif inspect.isclass(value):
            parts.extend(_of_class(name, value))
        else:
            parts.append(f"## {name}\n\n{_signature(name, value)}{_text(value)}")
    return "\n".join(parts)


def _of_class(name: str, kind: type) -> Iterator[str]:
    """Yield a class with its fields, then the methods that it defines, in the order of its source."""
    base = f"An error, of kind `{kind.__bases__[0].__name__}`.\n\n" if issubclass(kind, Exception) else ""
    fields = "\n".join(f"    {field}: {_plain(note)}" for field, note in inspect.get_annotations(kind).items())
    yield f"## {name}\n\n{base}{_text(kind)}" + (f"\n{fields}\n" if fields else "")
    for attribute, value in vars(kind).items():
        function = value.__func__ if isinstance(value, classmethod) else value
        public = not attribute.startswith("_") or attribute == "__call__"
        if public and inspect.isfunction(function) and function.__doc__ and function.__qualname__.startswith(name):
            title = f"{name}.{attribute}"
            call = name.lower() if attribute == "__call__" else title
            yield f"### {title}\n\n{_signature(call, value)}{_text(function)}"


def _signature(title: str, value: Any) -> str:
    """Return the call, one parameter a line, as a block of code."""
    function = value.__func__ if isinstance(value, classmethod) else value
    signature = inspect.signature(function)
    lines: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in lines:
            lines.append("*")
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        lines.append(f"{stars}{parameter.name}: {_plain(parameter.annotation)}{default}")
    inside = "".join(f"        {line},\n" for line in lines)
    short = f"    {title}({', '.join(lines)})"
    end = f" -> {_plain(signature.return_annotation)}\n\n"
    return (short if len(short) <= 80 else f"    {title}(\n{inside}    )") + end


def _plain(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__forward_arg__", str(annotation))


def _text(value: Any) -> str:
    return f"{inspect.getdoc(value)}\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python docs/reference.py FILE.md")
    Path(sys.argv[1]).write_text(page(), "utf-8")
