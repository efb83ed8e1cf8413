"""The `bench` command: rows of what a bundle can run, figures that add up, charts that show them."""

from __future__ import annotations

import importlib.util
import json
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from tiny_bundle import make_tiny_bundle

from lantern_rt import open_bundle
from lantern_rt.cli.console import print_table
from lantern_rt.cli.main import run_program
from lantern_rt.compare.bench import usual_methods
from lantern_rt.engines.host import read_bandwidth
from lantern_rt.engines.memory import weight_bytes
from lantern_rt.output.charts import Chart, Line, chart_png, chart_svg


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_RT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("bench") / "tiny")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("bench") / "plain", "class", drafter=False, method="ar")


def write_prompts(folder: Path) -> str:
    (folder / "prompts.txt").write_text("red sphere\ngreen cube on sand\n")
    return str(folder / "prompts.txt")


# ---------------------------------------------------------------- rows


def test_the_rows_are_what_the_bundle_can_run(folder: Path, plain: Path) -> None:
    full, bare = open_bundle(folder).manifest, open_bundle(plain).manifest
    assert usual_methods(full, ["strict"], sweep=False).split(",") == [
        "ar", "sjd", "rows", "eagle:tree=dynamic-8-4-2", "eagle:tree=chain-3",
        "lantern", "lantern++", "auto:quality=strict",
    ]  # fmt: skip
    assert usual_methods(bare, ["fast"], sweep=False) == "ar,sjd,rows,auto:quality=fast"
    assert usual_methods(bare, [], sweep=True) == ",".join(
        ["ar", "sjd", "rows", "rows:window=4", "rows:window=3", "sjd:omega=1.5:anneal=0.5", "sjd:omega=2:anneal=0.5"]
    )


