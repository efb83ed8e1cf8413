"""Sampling settings and methods that are declared once are available in Python, on the command line and over HTTP."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import lantern_rt.methods
from lantern_rt.cli.app import app
from lantern_rt.methods import SAMPLING, Sampling
from lantern_rt.options import GenerationOptions

ROOT = Path(__file__).parents[2]
# Source text and replacement, by file. The replacements add the method `toy` and the sampling setting `gain`.
SOURCE_CHANGES = {
    "lantern_rt/methods.py": [
        (
            "# Every method, by its name",
            """class Toy(MethodConfig):
    method: Literal["toy"] = "toy"
    length: Annotated[int, Field(ge=1, le=9)] = 2


# Every method, by its name""",
        ),
        ("RowParallel, GroupDecoding)", "RowParallel, GroupDecoding, Toy)"),
        (
            "    top_k: Annotated",
            """    gain: Annotated[
        float | None, Field(gt=0, description="Factor of logits."), SettableByRequest()
    ] = None
    top_k: Annotated""",
        ),
    ],
    "lantern_rt/options.py": [("    top_k: int | None", "    gain: float | None\n    top_k: int | None")],
    "lantern_rt/runtime/drafters.py": [
        ("RowParallel, SpeculativeJacobi, ", "RowParallel, SpeculativeJacobi, Toy, "),
        (
            "    Autoregressive: ",
            """    Toy: DrafterFactory(_make_window_drafter, lambda method, max_nodes: 1 + method.length),
    Autoregressive: """,
        ),
    ],
    "lantern_rt/runtime/sampler.py": [
        (
            "        temperature = self.sampling.temperature",
            """        logits = logits if self.sampling.gain is None else logits * np.float32(self.sampling.gain)
        temperature = self.sampling.temperature""",
        )
    ],
}
TOY_PROGRAM = """
import sys
from pathlib import Path
from lantern_rt import Pipeline
from lantern_rt.cli.main import run_program
from lantern_rt.serve.protocol import ImagesRequest

bundle = sys.argv[1]
pipe = Pipeline.from_bundle(bundle, threads=1)
body = ImagesRequest.model_validate_json('{"prompt": "red cube", "seed": 1, "method": "toy:length=3", "gain": 0.25}')
options = body.make_pipeline_options()
default_options = {"prompts": "red cube", "seed": 1, "method": "ar"}
toy_codes, ar_codes, default_codes = (
    pipe(**changed).codes[0].tolist() for changed in (options, options | {"method": "ar"}, default_options)
)
assert toy_codes == ar_codes != default_codes
command = ["run", "--threads", "1", bundle]
assert run_program([*command, "red cube", "--seed=1", "--method=toy:length=3", "--gain=0.25", "--output=a.png"]) == 0
assert run_program([*command, "--from", "a.png", "--output", "b.png"]) == 0
assert Path("a.png").read_bytes() == Path("b.png").read_bytes()
assert run_program([*command, "red cube", "--gain=0", "--output=c.png"]) == 2
assert run_program([*command, "red cube", "--method=toy:length=10", "--output=c.png"]) == 2
"""


def test_options_have_the_types_of_the_sampling_settings() -> None:
    names = vars(lantern_rt.methods)
    declared = {name: field.annotation | None for name, field in SAMPLING.items()}  # type: ignore[operator]
    written = {name: hint.__forward_arg__ for name, hint in GenerationOptions.__annotations__.items()}
    assert {name: eval(written[name], names) for name in SAMPLING} == declared


def test_command_line_and_http_accept_every_sampling_setting() -> None:
    protocol = pytest.importorskip("lantern_rt.serve.protocol", reason="needs the extra `serve`")
    with get_command(app).make_context("lantern-rt", ["run"]) as context:
        options = get_command(app).get_command(context, "run").params  # type: ignore[attr-defined]
    help_texts = {option.name: option.help for option in options}
    for name, field in SAMPLING.items():
        assert help_texts[name].startswith(field.description)
        assert protocol.ImagesRequest.model_fields[name].description == field.description
    body = {"temperature": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 2.0, "cfg_tokens": "50%"}
    assert protocol.ImagesRequest.model_validate(body).make_pipeline_options() == body


def test_the_runtime_reads_every_sampling_setting() -> None:
    assert {*SAMPLING, "filter_order", "cfg_final"} == Sampling.model_fields.keys()  # only bundles set the last two
    source = "".join(path.read_text("utf-8") for path in (ROOT / "runtime").glob("*.py"))
    read_as = {"cfg_tokens": "count_guided"}
    assert [name for name in SAMPLING if f"sampling.{read_as.get(name, name)}" not in source] == []


def test_a_method_changes_two_files_and_a_setting_three(words_bundle: Path, tmp_path: Path) -> None:
    for folder in ("lantern_rt", "runtime", "engines"):
        copy = tmp_path / "lantern_rt" / folder.removeprefix("lantern_rt")
        shutil.copytree(ROOT / folder, copy, ignore=shutil.ignore_patterns("__pycache__", "*.onnx*"))
    for name, changes in SOURCE_CHANGES.items():
        for old_text, new_text in changes:
            text = (tmp_path / name).read_text("utf-8")
            assert text.count(old_text) == 1
            (tmp_path / name).write_text(text.replace(old_text, new_text), "utf-8")
    command = [sys.executable, "-c", TOY_PROGRAM, str(words_bundle)]
    process = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert "--gain: found 0.0" in process.stderr
    assert "length: found 10" in process.stderr
