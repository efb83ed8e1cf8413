"""The public names; a change here is a change of the interface."""

from __future__ import annotations

import inspect

import lantern_rt
from lantern_rt import errors

PUBLIC = [
    "AsyncPipeline",
    "BundleError",
    "BusyError",
    "CheckpointError",
    "EngineError",
    "LanternError",
    "Options",
    "OutputError",
    "ParityError",
    "Pipeline",
    "RequestError",
    "Result",
    "Statistics",
    "StreamStep",
    "TreeError",
    "__version__",
    "open_bundle",
]


def test_the_public_names_are_these() -> None:
    assert lantern_rt.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(lantern_rt))


def test_all_errors_are_public_and_in_one_tree() -> None:
    tree = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert tree == {name for name in PUBLIC if name.endswith("Error")}
    assert all(issubclass(getattr(errors, name), lantern_rt.LanternError) for name in tree)


def test_parameters_of_a_call_are_these() -> None:
    parameters = inspect.signature(lantern_rt.Pipeline.__call__).parameters
    from lantern_rt.methods import METHODS, PARAMETERS, Options
    from lantern_rt.requests import SAMPLING

    assert list(parameters) == ["self", "prompts", "callback_on_step", "options"]
    assert list(inspect.signature(lantern_rt.Pipeline.stream).parameters) == ["self", "prompts", "options"]
    subjects = ["class_ids", "embeddings", "negative_prompt", "keep_rows", "seed", "num_images"]
    assert list(Options.__annotations__)[:6] == subjects
    assert list(Options.__annotations__)[-2:] == ["image", "mask"]
    assert SAMPLING == ("cfg_scale", "temperature", "top_k", "top_p", "repetition_penalty")
    assert list(METHODS) == ["ar", "eagle", "lantern", "lantern++", "sjd", "rows"]
    assert PARAMETERS == {
        "tree": ["eagle", "lantern", "lantern++"],
        "drafter": ["eagle", "lantern", "lantern++"],
        "neighbors": ["lantern", "lantern++", "sjd"],
        "residual": ["lantern", "lantern++", "sjd"],
        "delta": ["lantern", "sjd"],
        "lambda": ["lantern++", "sjd"],
        "window": ["sjd", "rows"],
        "drafts": ["rows"],
    }


def test_fields_of_a_result_are_these() -> None:
    assert list(lantern_rt.Result.__dataclass_fields__) == ["images", "codes", "seeds", "prompts", "stats", "settings"]


def test_fields_of_a_step_of_a_stream_are_these() -> None:
    assert list(lantern_rt.StreamStep.__dataclass_fields__) == [
        "parts", "done", "total", "stats", "new_codes", "codes", "cells", "settings", "draw",
    ]  # fmt: skip
    assert inspect.signature(lantern_rt.StreamStep.image).parameters.keys() == {"self", "i"}