def test_every_row_has_figures_that_add_up(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "speed.png"
    arguments = ["bench", str(folder), "--prompts", write_prompts(tmp_path), "--threads", "1", "--sweep", "--json"]
    assert run_program([*arguments, "--images", "3", "--plot", str(picture)]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["label"]: row for row in report["rows"]}
    assert list(rows) == usual_methods(open_bundle(folder).manifest, ["strict", "balanced"], True).split(",")
    for row in rows.values():
        assert sum(row["share"].values()) == pytest.approx(1)
        assert row["tokens_per_second"] == pytest.approx(36 * row["images_per_second"])
        assert len(row["speed_ups"]) == 3
    assert (rows["ar"]["speed_up"], rows["ar"]["nll_ratio"]) == (1, 1)
    assert rows["ar"]["tokens_per_forward_pass"] == 1
    assert rows["ar"]["share_of_memory_bound"] == pytest.approx(
        rows["ar"]["images_per_second"] * 36 * report["memory_bound_ms"] / 1e3, rel=0.9
    )
    assert rows["sjd"]["tvd_per_token"] == 0 < rows["sjd:lambda=3"]["tvd_per_token"]
    assert rows["sjd"]["share"]["drafter"] == 0 < rows["eagle:tree=chain-3"]["share"]["drafter"]
    assert rows["rows"]["tvd_per_token"] is None  # nobody knows it
    assert "while drawing" in rows["auto:quality=strict"]["choice"]
    assert Image.open(BytesIO(picture.read_bytes())).size == (1600, 500)


def test_greedy_exact_methods_give_away_nothing_in_batches_too(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["bench", str(plain), "--greedy", "--batch", "2", "--threads", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["greedy"], report["batch"]) == (True, 2)
    assert [row["nll_ratio"] for row in report["rows"]] == [1.0] * len(report["rows"])


def test_the_table_has_a_line_for_every_method_and_says_what_auto_chose(
    plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(["bench", str(plain), "--threads", "1", "--methods", "sjd:window=3,auto:quality=strict"]) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()[3:6]] == ["ar", "sjd:window=3", "auto:quality=strict"]
    assert "8 turns of 1 image; speeds are medians of turns" in text
    assert "while drawing" in next(line for line in text.splitlines() if line.startswith("auto:quality=strict: auto: "))


def test_what_is_not_known_is_a_dash_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "[red]", "part": {"host": 0.5}, "bound": None}, {"name": "b", "part": {"host": 1}, "bound": 0.25}]
    print_table({"name": "{name}", "host": "{part[host]:.0%}", "bound": "{bound:.1f}"}, rows)
    found = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert found == [["name", "host", "bound"], ["[red]", "50%", "-"], ["b", "100%", "0.2"]]


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        (["--images", "0"], "images: found 0, expected a whole number 1 .. 10000"),
        (["--batch", "65"], "batch: found 65, expected a whole number 1 .. 64"),
        (["--methods", "ar", "--sweep"], "methods: says what to run; leave --sweep and --quality out"),
        (["--methods", "magic"], "method: found 'magic', expected ar, eagle"),
        (["--methods", "eagle"], "method eagle: bundle tiny has no drafter"),
        (["--quality", "nice"], "quality: found 'nice', expected strict"),
        (["--plot", "speed.jpg"], "speed.jpg: found the ending .jpg, expected .png"),
    ],
)
def test_wrong_use_of_bench_is_one_line(
    plain: Path, extra: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(["bench", str(plain), *extra]) == 2
    assert line in capsys.readouterr().err


# ---------------------------------------------------------------- the limit


def test_the_limit_counts_every_weight_of_the_target_once(folder: Path) -> None:
    assert weight_bytes(open_bundle(folder), "target") == 4 * 8 * 32  # its head, float32


@pytest.mark.parametrize(("size", "read"), [(2**22, 2**22), (1, 2**20)])
def test_the_speed_of_memory_is_that_of_the_best_reading_but_the_first(
    monkeypatch: pytest.MonkeyPatch, size: int, read: int
) -> None:
    instants = iter(np.cumsum([0, 0.25, 1, 4, 1, 2, 1, 8, 1, 5, 1, 9]).tolist())
    monkeypatch.setattr("time.perf_counter", lambda: next(instants))
    shares: list[int] = []
    monkeypatch.setattr(np, "max", lambda share: shares.append(share.nbytes))
    assert read_bandwidth(size, 2) == read / 2
    assert shares == [read // 2] * 12  # six readings by two threads


# ---------------------------------------------------------------- charts


def svg_texts(chart: Chart) -> list[str]:
    root = ElementTree.fromstring(chart_svg([chart]))
    return [text for element in root.iter("{http://www.w3.org/2000/svg}text") if (text := "".join(element.itertext()))]


def test_a_line_is_drawn_from_point_to_point_in_an_image_of_its_own_half() -> None:
    rising, empty = (Chart("", "x", "y", [Line("a", points)]) for points in ([(0, 0), (10, 10)], []))
    drawn = np.asarray(Image.open(BytesIO(chart_png([rising, empty]))).convert("RGB")).astype(int)
    assert drawn.shape == (500, 1600, 3)
    first, second = (np.argwhere(np.ptp(half[100:400, 100:700], axis=-1) > 100) for half in np.split(drawn, 2, axis=1))
    assert len(first) > 300  # coloured pixels: the line
    assert np.corrcoef(first.T)[0, 1] < -0.99  # it rises to the right
    assert len(second) == 0


def test_a_chart_names_its_axes_its_lines_and_its_points() -> None:
    line = Line("sjd <&> $x$", [(2, 1), (64, 3)], ["window 2", "window 64"])
    texts = svg_texts(Chart("A pass", "nodes", "milliseconds", [line, Line("eagle", [(8, 2)])], log2=True))
    assert {"A pass", "nodes", "milliseconds", "sjd <&> $x$", "eagle", "window 2", "window 64"} <= set(texts)
    assert [text for text in texts if text.isdecimal()] == ["2", "4", "8", "16", "32", "64"]


def test_the_vertical_axis_begins_at_zero_unless_something_is_below() -> None:
    above = svg_texts(Chart("", "", "", [Line("a", [(7, 90), (8, 100)])]))
    assert "0" in above
    assert "\N{MINUS SIGN}2" in svg_texts(Chart("", "", "", [Line("a", [(0, 1)], bars=[(0, 0, -2, 4)])]))


@pytest.mark.parametrize("points", [[], [(0, 0)], [(2, 1), (2, 1)], [(2, 1), (64, 3)]])
@pytest.mark.parametrize("log2", [False, True])
def test_charts_of_few_points_can_be_drawn(points: list[tuple[float, float]], log2: bool) -> None:
    points = [(x + log2, y) for x, y in points]
    texts = svg_texts(Chart("few", "x", "y", [Line("some", points, ["name"] * len(points))], log2))
    assert texts.count("name") == len(points)


def test_without_matplotlib_a_chart_is_refused_before_the_work(
    plain: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for command in ("bench", "tune"):
        assert run_program([command, str(plain), "--plot", str(tmp_path / "speed.png")]) == 2
        err = capsys.readouterr().err
        assert err == "lantern-rt: --plot: matplotlib is not installed; run `pip install 'lantern-rt[plot]'`\n"
