"""`language_check.py`: the text of code and docs must not contain more habits that make it hard to read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKED_PATHS = ("lantern_rt", "runtime", "export", "engines", "train", "docs", "README.md", "CONTRIBUTING.md")
RULES = ("no-verb", "fragment", "pronoun", "synonym", "vague-name", "paired", "long-sentence")
# Maximum findings of each rule of `tests/language_check.py`, in the order of `RULES`; lower a number when possible.
LIMITS = {
    CHECKED_PATHS: (1, 2, 0, 1, 4, 0, 0),
    ("tests",): (2, 0, 0, 0, 0, 0, 0),
    ("benchmarks",): (1, 0, 0, 0, 0, 0, 0),
    ("recipes",): (5, 0, 4, 1, 3, 0, 0),
    ("examples", "deploy", "noxfile.py", "setup.py"): (12, 0, 3, 0, 0, 0, 0),
}


@pytest.mark.parametrize("folders", LIMITS)
def test_code_and_docs_have_at_most_the_allowed_number_of_findings_of_each_rule(folders: tuple[str, ...]) -> None:
    limits = zip(RULES, LIMITS[folders], strict=True)
    options = [argument for rule, limit in limits for argument in ("--limit", f"{rule}={limit}")]
    command = [sys.executable, "tests/language_check.py", *folders, *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr + run.stdout


def test_the_check_counts_each_bad_habit_in_a_function(tmp_path: Path) -> None:
    source = 'def take(found, own, most):\n    """What is there of those."""\n    a, b = found, own\n'
    (tmp_path / "riddle.py").write_text(source, "utf-8")
    command = [sys.executable, "tests/language_check.py", str(tmp_path), "--files", "0"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    counts = {rule: int(count) for count, rule in (line.split() for line in lines if line)}
    assert counts == {
        "no-verb": 1,
        "no-args": 1,
        "fragment": 0,
        "pronoun": 2,
        "synonym": 0,
        "vague-name": 4,
        "paired": 1,
        "long-sentence": 0,
    }
