"""Error messages: a wrong value gives the same message each time, without the memory address of the value."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import catch_error

from lantern_rt import LanternError, open_bundle
from lantern_rt.engines.host import choose_thread_count
from lantern_rt.errors import BundleError, BusyError, RequestError, TreeError
from lantern_rt.options import Options
from lantern_rt.requests import check_request
from lantern_rt.subjects.image_files import read_image
from lantern_rt.text.tokenizers import load_bundle_tokenizer

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


def collect_messages(call: Callable[[Any], object], object_kind: str) -> set[str]:
    """Return the error messages of a call with each of two equal objects, which have different addresses."""
    objects = ODD_OBJECTS[object_kind](), ODD_OBJECTS[object_kind]()
    return {str(catch_error(LanternError, call, value)) for value in objects}


def test_a_wrong_options_message_holds_no_address(words_bundle: Path) -> None:
    bundle = open_bundle(words_bundle, verify=False)
    tokenizer = load_bundle_tokenizer(bundle)

    def check(name: str, value: Any) -> None:
        check_request(bundle.manifest, tokenizer, {"prompts": "red cube", "method": "lantern", name: value})

    cases = [(name, "object") for name in ("prompts", *Options.__annotations__)]
    cases += [("prompts", object_kind) for object_kind in ODD_OBJECTS]
    for name, object_kind in cases:
        (text,) = collect_messages(partial(check, name), object_kind)
        assert "0x" not in text, (name, object_kind)


def test_a_wrong_thread_counts_message_holds_no_address() -> None:
    for object_kind in ODD_OBJECTS:
        (text,) = collect_messages(choose_thread_count, object_kind)
        assert "0x" not in text, object_kind


@pytest.mark.parametrize("data", [b"", b"red", b"GIF89a" + bytes(20), b"\x89PNG\r\n\x1a\n"])
def test_bytes_that_are_no_image_always_give_the_same_message(data: bytes) -> None:
    error = catch_error(LanternError, read_image, "image", data)
    assert (error.field, error.problem) == ("image", "cannot be read (cannot identify image file)")


@pytest.mark.parametrize("kind", [LanternError, BundleError, RequestError, TreeError, BusyError])
def test_a_pickled_error_has_the_same_message_and_fields(kind: type[LanternError]) -> None:
    """Check both ways to pass an error to another process: process pools pickle it, Celery rebuilds it from `args`."""
    error = kind("odd", 7) if kind is BusyError else kind("odd", "seed", "-1", "0 .. 9", "give another")
    for copy in (pickle.loads(pickle.dumps(error)), kind(*json.loads(json.dumps(error.args)))):
        assert type(copy) is kind
        assert (str(copy), vars(copy)) == (str(error), vars(error))
