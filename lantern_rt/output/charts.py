"""Line charts as pictures: round numbers on axes, marked points or curves, a legend, labels that keep apart.

Does not know what the numbers mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

from PIL import Image, ImageDraw, ImageFont

Point = tuple[float, float]
Box = tuple[float, float, float, float]
Colour = tuple[int, int, int]

WIDTH, HEIGHT = 800, 500
_SCALE = 3  # drawn this much larger, then made smaller, for smooth lines
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 12, 58, 58
_MARKED = 12  # points of a line that are marked; more are a curve
_PAPER, _INK, _GRID = (255, 255, 255), (40, 40, 46), (226, 226, 230)
_COLOURS: tuple[Colour, ...] = (
    (90, 90, 98),
    (31, 111, 180),
    (217, 95, 2),
    (27, 140, 90),
    (160, 60, 150),
    (190, 145, 20),
    (200, 45, 60),
    (80, 170, 200),
)


@dataclass(frozen=True)
class Line:
    """Points joined by a line, in the order given; names, one for each point or none, are written beside them."""

    label: str
    points: Sequence[Point]
    names: Sequence[str] = ()


@dataclass(frozen=True)
class Chart:
    """Lines over common axes; the vertical axis begins at 0. powers: the horizontal axis goes by powers of two."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    powers: bool = False


def chart_png(charts: Sequence[Chart]) -> bytes:
    """A PNG of charts side by side."""
    sheet = Image.new("RGB", (WIDTH * len(charts), HEIGHT), _PAPER)
    for i, chart in enumerate(charts):
        sheet.paste(draw_chart(chart), (i * WIDTH, 0))
    buffer = BytesIO()
    sheet.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def draw_chart(chart: Chart) -> Image.Image:
    """The picture of a chart, `WIDTH` by `HEIGHT` pixels."""
    return _Drawing(chart).picture()


def round_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from `low` to `high`, at most about `most` of them."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


class _Drawing:
    """One chart being drawn."""

    def __init__(self, chart: Chart) -> None:
        self.chart = chart
        xs = [self._x(x) for line in chart.lines for x, _ in line.points]
        ys = [y for line in chart.lines for _, y in line.points]
        low, high = min(xs, default=0.0), max(xs, default=1.0)
        low = 0.0 if not chart.powers and 0 <= low < 0.6 * high else low
        room = (high - low) * 0.05 or 0.05
        self.low, self.high = (low if low == 0 else low - room), high + room
        self.top = (max(ys, default=0.0) or 1.0) * 1.1
        self.image = Image.new("RGB", (WIDTH * _SCALE, HEIGHT * _SCALE), _PAPER)
        self.draw = ImageDraw.Draw(self.image)
        self.taken: list[Box] = []
        labels = [self._width(line.label, 12) for line in chart.lines]
        self.right = WIDTH - _RIGHT - 40 - max(labels, default=0.0)  # the legend is beside the frame

    def picture(self) -> Image.Image:
        self._axes()
        self._legend()
        for line, colour in zip(self.chart.lines, _colours(len(self.chart.lines)), strict=True):
            places = [self._place(point) for point in line.points]
            if len(places) > 1:
                self.draw.line([c * _SCALE for place in places for c in place], colour, 2 * _SCALE, joint="curve")
            for x, y in places:
                if len(places) <= _MARKED:
                    self._dot(x, y, colour)
                self.taken.append((x - 5, y - 5, x + 5, y + 5))
        for line, colour in zip(self.chart.lines, _colours(len(self.chart.lines)), strict=True):
            for point, name in zip(line.points, line.names, strict=False):
                self._name(self._place(point), name, colour)
        return self.image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)

    def _x(self, x: float) -> float:
        return math.log2(x) if self.chart.powers else x

    def _place(self, point: Point) -> Point:
        across = (self._x(point[0]) - self.low) / (self.high - self.low)
        up = point[1] / self.top
        return _LEFT + across * (self.right - _LEFT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)

    def _axes(self) -> None:
        right, bottom = self.right, HEIGHT - _BOTTOM
        powers = [2.0**i for i in range(math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9) + 1)]
        ticks = powers if self.chart.powers else round_ticks(self.low, self.high)
        for tick in ticks:
            x, _ = self._place((tick, 0.0))
            self._rule((x, _TOP, x, bottom))
            self._text(x, bottom + 6, f"{tick:.6g}", 12, "ma")
        for tick in round_ticks(0.0, self.top):
            _, y = self._place((ticks[0] if ticks else 1.0, tick))
            self._rule((_LEFT, y, right, y))
            self._text(_LEFT - 7, y, f"{tick:.6g}", 12, "rm")
        self._rule((_LEFT, _TOP, _LEFT, bottom), _INK)
        self._rule((_LEFT, bottom, right, bottom), _INK)
        self._text(_LEFT, 12, self.chart.title, 16, "la")
        self._text((_LEFT + right) / 2, HEIGHT - 26, self.chart.x_label, 13, "ma")
        self._text(_LEFT, _TOP - 6, self.chart.y_label, 12, "ls")

    def _legend(self) -> None:
        left = self.right + 14
        for i, (line, colour) in enumerate(zip(self.chart.lines, _colours(len(self.chart.lines)), strict=True)):
            y = _TOP + 18 * i + 9
            self._rule((left, y, left + 20, y), colour, 2)
            self._dot(left + 10, y, colour)
            self._text(left + 26, y, line.label, 12, "lm")

    def _name(self, place: Point, name: str, colour: Colour) -> None:
        """Write beside a point, where nothing is yet if that can be had."""
        width, (x, y) = self._width(name, 11), place
        offsets = [(7.0, -7 + 14 * step) for step in (-0.8, 0.8, 0, -1.8, 1.8, -2.8, 2.8)]
        offsets += [(-7 - width, -7 + 14 * step) for step in (-0.8, 0.8, 0, -1.8, 1.8)]
        boxes = [(x + dx, y + dy, x + dx + width, y + dy + 14) for dx, dy in offsets]
        inside = [box for box in boxes if box[0] >= _LEFT and box[2] <= self.right and box[1] >= _TOP]
        free = [box for box in inside if not any(_overlap(box, other) for other in self.taken)]
        box = next(iter(free or inside or boxes))
        self.taken.append(box)
        self._text(box[0], box[1] + 7, name, 11, "lm", colour)

    def _dot(self, x: float, y: float, colour: Colour) -> None:
        self.draw.ellipse([c * _SCALE for c in (x - 4, y - 4, x + 4, y + 4)], colour)

    def _rule(self, ends: Box, colour: Colour = _GRID, width: int = 1) -> None:
        self.draw.line([c * _SCALE for c in ends], colour, width * _SCALE)

    def _text(self, x: float, y: float, text: str, size: int, anchor: str, colour: Colour = _INK) -> None:
        self.draw.text((x * _SCALE, y * _SCALE), text, colour, _font(size), anchor)

    def _width(self, text: str, size: int) -> float:
        return float(self.draw.textlength(text, _font(size))) / _SCALE


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size * _SCALE)


def _colours(count: int) -> list[Colour]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
