"""Tables as text, and in self-contained HTML pages."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from ..errors import escape_unprintable

_STYLE = (
    "body{font-family:sans-serif;margin:2em;color:#222}table{border-collapse:collapse;margin:.5em 0 1.5em}"
    "td,th{text-align:left;padding:.25em 1em .25em 0;vertical-align:top;border-bottom:1px solid #ddd}"
    "small{color:#666;display:block}img{display:block;width:128px}"
)


def format_text_table(rows: Sequence[Sequence[str]]) -> str:
    """Format a table as indented lines with aligned columns. Control characters are escaped."""
    rows = [[escape_unprintable(" ".join(cell.splitlines())) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(["", *map(str.ljust, row, widths)]).rstrip() for row in rows)


def format_csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as CSV, of which nested fields become columns such as `share.target`."""
    flat = [dict(_flatten_row(row)) for row in rows]
    file = io.StringIO()
    writer = csv.DictWriter(file, list(dict.fromkeys(name for row in flat for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return file.getvalue()


def _flatten_row(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every nested field, without lists."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flatten_row(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            yield prefix + name, value


def format_html_table(rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Return an HTML table. The cells are HTML, which is not escaped."""
    lines = ["".join(f"<th>{cell}</th>" for cell in header)] if header else []
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def format_html_page(title: str, body: str) -> str:
    """Return an HTML page with a heading. `title` is text, which is escaped; `body` is HTML, which is not escaped."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en">{head}<h1>{escape(title)}</h1>{body}</html>\n'
