"""An evaluation as one HTML page that needs nothing else: tables, a chart, and paired pictures.

Does not know how figures come about.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from io import BytesIO

from PIL.Image import Image

from .evaluate import Evaluation
from .statistics import Estimate, Figure

GRID_PICTURES = 24  # rows of pictures
_WIDEST = 256  # pixels of a picture in the page
_COLOURS = ("#444444", "#1f77b4", "#d95f02", "#2a9d4a", "#b0338f", "#8c6d1f", "#17a2b8", "#c62828")
# name -> heading, decimals, what is better
COLUMNS: dict[str, tuple[str, int, str]] = {
    "codes_per_pass": ("codes a target pass", 2, "more is faster"),
    "tvd": ("TVD a code", 4, "0 is exact"),
    "surprise": ("NLL above entropy, nats a code", 4, "as ar's"),
    "nll": ("NLL, nats a code", 3, "as ar's"),
    "nll_ratio": ("NLL against ar", 4, "as ar's"),
    "agreement": ("prompt agreement", 4, "more is better"),
    "frechet": ("Frechet distance", 4, "less is better"),
    "kernel": ("kernel distance", 3, "less is better"),
    "precision": ("precision", 3, "as ar's"),
    "recall": ("recall", 3, "as ar's"),
    "diversity": ("diversity", 3, "as ar's"),
}
_DISTANCES = ("frechet", "kernel")
_STYLE = (
    "body{font-family:sans-serif;margin:2em;color:#222}table{border-collapse:collapse;margin:.5em 0 1.5em}"
    "td,th{text-align:left;padding:.25em 1em .25em 0;vertical-align:top;border-bottom:1px solid #ddd}"
    "small{color:#666;display:block}img{display:block;width:128px}td.far{color:#b00}.grid td{padding:.2em}"
)


def text_table(found: Evaluation) -> str:
    """Figures as lines of text: value and interval of every method, and its difference to ar."""
    lines = []
    width = max(len(one.way.label) for one in found.drawn)
    for name, (heading, decimals, better) in COLUMNS.items():
        if name not in found.figures:
            continue
        figure = found.figures[name]
        lines.append(f"{heading} ({better})")
        for i, one in enumerate(found.drawn):
            line = f"  {one.way.label:{width}}  {_with_interval(figure.values[i], decimals)}"
            if i and name != "nll_ratio":
                line += f"   against ar {_with_interval(figure.differences[i], decimals, '+')}"
            lines.append(line)
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def html_report(found: Evaluation, facts: Mapping[str, str], title: str) -> str:
    """The page. facts: lines about bundle and host, by name."""
    parts = [f"<h1>{html.escape(title)}</h1>", _rows([(name, value) for name, value in facts.items()])]
    if found.notes:
        parts.append("<ul>" + "".join(f"<li>{html.escape(note)}</li>" for note in found.notes) + "</ul>")
    parts += ["<h2>Figures</h2>", _meaning(found), _figures(found, differences=False)]
    parts += ["<h2>Differences to ar</h2><p>Paired: the same prompts, resampled together.</p>"]
    parts += [_figures(found, differences=True), "<h2>Quality against codes a pass</h2>", chart(found)]
    parts += ["<h2>Settings</h2>", _settings(found), "<h2>Pictures</h2>", _grid(found)]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style>{''.join(parts)}</html>\n"
    )


def _meaning(found: Evaluation) -> str:
    subjects = found.subjects
    words = (
        f"{len(subjects.labels)} prompts, {subjects.seeds} seeds each, {subjects.pictures} pictures a method. Under "
        "every figure stands its 95 % bootstrap interval. "
    )
    if found.agreement is not None:
        words += f"Prompt agreement is what {found.agreement.name} says of a picture and its prompt. "
    if found.features is not None:
        words += (
            f"Sets of pictures are compared by {found.features.name} ({found.features.width} numbers) with pictures of "
            "ar that have other seeds, so ar's own distance is the floor. Red: above ar's interval."
        )
    return f"<p>{html.escape(words)}</p>"


def _figures(found: Evaluation, differences: bool) -> str:
    """One row per method."""
    names = [name for name in COLUMNS if name in found.figures and not (differences and name == "nll_ratio")]
    head = "".join(f"<th>{COLUMNS[name][0]}<small>{COLUMNS[name][2]}</small></th>" for name in names)
    lines = []
    for i, one in enumerate(found.drawn[1:] if differences else found.drawn, start=int(differences)):
        cells = [_cell(found.figures[name], name, i, differences) for name in names]
        lines.append(f"<tr><td>{html.escape(one.way.label)}</td>{''.join(cells)}</tr>")
    return f"<table><tr><th>method</th>{head}</tr>{''.join(lines)}</table>"


def _cell(figure: Figure, name: str, way: int, differences: bool) -> str:
    decimals = COLUMNS[name][1]
    one = (figure.differences if differences else figure.values)[way]
    sign = "+" if differences else ""
    mark = ' class="far"' if name in _DISTANCES and not differences and figure.above_first(way) else ""
    return (
        f"<td{mark}>{one.value:{sign}.{decimals}f}"
        f"<small>{one.low:{sign}.{decimals}f} .. {one.high:{sign}.{decimals}f}</small></td>"
    )


def _with_interval(one: Estimate, decimals: int, sign: str = "") -> str:
    value, low, high = (f"{number:{sign}.{decimals}f}" for number in (one.value, one.low, one.high))
    return f"{value} ({low} .. {high})"


def _settings(found: Evaluation) -> str:
    rows = []
    for one in found.drawn:
        text = ", ".join(f"{name} {value}" for name, value in one.settings.items())
        rows.append((one.way.label, text if one.choice is None else f"{one.choice}: {text}"))
    return _rows(rows)


def _rows(rows: Sequence[tuple[str, str]]) -> str:
    lines = (f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>" for name, text in rows)
    return f"<table>{''.join(lines)}</table>"


def _grid(found: Evaluation) -> str:
    """Prompts down, methods across, the same seed in a row; the reference last."""
    subjects = found.subjects
    heads = [one.way.label for one in found.drawn] + ["ar, other seed"]
    head = "<th>prompt</th>" + "".join(f"<th>{html.escape(label)}</th>" for label in heads)
    lines = []
    step = max(1, subjects.pictures // GRID_PICTURES)
    for i in range(0, subjects.pictures, step)[:GRID_PICTURES]:
        label = f"{html.escape(subjects.labels[i // subjects.seeds])}<br>seed {found.drawn[0].pictures[i].seed}"
        cells = [_picture(one.pictures[i].image) for one in found.drawn] + [_picture(found.reference[i])]
        lines.append(f"<tr><td>{label}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f'<table class="grid"><tr>{head}</tr>{"".join(lines)}</table>'


def _picture(image: Image) -> str:
    """An image element that holds its file."""
    small = image.copy()
    small.thumbnail((_WIDEST, _WIDEST))
    buffer = BytesIO()
    small.save(buffer, "JPEG", quality=88)
    return f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}">'


# ---------------------------------------------------------------- chart


def chart(found: Evaluation) -> str:
    """NLL difference to ar against codes a pass, one point per method, with intervals, as SVG."""
    across, up = found.figures["codes_per_pass"].values, found.figures["nll"].differences
    left, right, top, bottom = 80.0, 700.0, 20.0, 320.0
    low_x, high_x = _range([one.low for one in across], [one.high for one in across])
    low_y, high_y = _range([one.low for one in up], [one.high for one in up])

    def x(value: float) -> float:
        return round(left + (right - left) * (value - low_x) / (high_x - low_x), 1)

    def y(value: float) -> float:
        return round(bottom - (bottom - top) * (value - low_y) / (high_y - low_y), 1)

    def line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
        return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" {more}/>'

    parts = [line(left, bottom, right, bottom, "#888"), line(left, top, left, bottom, "#888")]
    parts.append(line(left, y(0), right, y(0), "#bbb", 'stroke-dasharray="4 4"'))
    for part in (0, 0.25, 0.5, 0.75, 1):
        at_x, at_y = low_x + part * (high_x - low_x), low_y + part * (high_y - low_y)
        parts.append(f'<text x="{x(at_x)}" y="{bottom + 18}" text-anchor="middle">{at_x:.2f}</text>')
        parts.append(f'<text x="{left - 8}" y="{y(at_y) + 4}" text-anchor="end">{at_y:+.3f}</text>')
    parts.append(f'<text x="{(left + right) / 2}" y="{bottom + 38}" text-anchor="middle">codes a target pass</text>')
    parts.append(f'<text x="{left}" y="{top - 6}">NLL difference to ar, nats a code (0: as ar)</text>')
    for i, one in enumerate(found.drawn):
        colour, point_x, point_y = _COLOURS[i % len(_COLOURS)], x(across[i].value), y(up[i].value)
        parts.append(line(point_x, y(up[i].low), point_x, y(up[i].high), colour))
        parts.append(line(x(across[i].low), point_y, x(across[i].high), point_y, colour))
        parts.append(f'<circle cx="{point_x}" cy="{point_y}" r="4" fill="{colour}"/>')
        label = html.escape(one.way.label)
        parts.append(f'<text x="{point_x + 7}" y="{point_y - 6}" fill="{colour}">{label}</text>')
    return f'<svg width="820" height="370" font-size="12" font-family="sans-serif">{"".join(parts)}</svg>'


def _range(lows: Sequence[float], highs: Sequence[float]) -> tuple[float, float]:
    """From the least to the most, with some air."""
    low, high = min(lows), max(highs)
    air = 0.05 * (high - low) or 0.05
    return low - air, high + air
