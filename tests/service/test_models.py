"""What the server tells of its models, and that it holds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tiny_bundle import make_heads_bundle, make_order_bundle, make_tiny_bundle

from lantern_rt import AsyncPipeline, Pipeline, RequestError
from lantern_rt.methods import METHODS
from lantern_rt.serve.backend import LocalBackend

BUNDLES: dict[str, Any] = {
    "tree drafter": make_tiny_bundle,
    "heads": make_heads_bundle,
    "no drafter": lambda folder: make_tiny_bundle(folder, drafter=False),
    "groups": make_order_bundle,
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tree drafter", ["ar", "eagle", "lantern", "lantern++", "sjd", "rows"]),
        ("heads", ["ar", "eagle", "sjd", "rows"]),
        ("no drafter", ["ar", "sjd", "rows"]),
        ("groups", ["ar", "groups"]),
    ],
)
def test_the_methods_of_a_model_are_those_that_it_accepts(name: str, expected: list[str], tmp_path: Path) -> None:
    subject: Any = {"class_ids": 1} if name == "groups" else {"prompts": "red cube"}
    BUNDLES[name](tmp_path / "tiny")

    async def methods() -> tuple[list[str], list[str]]:
        pipeline = AsyncPipeline(Pipeline.from_bundle(tmp_path / "tiny", threads=1))
        accepted = []
        for method in METHODS:
            try:
                pipeline.service.submit(lambda _: None, **subject, method=method).cancel()
            except RequestError:
                continue
            accepted.append(method)
        described = LocalBackend(pipeline).describe()["methods"]
        await pipeline.close(drain=False)
        return described, accepted

    assert asyncio.run(methods()) == (expected, expected)
