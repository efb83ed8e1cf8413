"""What is declared once appears wherever users can give it: sampling settings and methods."""

from __future__ import annotations

from pathlib import Path

from typer.main import get_command

import lantern_rt.methods
from lantern_rt.cli.app import app
from lantern_rt.methods import SAMPLING, Sampling
from lantern_rt.options import GenerationOptions
from lantern_rt.serve.protocol import ImagesRequest


def test_options_of_calls_have_the_types_of_the_settings_that_requests_may_set() -> None:
    names = vars(lantern_rt.methods)
    declared = {name: field.annotation | None for name, field in SAMPLING.items()}  # type: ignore[operator]
    written = {name: hint.__forward_arg__ for name, hint in GenerationOptions.__annotations__.items()}
    assert {name: eval(written[name], names) for name in SAMPLING} == declared


def test_the_command_line_and_http_have_every_setting_that_requests_may_set() -> None:
    with get_command(app).make_context("lantern-rt", ["run"]) as context:
        options = get_command(app).get_command(context, "run").params  # type: ignore[attr-defined]
    help_texts = {option.name: option.help for option in options}
    for name, field in SAMPLING.items():
        assert help_texts[name].startswith(field.description)
        assert ImagesRequest.model_fields[name].description == field.description
    body = {"temperature": 0.5, "top_k": 3, "repetition_penalty": 2.0, "cfg_tokens": "50%"}
    assert ImagesRequest.model_validate(body).options() == body


def test_every_setting_is_read_by_the_runtime() -> None:
    assert {*SAMPLING, "filter_order", "cfg_final"} == Sampling.model_fields.keys()  # these two come with the bundle
    source = "".join(path.read_text("utf-8") for path in (Path(__file__).parents[2] / "runtime").glob("*.py"))
    read_as = {"cfg_tokens": "count_guided"}
    assert [name for name in SAMPLING if f"sampling.{read_as.get(name, name)}" not in source] == []
