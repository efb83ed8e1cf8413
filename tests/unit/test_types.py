"""Type annotations of the package: mypy finds misspelt options in the program of a user."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="needs the extra `dev`")

PROGRAM = """\
from lantern_rt import AsyncPipeline, Pipeline

pipe = Pipeline.from_bundle("scenes", threads=1)
print(pipe("a red sphere on sand", seed=1, num_images=2).stats.seconds / 2)
pipe("a red sphere on sand", widow=3)

async def main() -> None:
    async with await AsyncPipeline.from_bundle("scenes", threads=1, max_images_per_pass=2) as pipeline:
        image = (await pipeline.generate("a red sphere on sand", temperature=0.5)).images[0]
        image.save("sphere.png")
        await pipeline.generate("a red sphere on sand", temprature=0.5)
        async for step in pipeline.stream("a red cube", sed=3):
            print(step.done / step.totl)
    await AsyncPipeline.from_bundle("scenes", thread=1)
"""
MISSPELT_NAMES = {5: "widow", 11: "temprature", 12: "sed", 13: "totl", 14: "thread"}


def test_mypy_reports_exactly_the_misspelt_names(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    cache = Path(__file__).parents[2] / "build" / "mypy"  # a run without it takes a minute
    options = ["--strict", "--hide-error-context", "--cache-dir", str(cache)]
    command = [sys.executable, "-m", "mypy", *options, "program.py"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    errors = [line.split(":", 2) for line in process.stdout.splitlines() if ": error: " in line]
    assert [int(line) for _, line, _ in errors] == list(MISSPELT_NAMES), process.stdout + process.stderr
    for (_, _, text), word in zip(errors, MISSPELT_NAMES.values(), strict=True):
        assert f'"{word}"' in text
