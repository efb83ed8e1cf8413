"""Trace files, which record the draft tokens, acceptance and forward pass of every token of an image."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lantern_rt import Pipeline
from lantern_rt.output.trace import Trace
from lantern_rt.results import StreamStep

METHODS = ("ar", "eagle", "lantern", "lantern++", "sjd")


def record_trace(pipe: Pipeline, method: str, steps: int | None = None) -> tuple[Trace, StreamStep]:
    """Generate two images, or the first `steps` steps of them; return the trace and the last step."""
    trace = Trace(6, 6)
    for number, step in enumerate(pipe.stream(["red cube", "green sphere"], seed=4, method=method)):
        trace.add_step(step)
        if steps is not None and number + 1 == steps:
            break
    return trace, step


def read_trace_file(trace: Trace) -> dict[str, NDArray[Any]]:
    return dict(np.load(BytesIO(trace.encode_npz()), allow_pickle=False))


@pytest.mark.parametrize("method", METHODS)
def test_tokens_can_be_reconstructed_from_the_trace(pipe: Pipeline, method: str) -> None:
    trace, last_step = record_trace(pipe, method)
    file = read_trace_file(trace)
    replayed: list[list[int]] = [[], []]
    for part, image in enumerate(file["part_image"]):
        codes = replayed[image]
        tokens = file["tree_tokens"][slice(*file["tree_offsets"][part : part + 2])]
        parents = file["tree_parents"][slice(*file["tree_offsets"][part : part + 2])]
        path = file["path_nodes"][slice(*file["path_offsets"][part : part + 2])]
        if len(tokens):
            assert tokens[0] == codes[-1]
            assert (parents[path[1:]] == path[:-1]).all()
        # The first node of a path is the last committed token.
        new_codes = [*tokens[path[1:]], file["part_bonus"][part]]
        codes += new_codes[: file["part_committed"][part]]
    assert replayed == [codes.tolist() for codes in last_step.codes]
    np.testing.assert_array_equal(file["codes"], replayed)
    assert file["grid"].tolist() == [6, 6]
    assert (np.diff(file["part_step"]) >= 0).all()
    assert (len(file["tree_tokens"]) > 0) == (method != "ar")
    assert file["part_seconds"].shape == file["part_step"].shape
    assert (file["part_seconds"] > 0).all()
    roots = file["path_offsets"][:-1][np.diff(file["path_offsets"]) > 0]
    assert np.flatnonzero(np.isnan(file["path_q"])).tolist() == roots.tolist()
    accepted = np.delete(file["path_q"], roots)
    assert ((accepted > 0) & (accepted <= 1)).all()
    assert (accepted < 1).any() == (method == "lantern++")  # trees of `lantern` hold the most probable tokens
    assert not file["path_relaxed"][roots].any()


@pytest.mark.parametrize("method", ["eagle", "lantern:delta=0.9", "lantern++:lambda=40"])
def test_the_trace_marks_tokens_accepted_by_relaxation(pipe: Pipeline, method: str) -> None:
    steps = list(pipe.stream(["red cube", "green sphere"] * 4, seed=4, method=method))
    trace = Trace(6, 6)
    for step in steps:
        trace.add_step(step)
    acceptances = [part.acceptance for step in steps for part in step.parts if part.acceptance is not None]
    num_relaxed = sum(len(acceptance.relaxed_nodes) for acceptance in acceptances)
    assert read_trace_file(trace)["path_relaxed"].sum() == num_relaxed
    assert (num_relaxed > 0) == (method != "eagle")
    p, q, relaxed = (read_trace_file(trace)[f"path_{name}"] for name in ("p", "q", "relaxed"))
    assert np.isnan(p).all() == (method == "eagle")
    assert (p[relaxed] < q[relaxed]).all()
    assert (np.isnan(p) == np.isnan(q)).all() or method == "eagle"


def test_a_cancelled_images_trace_has_code_minus_1(pipe: Pipeline) -> None:
    trace, last_step = record_trace(pipe, "lantern", steps=4)
    codes = read_trace_file(trace)["codes"]
    for i in range(2):
        known = len(last_step.codes[i])
        assert (codes[i, :known] == last_step.codes[i]).all()
        assert (codes[i, known:] == -1).all()
