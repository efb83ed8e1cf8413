"""Charts as PNG or SVG, by matplotlib (extra `plot`), which is imported when the first chart is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKED = 12  # points of a line that are marked; more are a curve


class Line(NamedTuple):
    """Points `(x, y)` joined in the order given. names: written beside the points. bars: their intervals, `(x low, x
    high, y low, y high)`. Both one for each point, or none."""

    label: str
    points: Sequence[tuple[float, float]]
    names: Sequence[str] = ()
    bars: Sequence[tuple[float, float, float, float]] = ()


class Chart(NamedTuple):
    """Lines over common axes, the vertical one from 0 where nothing is below. log2: of the horizontal one."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log2: bool = False


def chart_png(charts: Sequence[Chart]) -> bytes:
    """A PNG of charts side by side, 800 x 500 pixels each."""
    return _render(charts, "png")


def chart_svg(charts: Sequence[Chart]) -> str:
    """An `<svg>` element of charts side by side."""
    text = _render(charts, "svg").decode()
    return text[text.index("<svg") :]


def _render(charts: Sequence[Chart], kind: str) -> bytes:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # text as text, as it is, and the same bytes every time
    with rc_context({"svg.fonttype": "none", "text.parse_math": False, "svg.hashsalt": "lantern-rt"}):
        figure = Figure(figsize=(8 * len(charts), 5), layout="constrained")  # inches
        for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
            _draw(axes, chart)
        buffer = BytesIO()
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type") if kind == "svg" else ("Software",))
        figure.savefig(buffer, format=kind, dpi=100, metadata=metadata)
    return buffer.getvalue()


def _draw(axes: Axes, chart: Chart) -> None:
    if chart.log2:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    for i, (label, points, names, bars) in enumerate(chart.lines):
        colour, marker = f"C{i}", "o" if len(points) <= _MARKED else None
        axes.plot([x for x, _ in points], [y for _, y in points], color=colour, marker=marker, label=label)
        for point, name in zip(points, names, strict=False):
            axes.annotate(name, point, (6, 4), textcoords="offset points", color=colour, fontsize="small")
        for (x, y), (left, right, low, high) in zip(points, bars, strict=False):
            axes.plot([left, right], [y, y], [x, x], [low, high], color=colour, linewidth=1)
    if axes.dataLim.y0 >= 0:
        axes.set_ylim(bottom=0)
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    axes.grid(alpha=0.3)
    if chart.lines:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)  # beside the frame
