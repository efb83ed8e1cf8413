"""What is added once (methods, sampling settings, inputs) works in Python, on the command line and over HTTP."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from refusals import expect_error
from typer.main import get_command

import lantern_rt.methods
from lantern_rt import Pipeline, RequestError, register_input, register_method, register_sampling_setting
from lantern_rt.cli.app import app
from lantern_rt.completion import list_supported_methods
from lantern_rt.methods import METHODS, METHODS_BY_PARAMETER, SAMPLING, Autoregressive, MethodConfig, Sampling
from lantern_rt.options import GenerationOptions, Options
from lantern_rt.output.recipe import read_recipe
from lantern_rt.runtime.drafters import DRAFTERS
from lantern_rt.runtime.filters import OWN_FILTERS
from lantern_rt.subjects.base import Option, Part, Words
from lantern_rt.subjects.table import PARTS, WORDS

ROOT = Path(__file__).parents[2]
# Cell of a notebook that adds a method, whose drafter repeats the last token.
CELL = """
from typing import Annotated, Literal
from pydantic import Field
from lantern_rt import register_method
from lantern_rt.methods import MethodConfig
from lantern_rt.runtime.drafters import DrafterFactory
from lantern_rt.runtime.tree_drafts import TreeDrafter, make_chain

class Repeat(MethodConfig):
    method: Literal["repeat"] = "repeat"
    length: Annotated[int, Field(ge=1, le=9)] = 2

class RepeatDrafter(TreeDrafter):
    def __init__(self, max_nodes, length):
        super().__init__(max_nodes)
        self.length = length

    def draft_tree(self, sequence):
        count = min(self.length, sequence.count_codes_until_preserved() - 1)
        return make_chain(sequence.codes[-1:] * (1 + count))

def make_drafter(model, method, timer):
    return RepeatDrafter(model.max_nodes, method.length)

FACTORY = DrafterFactory(make_drafter, lambda method, max_nodes: 1 + method.length)
register_method(Repeat, FACTORY)
"""
GAIN_FIELD = """\
    gain: Annotated[float | None, Field(gt=0, description="Factor of logits."), SettableByRequest()] = None
"""
# Source text and replacement, by file. The replacements add the sampling setting `gain`.
SOURCE_CHANGES = {
    "lantern_rt/methods.py": [("    top_k: Annotated", f"{GAIN_FIELD}    top_k: Annotated")],
    "lantern_rt/options.py": [("    top_k: int | None", "    gain: float | None\n    top_k: int | None")],
    "lantern_rt/runtime/sampler.py": [
        (
            "        temperature = self.sampling.temperature",
            """        logits = logits if self.sampling.gain is None else logits * np.float32(self.sampling.gain)
        temperature = self.sampling.temperature""",
        )
    ],
}
# These changes add the input `place`, a text whose row replaces the conditional row.
INPUT_CHANGES = {
    "lantern_rt/subjects/place.py": [
        (
            "",
            """from dataclasses import dataclass
from .base import Option, Part, Words
from .prompts import make_text_prefix


@dataclass
class Place(Part):
    words = (Words("place", "place", "place", Option("place", str, "TEXT", "Place."), json_type=str),)
    text: str

    def finish(self, context):
        self.row = make_text_prefix(self.text, "place", context).cond
        return self

    def change_prefix(self, prefix):
        return prefix._replace(cond=self.row)

    @property
    def record(self):
        return {"place": self.text}
""",
        )
    ],
    "lantern_rt/subjects/table.py": [
        ("from .embeddings import Embedding\n", "from .embeddings import Embedding\nfrom .place import Place\n"),
        ("[NegativePrompt, ", "[Place, NegativePrompt, "),
    ],
    "lantern_rt/options.py": [
        ("    negative_prompt: str | None", "    place: str | None\n    negative_prompt: str | None")
    ],
}
GAIN_PROGRAM = """
import sys
from pathlib import Path
from lantern_rt import Pipeline
from lantern_rt.cli.main import run_program
from lantern_rt.serve.protocol import ImagesRequest

