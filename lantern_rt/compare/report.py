"""An evaluation as lines of text, and as one HTML page that needs nothing else: tables, a chart, paired images."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from io import BytesIO
from typing import Any, NamedTuple

from PIL.Image import Image

from ..output.charts import Chart, Line, chart_svg
from ..output.tables import html_page, html_table, text_table

GRID_IMAGES = 24  # rows of images
_WIDEST = 256  # pixels of an image in the page


class Column(NamedTuple):
    """How a figure is shown. better: what is."""

    heading: str
    decimals: int
    better: str


DISTANCE = "less is better"
COLUMNS = {
    "tokens_per_forward_pass": Column("tokens per forward pass", 2, "more is faster"),
    "tvd": Column("TVD per token", 4, "0 is exact"),
    "same_tokens": Column("share of tokens as in ar's image", 3, "1: the same image"),
    "same_start": Column("share of the image before another token", 3, "1: the same image"),
    "excess_nll": Column("excess NLL, nats per token", 4, "as ar's"),
    "nll": Column("NLL, nats per token", 3, "as ar's"),
    "nll_ratio": Column("NLL against ar", 4, "as ar's"),
    "agreement": Column("prompt agreement", 4, "more is better"),
    "distance_to_exact": Column("distance to ar's image of the seed", 3, "0: the same image, 1: another seed's"),
    "frechet": Column("Frechet distance", 4, DISTANCE),
    "kernel": Column("kernel distance", 3, DISTANCE),
    "precision": Column("precision", 3, "as ar's"),
    "recall": Column("recall", 3, "as ar's"),
    "diversity": Column("diversity", 3, "as ar's"),
}
AGAINST_AR = ("same_tokens", "same_start", "nll_ratio", "distance_to_exact")  # need no difference beside them


def text_report(found: Mapping[str, Any]) -> str:
    """Figures as lines of text: value and interval of every method, and its difference to ar."""
    lines = []
    for name, column in _columns(found).items():
        rows = [(one["method"], *_shown(one, name)) for one in found["methods"]]
        lines += [f"{column.heading} ({column.better})", text_table(rows)]
    return "\n".join([*lines, *(f"note: {note}" for note in found["notes"])])


def _columns(found: Mapping[str, Any]) -> dict[str, Column]:
    return {name: column for name, column in COLUMNS.items() if name in found["methods"][0]["figures"]}


def _shown(method: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Value and difference to ar, the latter where it says something, with intervals."""
    figure, decimals = method["figures"][name], COLUMNS[name].decimals
    value, difference = (
        "{} ({} .. {})".format(*(f"{one[key]:{sign}.{decimals}f}" for key in ("value", "low", "high")))
        for one, sign in ((figure, ""), (figure["difference_to_ar"], "+"))
    )
    return value, "" if method["method"] == "ar" or name in AGAINST_AR else f"against ar {difference}"


def html_report(
    found: Mapping[str, Any], images: Mapping[str, list[Image]], facts: Mapping[str, str], title: str
) -> str:
    """The page. images: as `evaluate` gives them. facts: lines about bundle and host, by name."""
    columns, methods = _columns(found), found["methods"]
    settings, figures = [], []
    for one in methods:
        chosen = "" if one["choice"] is None else f"{one['choice']}: "
        values = ", ".join(f"{name} {value}" for name, value in one["settings"].items())
        settings.append((escape(one["method"]), escape(chosen + values)))
        cells = ["{}<small>{}</small>".format(*_shown(one, name)) for name in columns]
        for i, (name, column) in enumerate(columns.items()):
            if column.better == DISTANCE and one["figures"][name]["above_ar_interval"]:
                cells[i] = f'<span class="far">{cells[i]}</span>'
        figures.append((escape(one["method"]), *cells))
    headings = [f"{column.heading}<small>{column.better}</small>" for column in columns.values()]
    parts = [
        html_table([(escape(name), escape(text)) for name, text in facts.items()]),
        "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in found["notes"]) + "</ul>" if found["notes"] else "",
        f"<h2>Figures</h2><p>{escape(_meaning(found))}</p>{html_table(figures, ['method', *headings])}",
        f"<h2>Quality against tokens per forward pass</h2>{_chart(methods)}",
        f"<h2>Settings</h2>{html_table(settings)}<h2>Images</h2>{_grid(found, images)}",
    ]
    return html_page(title, "".join(parts))


def _meaning(found: Mapping[str, Any]) -> str:
    words = (
        f"{len(found['prompts'])} prompts, {found['seeds_per_prompt']} seeds each, {found['images_per_method']} images "
        "a method. Beside every figure stands its 95 % bootstrap interval, under it the difference to ar: paired, the "
        "same prompts resampled together. Exact methods draw ar's images, but for rounding. "
    )
    if agreement := found["agreement"]:
        words += f"Prompt agreement is what {agreement['name']} says of an image and its prompt. "
    if features := found["features"]:
        words += (
            f"Sets of images are compared by {features['name']} ({features['num_features']} numbers) with "
            "images of ar that have other seeds, so ar's own distance is the floor. Red: above ar's interval."
        )
    return words


def _chart(methods: list[dict[str, Any]]) -> str:
    """NLL difference to ar against tokens per forward pass, one point per method, with intervals, as SVG."""
    lines = []
    for one in methods:
        label, x, y = (
            one["method"],
            one["figures"]["tokens_per_forward_pass"],
            one["figures"]["nll"]["difference_to_ar"],
        )
        lines.append(Line(label, [(x["value"], y["value"])], [label], [(x["low"], x["high"], y["low"], y["high"])]))
    return chart_svg([Chart("", "tokens per forward pass", "NLL difference to ar, nats per token (0: as ar)", lines)])


def _grid(found: Mapping[str, Any], images: Mapping[str, list[Image]]) -> str:
    """Prompts down, methods across, the same seed in a row; the reference last."""
    count, rows = found["images_per_method"], []
    for i in range(0, count, max(1, count // GRID_IMAGES))[:GRID_IMAGES]:
        prompt = found["prompts"][i // found["seeds_per_prompt"]]
        embedded = (_embedded(drawn[i]) for drawn in images.values())
        rows.append((f"{escape(prompt)}<br>seed {found['first_seed'] + i}", *embedded))
    return html_table(rows, [escape(label) for label in ("prompt", *images)])


def _embedded(image: Image) -> str:
    """An image element that holds its file."""
    small = image.copy()
    small.thumbnail((_WIDEST, _WIDEST))
    buffer = BytesIO()
    small.save(buffer, "JPEG", quality=88)
    return f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
