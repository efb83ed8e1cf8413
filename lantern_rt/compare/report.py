"""Reports of an evaluation: lines of text, and a self-contained HTML page with tables and paired images."""

from __future__ import annotations

import base64
import textwrap
from collections.abc import Mapping
from html import escape
from io import BytesIO
from typing import Any, NamedTuple

from PIL.Image import Image

from ..output.tables import format_html_page, format_html_table, format_text_table
from .presets import LIMITS

GRID_IMAGES = 24  # Maximum number of image rows.
_MAX_SIDE = 256  # Maximum width and height of an image in the page, in pixels.


class ReportColumn(NamedTuple):
    heading: str
    num_decimals: int
    hint: str


COLUMNS = {
    "tokens_per_forward_pass": ReportColumn("tokens per pass", 2, "more is faster"),
    "tvd": ReportColumn("TVD per token", 4, "0 is exact"),
    "same_tokens": ReportColumn("share of tokens as in ar's image", 3, "1: the same image"),
    "excess_nll": ReportColumn("excess NLL", 4, "nats per token, as ar's"),
    "agreement": ReportColumn("agreement", 4, "with prompts, more is better"),
    "frechet": ReportColumn("Frechet distance", 4, "less is better, ar's own is the floor"),
}
_ESSENTIAL = ("excess_nll", "agreement")


def format_text_report(report: Mapping[str, Any], show_frechet: bool = False) -> str:
    """Format a report as text: the speed of every method, and its deviation from plain decoding (`ar`)."""
    wanted = (*_ESSENTIAL, "frechet") if show_frechet else _ESSENTIAL
    columns = {name: column for name, column in _choose_columns(report).items() if name in wanted}
    rows = [("method", "tokens per pass", *(column.heading for column in columns.values()))]
    for method in report["methods"]:
        if method["figures"]:
            cells = [_format_text_cell(method["figures"][name], name) for name in columns]
        else:
            cells = ["exact: same images", *[""] * (len(columns) - 1)]
        rows.append((method["method"], f"{method['tokens_per_forward_pass']:.2f}", *cells))
    title = "differences to ar" + " (Frechet: to the reference)" * show_frechet
    lines = [f"{title}, +- half of the 95 % interval", format_text_table(rows)]
    limits = ", ".join(f"{limit.max_excess_nll} for {quality}" for quality, limit in LIMITS.items())
    lines.append(f"good: an interval of excess NLL within +- {limits}")
    return "\n".join([*lines, *(textwrap.fill(f"note: {note}", 80) for note in report["notes"])])


def _format_text_cell(estimate: Mapping[str, Any], metric_name: str) -> str:
    """Format a metric for the text report: its difference to `ar`, or its value for Frechet distances."""
    shown = estimate if metric_name == "frechet" else estimate["difference_to_ar"]
    half = (shown["high"] - shown["low"]) / 2
    return f"{shown['value']:{'' if metric_name == 'frechet' else '+'}.3f} +- {half:.3f}"


def _format_exact_cell(method_entry: Mapping[str, Any]) -> str:
    passes = {"value": method_entry["tokens_per_forward_pass"], **method_entry["tokens_per_forward_pass_interval"]}
    return f"exact: same images, {_format_interval(passes, '.2f')} tokens per pass"


def _choose_columns(report: Mapping[str, Any]) -> dict[str, ReportColumn]:
    return {name: column for name, column in COLUMNS.items() if name in report["methods"][0]["figures"]}


def _format_metric_cells(method_entry: Mapping[str, Any], metric_name: str) -> tuple[str, str]:
    """Return the text of a metric, and the text of its difference to `ar`, which may be empty."""
    estimate = method_entry["figures"][metric_name]
    num_decimals = COLUMNS[metric_name].num_decimals
    value = _format_interval(estimate, f".{num_decimals}f")
    difference = _format_interval(estimate["difference_to_ar"], f"+.{num_decimals}f")
    return value, "" if method_entry["method"] == "ar" or metric_name == "same_tokens" else f"against ar {difference}"


def _format_interval(estimate: Mapping[str, float], number_format: str) -> str:
    return (
        f"{estimate['value']:{number_format}} ({estimate['low']:{number_format}} .. {estimate['high']:{number_format}})"
    )


def format_html_report(
    report: Mapping[str, Any], images_by_method: Mapping[str, list[Image]], setup_facts: Mapping[str, str], title: str
) -> str:
    """Format a report as an HTML page with `setup_facts`: descriptions of bundle and host, by name."""
    columns = _choose_columns(report)
    figures: list[tuple[str, ...]] = []
    for method in report["methods"]:
        cells = [_format_exact_cell(method)]
        if method["figures"]:
            cells = ["{}<small>{}</small>".format(*_format_metric_cells(method, name)) for name in columns]
        figures.append((escape(method["method"]), *cells))
    headings = [f"{column.heading}<small>{column.hint}</small>" for column in columns.values()]
    notes = "".join(f"<li>{escape(note)}</li>" for note in report["notes"])
    parts = [
        format_html_table([(escape(name), escape(text)) for name, text in setup_facts.items()]),
        f"<p>{len(report['prompts'])} prompts, seeds for each: {report['seeds_per_prompt']}; "
        "with 95 % bootstrap intervals, differences to ar paired by prompt.</p>",
        format_html_table(figures, ["method", *headings]),
        f"<ul>{notes}</ul>{_format_image_grid(report, images_by_method)}",
    ]
    return format_html_page(title, "".join(parts))


def _format_image_grid(report: Mapping[str, Any], images_by_method: Mapping[str, list[Image]]) -> str:
    if not images_by_method:
        return ""
    count = report["images_per_method"]
    rows = []
    for i in range(0, count, max(1, count // GRID_IMAGES))[:GRID_IMAGES]:
        prompt = report["prompts"][i // report["seeds_per_prompt"]]
        embedded = (_format_image_tag(method_images[i]) for method_images in images_by_method.values())
        rows.append((f"{escape(prompt)}<br>seed {i}", *embedded))
    return format_html_table(rows, [escape(label) for label in ("prompt", *images_by_method)])


def _format_image_tag(image: Image) -> str:
    small = image.copy()
    small.thumbnail((_MAX_SIDE, _MAX_SIDE))
    buffer = BytesIO()
    small.save(buffer, "JPEG", quality=88)
    return f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