bundle = sys.argv[1]
pipe = Pipeline.from_bundle(bundle, threads=1)
body = ImagesRequest.model_validate_json('{"prompt": "red cube", "seed": 1, "gain": 0.25}')
options = body.make_pipeline_options()
codes, default_codes = (pipe(**changed).codes[0].tolist() for changed in (options, options | {"gain": None}))
assert codes != default_codes
command = ["run", "--threads", "1", bundle]
assert run_program([*command, "red cube", "--seed=1", "--gain=0.25", "--output=a.png"]) == 0
assert run_program([*command, "--from", "a.png", "--output", "b.png"]) == 0
assert Path("a.png").read_bytes() == Path("b.png").read_bytes()
assert run_program([*command, "red cube", "--gain=0", "--output=c.png"]) == 2
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

EXAMPLES = "".join((ROOT / f"examples/own_{name}.py").read_text("utf-8") for name in ("sampling_setting", "input"))
# Uses the setting `epsilon_cutoff` and the input `caption` of the examples.
OWN_PROGRAM = """
import asyncio
import base64
import json
import sys
from io import BytesIO
from pathlib import Path

from PIL import Image

from lantern_rt import AsyncPipeline, Pipeline
from lantern_rt.cli.main import run_program
from lantern_rt.output.recipe import read_recipe

bundle = sys.argv[1]
pipe = Pipeline.from_bundle(bundle, threads=1)
expected = pipe("red cube", seed=1, epsilon_cutoff=0.2, caption="hello")
for changed in ({"epsilon_cutoff": None}, {"caption": "bye"}):
    options = {"seed": 1, "epsilon_cutoff": 0.2, "caption": "hello", **changed}
    assert pipe("red cube", **options).images[0].tobytes() != expected.images[0].tobytes()

command = ["run", "--threads", "1", bundle]
options = ["--seed=1", "--epsilon-cutoff=0.2", "--caption=hello"]
assert run_program([*command, "red cube", *options, "--output=a.png"]) == 0
assert run_program([*command, "--from", "a.png", "--output", "b.png"]) == 0
assert Path("a.png").read_bytes() == Path("b.png").read_bytes()
recipe = read_recipe(Path("a.png"))
assert (recipe.caption, recipe.settings["epsilon_cutoff"]) == ("hello", 0.2)
assert run_program([*command, "red cube", "--epsilon-cutoff=2", "--output=c.png"]) == 2
Path("prompts.txt").write_text("red cube")
bench = ["bench", bundle, "--prompts=prompts.txt", "--count=3", "--method=ar", "--threads=1", "--epsilon-cutoff=0.2"]
assert run_program(bench) == 0
assert run_program(["run", "--help"]) == 0

from lantern_rt.serve.app import make_app
from lantern_rt.serve.backend import LocalBackend
from lantern_rt.serve.state import ServerLimits, ServerState


async def post(app, **fields):
    headers = [(b"content-type", b"application/json")]
    path = "/v1/images/generations"
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    bodies = iter([json.dumps({"prompt": "red cube", "seed": 1, **fields}).encode()])
    messages = []

    async def receive():
        for body in bodies:
            return {"type": "http.request", "body": body}
        await asyncio.sleep(60)

    async def send(message):
        messages.append(message)

    await app(scope, receive, send)
    return messages[0]["status"], json.loads(messages[1]["body"])


async def post_to_app():
    async with AsyncPipeline(pipe) as pipeline:
        state = ServerState(ServerLimits())
        state.backends = {"tiny": LocalBackend(pipeline)}
        app = make_app(state)
        return [await post(app, epsilon_cutoff=epsilon, caption="hello") for epsilon in (0.2, 2)]


(status, accepted), (_, rejected) = asyncio.run(post_to_app())
assert status == 200, accepted
image = Image.open(BytesIO(base64.b64decode(accepted["data"][0]["b64_json"])))
assert image.tobytes() == expected.images[0].tobytes()
assert rejected["error"]["param"] == "epsilon_cutoff", rejected
"""


def run_cell() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "notebook"}
    exec(compile(CELL, "cell", "exec", dont_inherit=True), names)
    return names


