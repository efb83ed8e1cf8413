"""Errors have the same text for the same fault each time, whatever object a caller passed."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import error_of

from lantern_rt import LanternError, open_bundle
from lantern_rt.edits import read_image
from lantern_rt.engines.host import choose_thread_count
from lantern_rt.errors import BundleError, BusyError, RequestError, TreeError
from lantern_rt.options import Options
from lantern_rt.prompts import load_bundle_tokenizer
from lantern_rt.requests import check_request

ODD_OBJECTS: dict[str, Callable[[], Any]] = {
    "object": object,
    "generator": lambda: (word for word in ("red",)),
    "function": lambda: lambda: 0,
    "file": lambda: io.BytesIO(b"red"),
    "list": lambda: [object()],
    "mapping": lambda: {"a": object()},
    "set": lambda: {object()},
    "array": lambda: np.array([object()]),
}
CASES = [("prompts", odd) for odd in ODD_OBJECTS] + [
    (name, odd) for name in Options.__annotations__ for odd in ODD_OBJECTS
]


def messages(call: Callable[[Any], object], odd: str) -> set[str]:
    """Return the messages of a call with two objects of the same kind, at two addresses."""
    texts = set()
    objects = ODD_OBJECTS[odd](), ODD_OBJECTS[odd]()
    for value in objects:
        error = error_of(LanternError, call, value)
        texts.add(str(error))
    return texts


@pytest.mark.parametrize(("name", "odd"), CASES)
def test_errors_name_the_value_of_an_option_without_its_address(words_bundle: Path, name: str, odd: str) -> None:
    bundle = open_bundle(words_bundle, verify=False)
    tokenizer = load_bundle_tokenizer(bundle)

    def check(value: Any) -> None:
        check_request(bundle.manifest, tokenizer, **{"prompts": "red cube", "method": "lantern", name: value})

    (text,) = messages(check, odd)
    assert "0x" not in text


@pytest.mark.parametrize("odd", ODD_OBJECTS)
def test_threads_are_named_without_an_address(odd: str) -> None:
    (text,) = messages(choose_thread_count, odd)
    assert "0x" not in text


@pytest.mark.parametrize("data", [b"", b"red", b"GIF89a" + bytes(20), b"\x89PNG\r\n\x1a\n"])
def test_bytes_that_are_not_an_image_are_rejected_with_the_same_message_each_time(data: bytes) -> None:
    error = error_of(LanternError, read_image, "image", data)
    assert (error.field, error.problem) == ("image", "cannot be read (cannot identify image file)")


@pytest.mark.parametrize("kind", [LanternError, BundleError, RequestError, TreeError, BusyError])
def test_an_error_has_its_fields_in_another_process(kind: type[LanternError]) -> None:
    """Check errors that a pool of processes pickles, and that Celery makes again from class and arguments."""
    error = kind("odd", 7) if kind is BusyError else kind("odd", "seed", "-1", "0 .. 9", "give another")
    for copy in (pickle.loads(pickle.dumps(error)), kind(*json.loads(json.dumps(error.args)))):
        assert type(copy) is kind
        assert (str(copy), vars(copy)) == (str(error), vars(error))
