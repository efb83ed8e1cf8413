"""A chart as SVG, by matplotlib (extra `eval`), which is imported when the first one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import NamedTuple


class Point(NamedTuple):
    """A point with its name, and the intervals of both coordinates."""

    name: str
    x: float
    y: float
    x_interval: tuple[float, float]
    y_interval: tuple[float, float]


def chart_svg(points: Sequence[Point], x_label: str, y_label: str) -> str:
    """An `<svg>` element of 800 x 500 pixels, each point in a colour of its own."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # text as text, as it is, and the same bytes every time
    with rc_context({"svg.fonttype": "none", "text.parse_math": False, "svg.hashsalt": "lantern-rt"}):
        figure = Figure(figsize=(8, 5), layout="constrained")  # inches
        axes = figure.subplots()
        for i, point in enumerate(points):
            colour = f"C{i}"
            axes.plot(point.x, point.y, color=colour, marker="o", label=point.name)
            axes.plot(point.x_interval, (point.y, point.y), (point.x, point.x), point.y_interval, color=colour, lw=1)
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)  # beside the frame
        buffer = BytesIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue().decode()
    return text[text.index("<svg") :]
