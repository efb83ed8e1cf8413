"""The `bench` command: rows of what a bundle can run, figures that add up, charts that show them."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_bundle import make_tiny_bundle

from lantern_rt import open_bundle
from lantern_rt.cli.main import run_program
from lantern_rt.engines.bandwidth import read_bandwidth
from lantern_rt.output.charts import HEIGHT, WIDTH, Chart, Line, chart_png, draw_chart, round_ticks
from lantern_rt.tuning.bench import target_bytes, usual_ways


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
    assert usual_ways(full, ["strict"], sweep=False).split(",") == [
        "ar", "sjd", "eagle:tree=dynamic-8-4-2", "eagle:tree=chain-3", "lantern", "lantern++", "auto:quality=strict",
    ]  # fmt: skip
    assert usual_ways(bare, ["fast"], sweep=False) == "ar,sjd,auto:quality=fast"
    assert usual_ways(bare, [], sweep=True) == "ar,sjd,sjd:omega=1.5:anneal=0.5,sjd:omega=2:anneal=0.5"


def test_every_row_has_figures_that_add_up(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "speed.png"
    arguments = ["bench", str(folder), "--prompts", write_prompts(tmp_path), "--threads", "1", "--sweep", "--json"]
    assert run_program([*arguments, "--images", "3", "--plot", str(picture)]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["way"]: row for row in report["rows"]}
    assert list(rows) == usual_ways(open_bundle(folder).manifest, ["strict", "balanced"], True).split(",")
    for row in rows.values():
        assert sum(row["share"].values()) == pytest.approx(1)
        assert row["codes_per_second"] == pytest.approx(36 * row["images_per_second"])
        assert len(row["speeds_against_ar"]) == 3
    assert (rows["ar"]["speed_against_ar"], rows["ar"]["nll_against_ar"]) == (1, 1)
    assert rows["ar"]["tokens_per_target_pass"] == 1
    assert rows["ar"]["share_of_limit"] == pytest.approx(
        rows["ar"]["images_per_second"] * 36 * report["weights_read_ms"] / 1e3, rel=0.9
    )
    assert rows["sjd"]["tvd_per_code"] == 0 < rows["sjd:lambda=3"]["tvd_per_code"]
    assert rows["sjd"]["share"]["drafter"] == 0 < rows["eagle:tree=chain-3"]["share"]["drafter"]
    assert rows["auto:quality=strict"]["choice"].startswith("auto: ar, as bundle tiny brings no rates")
    assert Image.open(BytesIO(picture.read_bytes())).size == (2 * WIDTH, HEIGHT)


def test_greedy_exact_methods_give_away_nothing_in_batches_too(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["bench", str(plain), "--greedy", "--batch", "2", "--threads", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["greedy"], report["batch"]) == (True, 2)
    assert [row["nll_against_ar"] for row in report["rows"]] == [1.0] * len(report["rows"])


def test_the_table_has_a_line_for_every_way_and_says_what_auto_chose(
    plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(["bench", str(plain), "--threads", "1", "--methods", "sjd:window=3,auto:quality=strict"]) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()[3:6]] == ["ar", "sjd:window=3", "auto:quality=strict"]
    assert "8 turns of 1 image; speeds are medians of turns" in text
    assert "auto:quality=strict: auto: ar, as bundle tiny brings no rates" in text


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        (["--images", "0"], "images: found 0, expected a whole number 1 .. 10000"),
        (["--batch", "65"], "batch: found 65, expected a whole number 1 .. 64"),
        (["--methods", "ar", "--sweep"], "methods: says what to run; leave --sweep and --quality out"),
        (["--methods", "magic"], "method: found 'magic', expected auto, ar"),
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
    assert target_bytes(open_bundle(folder)) == 4 * 8 * 32  # its head, float32


def test_memory_is_read_at_some_speed() -> None:
    assert read_bandwidth(2**22, 2) > 1e6


# ---------------------------------------------------------------- charts


def test_ticks_are_round_and_within_the_axis() -> None:
    assert round_ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert round_ticks(0, 640) == [0, 100, 200, 300, 400, 500, 600]
    assert round_ticks(0.97, 1.06) == pytest.approx([0.98, 1.0, 1.02, 1.04, 1.06])


def test_a_line_is_drawn_from_point_to_point() -> None:
    rising = Chart("", "x", "y", [Line("", [(0, 0), (10, 10)])])
    empty = Chart("", "x", "y", [Line("", [(0, 0), (10, 10)][:0])])
    drawn = np.asarray(draw_chart(rising)).astype(int)
    blank = np.asarray(draw_chart(empty)).astype(int)
    middle = drawn[150:400, 200:600]
    assert (middle.max(-1) < 150).sum() > 200  # dark pixels: the line
    assert (blank[150:400, 200:600].max(-1) < 150).sum() == 0
    dark = np.argwhere(middle.max(-1) < 150)
    assert np.corrcoef(dark[:, 0], dark[:, 1])[0, 1] < -0.99  # it rises to the right


@pytest.mark.parametrize("points", [[], [(0, 0)], [(2, 1), (2, 1)], [(2, 1), (64, 3)]])
@pytest.mark.parametrize("powers", [False, True])
def test_charts_of_few_points_can_be_drawn(points: list[tuple[float, float]], powers: bool) -> None:
    points = [(x + powers, y) for x, y in points]
    chart = Chart("few", "x", "y", [Line("some", points, ["name"] * len(points))], powers)
    assert Image.open(BytesIO(chart_png([chart]))).size == (WIDTH, HEIGHT)
