"""Settings, methods and inputs that are declared once are available in Python, on the command line and over HTTP."""

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
    "lantern_rt/runtime/sampling.py": [
        (
            "    return logits if sampling.temperature in",
            """    logits = logits if sampling.gain is None else logits * np.float32(sampling.gain)
    return logits if sampling.temperature in""",
        )
    ],
}
# These changes add the input `place`, a text whose row replaces the conditional row.
INPUT_CHANGES = {
    "lantern_rt/subjects/place.py": [
        (
            "",
            """from dataclasses import dataclass
from .base import Option, Part, PartInput, Row, Words
from .text import make_text_prefix


@dataclass
class Place(Part):
    text: str
    row: Row

    def change_prefix(self, prefix):
        return prefix._replace(cond=self.row)

    @property
    def record(self):
        return {"place": self.text}


@dataclass
class PlaceInput(PartInput):
    words = (Words("place", "place", "place", Option("place", str, "TEXT", "Place."), json_type=str),)
    text: str

    @classmethod
    def read(cls, inputs, manifest):
        return cls(inputs["place"])

    def finish(self, context):
        return Place(self.text, make_text_prefix(self.text, "place", context).cond)
""",
        )
    ],
    "lantern_rt/subjects/table.py": [
        ("from .embeddings import Embedding\n", "from .embeddings import Embedding\nfrom .place import PlaceInput\n"),
        ("(NegativePromptInput, ", "(PlaceInput, NegativePromptInput, "),
    ],
    "lantern_rt/options.py": [
        ("    negative_prompt: str | None", "    place: str | None\n    negative_prompt: str | None")
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

TOY_INPUT_PROGRAM = """
import sys
from pathlib import Path
from lantern_rt import Pipeline
from lantern_rt.cli.main import run_program
from lantern_rt.serve.protocol import ImagesRequest

bundle = sys.argv[1]
pipe = Pipeline.from_bundle(bundle, threads=1)
body = ImagesRequest.model_validate_json('{"prompt": "red cube", "seed": 1, "place": "green sphere", "cfg_scale": 1}')
result = pipe(**body.make_pipeline_options())
assert result.codes[0].tolist() == pipe("green sphere", seed=1, cfg_scale=1).codes[0].tolist()
assert result.images[0].info["place"] == "green sphere"
command = ["run", "--threads", "1", bundle]
assert run_program([*command, "red cube", "--seed=1", "--place=green sphere", "--output=a.png"]) == 0
assert run_program([*command, "--from", "a.png", "--output", "b.png"]) == 0
assert Path("a.png").read_bytes() == Path("b.png").read_bytes()
assert run_program([*command, "red cube", "--place=a purple one", "--output=c.png"]) == 2
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
    body = {"temperature": 0.5, "top_k": 3, "repetition_penalty": 2.0, "cfg_tokens": "50%"}
    assert protocol.ImagesRequest.model_validate(body).make_pipeline_options() == body


def test_the_runtime_reads_every_sampling_setting() -> None:
    assert {*SAMPLING, "filter_order", "cfg_final"} == Sampling.model_fields.keys()  # only bundles set the last two
    source = "".join(path.read_text("utf-8") for path in (ROOT / "runtime").glob("*.py"))
    read_as = {"cfg_tokens": "count_guided"}
    assert [name for name in SAMPLING if f"sampling.{read_as.get(name, name)}" not in source] == []


def run_with_changes(folder: Path, source_changes: dict[str, list[tuple[str, str]]], program: str, bundle: Path) -> str:
    """Run a program with a copy of the package in which some files are changed; return what it writes to stderr."""
    for package in ("lantern_rt", "runtime", "engines"):
        copy = folder / "lantern_rt" / package.removeprefix("lantern_rt")
        shutil.copytree(ROOT / package, copy, ignore=shutil.ignore_patterns("__pycache__", "*.onnx*"))
    for name, changes in source_changes.items():
        for old_text, new_text in changes:
            text = (folder / name).read_text("utf-8") if (folder / name).exists() else ""
            assert text.count(old_text) == 1
            (folder / name).write_text(text.replace(old_text, new_text), "utf-8")
    process = subprocess.run(
        [sys.executable, "-c", program, str(bundle)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return process.stderr


def test_a_method_changes_two_files_and_a_setting_three(words_bundle: Path, tmp_path: Path) -> None:
    errors = run_with_changes(tmp_path, SOURCE_CHANGES, TOY_PROGRAM, words_bundle)
    assert "--gain: found 0.0" in errors
    assert "length: found 10" in errors


def test_an_input_changes_two_files_beside_its_own(words_bundle: Path, tmp_path: Path) -> None:
    errors = run_with_changes(tmp_path, INPUT_CHANGES, TOY_INPUT_PROGRAM, words_bundle)
    assert "--place: found unknown word" in errors
