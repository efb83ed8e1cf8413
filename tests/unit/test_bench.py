"""The `bench` command: rows of methods, consistent figures, tables, and rejected options."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from tiny_bundle import make_tiny_bundle

from lantern_rt import open_bundle
from lantern_rt.cli.console import print_table
from lantern_rt.cli.main import run_program
from lantern_rt.compare.bench import list_default_methods


@pytest.fixture(autouse=True)
def use_separate_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_RT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("bench") / "tiny")


@pytest.fixture(scope="module")
def bundle_without_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("bench") / "plain", "class", drafter=False)


def test_bench_reports_consistent_figures_for_each_method(
    bundle: Path, bundle_without_drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list_default_methods(open_bundle(bundle_without_drafter).manifest) == ["ar", "sjd", "rows"]
    (tmp_path / "prompts.txt").write_text("red sphere\ngreen cube on sand\n")
    options = ["--prompts", str(tmp_path / "prompts.txt"), "--threads", "1", "--count", "3", "--json"]
    options += ["--seed", "5", "--top-k", "7"]
    assert run_program(["bench", str(bundle), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["method"]: row for row in report["rows"]}
    assert list(rows) == [
        "ar", "sjd", "rows", "eagle:tree=dynamic-8-4-2", "eagle:tree=chain-3",
        "lantern", "lantern++", "strict",
    ]  # fmt: skip
    for row in rows.values():
        assert sum(row["share"].values()) == pytest.approx(1)
        assert row["tokens_per_second"] == pytest.approx(36 * row["images_per_second"])
        assert len(row["speed_ups"]) == 3
        low, high = row["speed_up_interval"].values()
        assert min(row["speed_ups"]) <= low <= row["speed_up"] <= high <= max(row["speed_ups"])
        assert row["exact"] == (row["method"] not in ("rows", "lantern", "lantern++"))
    assert (rows["ar"]["speed_up"], rows["ar"]["nll_ratio"], rows["ar"]["tokens_per_forward_pass"]) == (1, 1, 1)
    low, high = rows["sjd"]["tokens_per_forward_pass_interval"].values()
    assert 1 < low < rows["sjd"]["tokens_per_forward_pass"] < high
    assert rows["sjd"]["nll_ratio"] == 1
    assert rows["sjd"]["tvd_per_token"] == 0 < rows["lantern++"]["tvd_per_token"]
    assert rows["sjd"]["share"]["drafter"] == 0 < rows["eagle:tree=chain-3"]["share"]["drafter"]
    assert rows["rows"]["tvd_per_token"] is None  # unknown
    assert {row["settings"]["top_k"] for row in rows.values()} == {7}
    assert rows["strict"]["settings"] == rows["sjd"]["settings"] | {"window": 7}


def test_the_bench_table_fits_into_80_characters(
    bundle_without_drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "bench",
        str(bundle_without_drafter),
        "--threads",
        "1",
        "--count",
        "1",
        "--batch",
        "2",
        "--method",
        "rows:window=3",
    ]
    assert run_program(arguments) == 0
    title, heading, *rows = capsys.readouterr().out.splitlines()
    assert "plain" not in title
    assert heading.split() == ["method", "images/s", "speed-up", "tokens", "per", "pass", "exact"]
    assert [line.split()[:: len(line.split()) - 1] for line in rows[:2]] == [["ar", "yes"], ["rows:window=3", "no"]]
    assert max(len(line.rstrip()) for line in (heading, *rows[:2])) <= 80
    assert rows[2].startswith("3 turns, batch size 2")
    assert rows[3] == "fastest exact method: ar (1.00); select it with --method ar"
    assert run_program([*arguments, "--csv"]) == 0
    assert run_program([*arguments, "--csv", "--json"]) == 2
    ar_row, rows_row = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (ar_row["method"], ar_row["speed_up"], rows_row["method"], rows_row["exact"]) == (
        "ar",
        "1.0",
        "rows:window=3",
        "False",
    )
    assert 0 < float(rows_row["share.target"]) < 1
    assert run_program([*arguments[:-2], "--quality", "strict"]) == 0
    assert capsys.readouterr().out.splitlines()[3].split()[0] == "strict"


def test_a_table_shows_a_dash_in_place_of_a_missing_value(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "[red]", "part": {"host": 0.5}, "bound": None}, {"name": "b", "part": {"host": 1}, "bound": 0.25}]
    print_table({"name": "{name}", "host": "{part[host]:.0%}", "bound": "{bound:.1f}"}, rows)
    cells = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert cells == [["name", "host", "bound"], ["[red]", "50%", "-"], ["b", "100%", "0.2"]]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--count", "0"], "count"),
        (["--batch", "65"], "batch"),
        (["--method", "sjd", "--method", "sjd"], "method"),
        (["--method", "magic"], "method"),
        (["--method", "eagle"], "method"),
    ],
)
def test_invalid_options_of_bench_are_rejected_by_name(
    bundle_without_drafter: Path, arguments: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(["bench", str(bundle_without_drafter), *arguments]) == 2
    assert capsys.readouterr().err.removeprefix("lantern-rt: ").lstrip("-").startswith(field)
