"""An evaluation as lines of text, and as one HTML page that needs nothing else: tables, a chart, paired images."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from io import BytesIO
from typing import NamedTuple

from PIL.Image import Image

from ..output.charts import Chart, Line, chart_svg
from .evaluate import Evaluation
from .statistics import Figure

GRID_IMAGES = 24  # rows of images
_WIDEST = 256  # pixels of an image in the page


class Column(NamedTuple):
    """How a figure is shown. better: what is. has_difference: whether its difference to ar says something."""

    heading: str
    decimals: int
    better: str
    has_difference: bool = True
    is_distance: bool = False


COLUMNS = {
    "tokens_per_forward_pass": Column("tokens per forward pass", 2, "more is faster"),
    "tvd": Column("TVD per token", 4, "0 is exact"),
    "excess_nll": Column("excess NLL, nats per token", 4, "as ar's"),
    "nll": Column("NLL, nats per token", 3, "as ar's"),
    "nll_ratio": Column("NLL against ar", 4, "as ar's", has_difference=False),
    "agreement": Column("prompt agreement", 4, "more is better"),
    "frechet": Column("Frechet distance", 4, "less is better", is_distance=True),
    "kernel": Column("kernel distance", 3, "less is better", is_distance=True),
    "precision": Column("precision", 3, "as ar's"),
    "recall": Column("recall", 3, "as ar's"),
    "diversity": Column("diversity", 3, "as ar's"),
}
_STYLE = (
    "body{font-family:sans-serif;margin:2em;color:#222}table{border-collapse:collapse;margin:.5em 0 1.5em}"
    "td,th{text-align:left;padding:.25em 1em .25em 0;vertical-align:top;border-bottom:1px solid #ddd}"
    "small{color:#666;display:block}img{display:block;width:128px}td.far{color:#b00}.grid td{padding:.2em}"
)


def text_table(found: Evaluation) -> str:
    """Figures as lines of text: value and interval of every method, and its difference to ar."""
    lines = []
    width = max(len(one.label) for one in found.drawn)
    for column, figure in _columns(found):
        lines.append(f"{column.heading} ({column.better})")
        for i, one in enumerate(found.drawn):
            value, difference = _shown(column, figure, i)
            lines.append(f"  {one.label:{width}}  {value}   {difference}".rstrip())
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def _columns(found: Evaluation) -> list[tuple[Column, Figure]]:
    return [(column, found.figures[name]) for name, column in COLUMNS.items() if name in found.figures]


def _shown(column: Column, figure: Figure, i: int) -> tuple[str, str]:
    """Value and difference to ar, the latter where it says something, with intervals."""
    value, difference = (
        "{} ({} .. {})".format(*(f"{number:{sign}.{column.decimals}f}" for number in one))
        for one, sign in ((figure.values[i], ""), (figure.differences[i], "+"))
    )
    return value, f"against ar {difference}" if i and column.has_difference else ""


def html_report(found: Evaluation, facts: Mapping[str, str], title: str) -> str:
    """The page. facts: lines about bundle and host, by name."""
    settings = []
    for one in found.drawn:
        used = one.runs[-1].settings
        text = ", ".join(f"{name} {value}" for name, value in used.as_dict().items())
        settings.append((one.label, text if used.choice is None else f"{used.choice}: {text}"))
    parts = [
        f"<h1>{escape(title)}</h1>{_rows(facts.items())}",
        "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in found.notes) + "</ul>" if found.notes else "",
        f"<h2>Figures</h2><p>{escape(_meaning(found))}</p>{_figures(found)}",
        f"<h2>Quality against tokens per forward pass</h2>{_chart(found)}",
        f"<h2>Settings</h2>{_rows(settings)}<h2>Images</h2>{_grid(found)}",
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style>{''.join(parts)}</html>\n"
    )


def _meaning(found: Evaluation) -> str:
    images = found.images
    words = (
        f"{len(images.subjects.items)} prompts, {images.seeds} seeds each, {images.count} images a method. Beside "
        "every figure stands its 95 % bootstrap interval, under it the difference to ar: paired, the same prompts "
        "resampled together. "
    )
    if found.agreement is not None:
        words += f"Prompt agreement is what {found.agreement['name']} says of an image and its prompt. "
    if found.features is not None:
        words += (
            f"Sets of images are compared by {found.features['name']} ({found.features['num_features']} numbers) with "
            "images of ar that have other seeds, so ar's own distance is the floor. Red: above ar's interval."
        )
    return words


def _figures(found: Evaluation) -> str:
    """A row for every method."""
    heads = (f"<th>{column.heading}<small>{column.better}</small></th>" for column, _ in _columns(found))
    lines = [f"<th>method</th>{''.join(heads)}"]
    for i, one in enumerate(found.drawn):
        cells = [f"<td>{escape(one.label)}</td>"]
        for column, figure in _columns(found):
            far = ' class="far"' if column.is_distance and figure.above_first(i) else ""
            cells.append("<td{}>{}<small>{}</small></td>".format(far, *_shown(column, figure, i)))
        lines.append("".join(cells))
    return _table(lines)


def _chart(found: Evaluation) -> str:
    """NLL difference to ar against tokens per forward pass, one point per method, with intervals, as SVG."""
    across, up = found.figures["tokens_per_forward_pass"].values, found.figures["nll"].differences
    lines = [
        Line(one.label, [(x.value, y.value)], [one.label], [(x.low, x.high, y.low, y.high)])
        for one, x, y in zip(found.drawn, across, up, strict=True)
    ]
    return chart_svg([Chart("", "tokens per forward pass", "NLL difference to ar, nats per token (0: as ar)", lines)])


def _rows(rows: Iterable[tuple[str, str]]) -> str:
    return _table([f"<td>{escape(name)}</td><td>{escape(text)}</td>" for name, text in rows])


def _table(rows: Sequence[str], kind: str = "") -> str:
    return f"<table{kind}>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _grid(found: Evaluation) -> str:
    """Prompts down, methods across, the same seed in a row; the reference last."""
    drawn, labels = found.images, found.images.subjects.labels
    sets = {one.label: one.images for one in found.drawn} | {"ar, other seed": found.reference}
    lines = ["".join(f"<th>{escape(label)}</th>" for label in ("prompt", *sets))]
    for i in range(0, drawn.count, max(1, drawn.count // GRID_IMAGES))[:GRID_IMAGES]:
        label = f"{escape(labels[i // drawn.seeds])}<br>seed {drawn.first_seed + i}"
        lines.append(f"<td>{label}</td>" + "".join(f"<td>{_embedded(images[i])}</td>" for images in sets.values()))
    return _table(lines, ' class="grid"')


def _embedded(image: Image) -> str:
    """An image element that holds its file."""
    small = image.copy()
    small.thumbnail((_WIDEST, _WIDEST))
    buffer = BytesIO()
    small.save(buffer, "JPEG", quality=88)
    return f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
