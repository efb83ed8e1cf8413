"""What commands decode with: what is wrong with it is refused by the option's name."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_bundle import make_tiny_bundle

from lantern_rt.cli.main import run_program


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--threads", "0"], "--threads: found 0"),
        (["--provider", "abacus"], "--provider: found 'abacus'"),
        (["--provider", "cpu", "--provider", "vq=cpu"], "--provider: found graph 'vq'"),
        (["--engines", "nowhere"], "nowhere: no engine.json in it"),
    ],
)
def test_engine_options_are_refused_by_their_names(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], expected: str
) -> None:
    bundle = make_tiny_bundle(tmp_path / "tiny")
    assert run_program(["run", str(bundle), "red cube", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith(f"lantern-rt: {expected}")