@pytest.mark.usefixtures("own_registrations")
def test_a_registered_method_works_like_a_built_in_method(
    program: Any, words_bundle: Path, tmp_path: Path, pipe: Pipeline
) -> None:
    protocol = pytest.importorskip("lantern_rt.serve.protocol", reason="needs the extra `serve`")
    method = run_cell()["Repeat"](length=3)
    body = protocol.ImagesRequest.model_validate_json('{"prompt": "red cube", "seed": 1, "method": "repeat:length=3"}')
    options = body.make_pipeline_options()
    result = pipe(**options)
    assert result.settings.method == method
    trees = [step.parts[0].tree for step in pipe.stream(**options)]
    assert max(tree.num_nodes for tree in trees if tree is not None) == 1 + method.length
    codes = [pipe(**options | {"method": each}).codes[0].tolist() for each in (method, "repeat", "ar")]
    assert codes == [result.codes[0].tolist()] * 3
    assert "repeat" in list_supported_methods(pipe.bundle.manifest, METHODS)
    command = ("run", words_bundle, "--threads", 1)
    assert program(*command, "red cube", "--seed", 1, "--method", str(method), "--output", "a.png")[0] == 0
    assert read_recipe(Path("a.png")).method == "repeat"
    assert program(*command, "--from", "a.png", "--output", "b.png")[0] == 0
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()
    code, _, err = program(*command, "red cube", "--method", "repeat:length=10", "--output", "c.png")
    assert (code, "length: found 10" in err) == (2, True)
    Path("prompts.txt").write_text("red cube")
    bench = ("bench", words_bundle, "--method", "ar", "--method", "repeat", "--prompts", "prompts.txt", "--json")
    code, out, _ = program(*bench, "--count", 3, "--threads", 1)
    assert (code, [row["method"] for row in json.loads(out)["rows"]]) == (0, ["ar", "repeat"])
    code, _, err = program("eval", words_bundle, "--method", "repeat:length=3", "--write-presets")
    assert (code, "repeat:length=3: is registered in this process only" in err) == (2, True)


def test_the_help_of_the_program_names_a_registered_method() -> None:
    program = f"{CELL}\nfrom lantern_rt.cli.main import run_program\nrun_program(['run', '--help'])"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "groups, repeat." in " ".join(process.stdout.split())


@pytest.mark.usefixtures("own_registrations")
def test_a_method_is_used_only_as_it_was_registered_last(pipe: Pipeline) -> None:
    first = run_cell()["Repeat"]
    second = run_cell()["Repeat"]
    assert METHODS["repeat"] is second
    assert METHODS_BY_PARAMETER["length"] == ["repeat"]
    assert (first in DRAFTERS, second in DRAFTERS) == (False, True)
    assert pipe("red cube", method=second()).codes[0].size == 36
    with expect_error(RequestError, "method: Repeat is not registered; call lantern_rt.register_method"):
        pipe("red cube", method=first())


class NoName(MethodConfig):
    pass


class LongName(MethodConfig):
    method: Literal["my method"] = "my method"


class OtherSjd(MethodConfig):
    method: Literal["sjd"] = "sjd"


class NoDefault(MethodConfig):
    method: Literal["mine"] = "mine"
    length: int


class TakenParameter(MethodConfig):
    method: Literal["mine"] = "mine"
    top_k: int = 3


@pytest.mark.parametrize(
    ("method_class", "words"),
    [
        (Sampling, "method_class: found"),
        ("mine", "method_class: found 'mine', expected a subclass of MethodConfig"),
        (NoName, 'NoName.method: expected Literal["NAME"] = "NAME"'),
        (LongName, "LongName.method: expected"),
        (OtherSjd, "method sjd: is the name of lantern_rt.methods.SpeculativeJacobi; give"),
        (Autoregressive, "method ar: is the name of lantern_rt.methods.Autoregressive; give"),
        (NoDefault, "NoDefault.length: has no default"),
        (TakenParameter, "TakenParameter.top_k: is the name of another setting"),
    ],
)
def test_a_wrong_method_is_not_registered(method_class: Any, words: str) -> None:
    known = {**METHODS}
    with expect_error(RequestError, words):
        register_method(method_class, DRAFTERS[Autoregressive])
    assert known == METHODS


class NoWords(Part):
    pass


def make_part(name: str, **names: str) -> type[Part]:
    option = Option(names.get("option", name), str, "TEXT", "Text.")
    words = Words(name, names.get("field", name), names.get("chunk", name), option)
    return type("Own", (Part,), {"words": (words,)})


