"""The language of the product and its docs: habits that make text hard to read stay as rare as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECKED = ("lantern_rt", "runtime", "export", "engines", "train", "docs", "README.md", "CONTRIBUTING.md")
# Findings of each rule of `tests/language_check.py`; lower a number when the text gets better.
LIMITS = {
    "no-verb": 2,
    "fragment": 2,
    "pronoun": 2,
    "synonym": 1,
    "vague-name": 4,
    "paired": 0,
    "long-sentence": 0,
}


def test_docstrings_names_and_docs_stay_as_plain_as_they_are() -> None:
    limits = [argument for rule, most in LIMITS.items() for argument in ("--limit", f"{rule}={most}")]
    command = [sys.executable, "tests/language_check.py", *CHECKED, *limits]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr + run.stdout


def test_a_riddle_is_found(tmp_path: Path) -> None:
    riddle = 'def take(found, own, most):\n    """What is there of those."""\n    a, b = found, own\n'
    (tmp_path / "riddle.py").write_text(riddle, "utf-8")
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