@pytest.mark.parametrize(
    ("part_class", "words"),
    [
        (Sampling, "part_class: found"),
        (NoWords, "expected a subclass of Part with words"),
        (
            make_part("own", field="other"),
            "own: needs the same name in Python, HTTP, options and recipes",
        ),
        (make_part("own", option="other"), "own: needs the same name"),
        (make_part("own", chunk="other"), "own: needs the same name"),
        (make_part("negative_prompt"), "Own: found 'negative_prompt', expected a name that no other parameter has"),
        (make_part("temperature"), "Own: found 'temperature'"),
        (make_part("input_ids"), "Own: found 'input_ids'"),
        (make_part("window"), "Own: found 'window'"),
        (make_part("seed"), "Own: found 'seed'"),
        (make_part("two words"), "Own: found 'two words'"),
    ],
)
@pytest.mark.usefixtures("own_registrations")
def test_a_wrong_input_is_not_registered(part_class: Any, words: str) -> None:
    known = [*PARTS]
    with expect_error(RequestError, words):
        register_input(part_class)
    assert known == PARTS


@pytest.mark.parametrize("name", ["top_k", "filter_order", "lambda", "mask", "prompts", "count", "top-n"])
@pytest.mark.usefixtures("own_registrations")
def test_a_setting_needs_a_name_of_its_own(name: str) -> None:
    with expect_error(RequestError, f"name: found '{name}', expected a name that no other parameter has"):
        register_sampling_setting(name, float, lambda value: lambda *arguments: (0.0, 0.0))


@pytest.mark.usefixtures("own_registrations")
def test_inputs_and_settings_are_used_only_as_they_were_registered_last() -> None:
    for _ in range(2):
        names: dict[str, Any] = {"__name__": "notebook"}
        exec(compile(EXAMPLES, "cell", "exec", dont_inherit=True), names)
        assert (PARTS[-1], WORDS["caption"]) == (names["Caption"], names["Caption"].words[0])
        assert OWN_FILTERS["epsilon_cutoff"] is names["make_filter"]
    assert len({part.__qualname__ for part in PARTS}) == len(PARTS)
    with expect_error(RequestError, "name: found 'caption'"):
        register_sampling_setting("caption", float, lambda value: lambda *arguments: (0.0, 0.0))
    with expect_error(RequestError, "Own: found 'epsilon_cutoff'"):
        register_input(make_part("epsilon_cutoff"))


def test_inputs_and_settings_are_registered_before_the_first_command() -> None:
    importlib.import_module("lantern_rt.cli.options")
    with expect_error(RequestError, "own: is registered too late; register it before the first command or server"):
        register_input(make_part("own"))
    with expect_error(RequestError, "own: is registered too late"):
        register_sampling_setting("own", float, lambda value: lambda *arguments: (0.0, 0.0))


@pytest.mark.usefixtures("own_registrations")
def test_a_method_without_a_factory_is_not_registered() -> None:
    names = run_cell()
    with expect_error(RequestError, "factory: found", "expected a DrafterFactory"):
        register_method(names["Repeat"], names["RepeatDrafter"])


def test_options_have_the_types_of_the_sampling_settings() -> None:
    names = vars(lantern_rt.methods)
    declared = {name: field.annotation | None for name, field in SAMPLING.items()}  # type: ignore[operator]
    written = {name: hint.__forward_arg__ for name, hint in GenerationOptions.__annotations__.items()}
    assert {name: eval(written[name], names) for name in SAMPLING} == declared


def test_editors_and_notebooks_complete_the_options_of_a_call() -> None:
    calls = ((Pipeline.__call__, Options), (Pipeline.stream, Options), (Pipeline.edit, GenerationOptions))
    for function, options in calls:
        assert options.__annotations__.keys() <= inspect.signature(function).parameters.keys()


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
    command = [sys.executable, "-c", program, str(bundle)]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stderr


def test_a_setting_changes_three_files(words_bundle: Path, tmp_path: Path) -> None:
    errors = run_with_changes(tmp_path, SOURCE_CHANGES, GAIN_PROGRAM, words_bundle)
    assert "--gain: found 0.0" in errors


def test_an_input_changes_two_files_beside_its_own(words_bundle: Path, tmp_path: Path) -> None:
    errors = run_with_changes(tmp_path, INPUT_CHANGES, TOY_INPUT_PROGRAM, words_bundle)
    assert "--place: found unknown word" in errors


def test_an_own_setting_and_an_own_input_work_like_built_in_ones(words_bundle: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXAMPLES + OWN_PROGRAM, str(words_bundle)]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert "--epsilon-cutoff: found 2.0, expected at most 1.0" in process.stderr
    help_text = " ".join(process.stdout.split())
    assert "--caption TEXT Text to write on images." in help_text
    assert (
        "--epsilon-cutoff <float> Smallest probability of tokens to sample from. [default: the bundle's]" in help_text
    )
