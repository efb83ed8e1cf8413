"""Check what the server reports about its models, and that the reports are true."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running_server import RunningServer, wait_until
from tiny_bundle import CODES, WIDTH, make_heads_bundle, make_order_bundle, make_tiny_bundle

from lantern_rt import AsyncPipeline, Pipeline, RequestError, __version__
from lantern_rt.bundle.files import open_bundle
from lantern_rt.bundle.rewrite import write_draft_heads
from lantern_rt.methods import METHODS
from lantern_rt.runtime.heads import draft_head_shapes
from lantern_rt.serve.backend import LocalBackend

BUNDLES: dict[str, Any] = {
    "tree drafter": make_tiny_bundle,
    "heads": make_heads_bundle,
    "no drafter": lambda folder: make_tiny_bundle(folder, drafter=False),
    "groups": make_order_bundle,
    "both drafters": lambda folder: add_heads(make_tiny_bundle(folder)),
    "neighbours alone": lambda folder: change_manifest(make_tiny_bundle(folder), drafter=None, decoding={}),
    "drafter alone": lambda folder: change_manifest(make_tiny_bundle(folder), neighbors=0, decoding={}),
    "heads and neighbours": lambda folder: change_manifest(add_heads(make_tiny_bundle(folder)), drafter=None),
}


def change_manifest(folder: Path, **fields: Any) -> Path:
    """Replace fields of a bundle's manifest."""
    path = folder / "bundle.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def add_heads(folder: Path) -> Path:
    """Add draft heads of zeros to a bundle."""
    tables = {name: np.zeros(shape, np.float16) for name, shape in draft_head_shapes(CODES, WIDTH, 4, 4).items()}
    return write_draft_heads(open_bundle(folder), tables).folder


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tree drafter", ["ar", "eagle", "lantern", "lantern++", "sjd", "rows"]),
        ("heads", ["ar", "eagle", "sjd", "rows"]),
        ("no drafter", ["ar", "sjd", "rows"]),
        ("groups", ["ar", "groups"]),
        ("both drafters", ["ar", "eagle", "lantern", "lantern++", "sjd", "rows"]),
        ("neighbours alone", ["ar", "sjd", "rows"]),
        ("drafter alone", ["ar", "eagle", "sjd", "rows"]),
        ("heads and neighbours", ["ar", "eagle", "lantern", "lantern++", "sjd", "rows"]),
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


def test_a_quality_whose_passes_are_too_large_to_be_shared_is_not_listed(tmp_path: Path) -> None:
    manifest = make_tiny_bundle(tmp_path / "tiny") / "bundle.json"
    content = json.loads(manifest.read_text())
    wide_preset = {"method": {"method": "eagle", "tree": "chain-80"}}
    content["presets"] = {"strict": {"method": {"method": "ar"}}, "fast": wide_preset}
    manifest.write_text(json.dumps(content))

    async def qualities() -> list[str]:
        pipeline = AsyncPipeline(Pipeline.from_bundle(tmp_path / "tiny", threads=1))
        with pytest.raises(RequestError):
            pipeline.service.submit(lambda _: None, "red cube", quality="fast")
        described = LocalBackend(pipeline).describe()["qualities"]
        await pipeline.close(drain=False)
        return list(described)

    assert asyncio.run(qualities()) == ["strict"]


@pytest.fixture(scope="module")
def renamed(start: Callable[..., RunningServer], tiny_folder: Path) -> RunningServer:
    """Start a server of two copies of one bundle, with names that the operator gives."""
    copy = shutil.copytree(tiny_folder, tiny_folder.with_name("tiny-2"), dirs_exist_ok=True)
    return start(tiny_folder, copy, "--threads=1", "--name=one", "--name=other", "--alias=gpt-image-1=other")


def test_models_have_the_names_that_the_operator_gives(renamed: RunningServer) -> None:
    models = renamed.get("/v1/models")[1]["data"]
    assert [(model["id"], model["root"]) for model in models] == [
        ("one", "one"), ("other", "other"), ("gpt-image-1", "other"),
    ]  # fmt: skip
    for name, root in (("other", "other"), ("gpt-image-1", "other"), (None, "one")):
        status, response = renamed.post({"prompt": "red cube", "model": name})
        assert (status, response["lantern"]["model"]) == (200, root)
    assert renamed.post({"prompt": "red cube", "model": "tiny"})[0] == 404
    wait_until(lambda: [line["model"] for line in renamed.request_lines()] == ["other", "other", "one", ""])


def test_the_version_and_the_bundle_are_told_wherever_an_operator_looks(
    renamed: RunningServer, tiny_folder: Path
) -> None:
    bundle = open_bundle(tiny_folder)
    digest = bundle.digest
    identity = {"version": __version__, "models": {"one": digest, "other": digest}}
    facts = renamed.get("/v1/models/other")[1]["lantern"]
    assert facts["parameters"] == {
        "ar": "",
        "eagle": "tree=chain-3",
        "lantern": "tree=dynamic-6-3-2:neighbors=4:residual=aggregated:delta=0.2",
        "lantern++": "tree=chain-3:neighbors=4:residual=aggregated:lambda=2",
        "sjd": "window=8",
        "rows": "window=6:drafts=0",
    }
    identity_facts = {name: facts[name] for name in ("version", "bundle", "digest", "format_version")}
    format_version = bundle.manifest.format_version
    assert identity_facts == {
        "version": __version__,
        "bundle": "tiny",
        "digest": digest,
        "format_version": format_version,
    }
    assert renamed.get("/readyz") == (200, {"status": "ready", **identity})
    labels = {"bundle": "tiny", "digest": digest, "version": __version__}
    assert [renamed.metric("lantern_model_info", model=name, **labels) for name in ("one", "other")] == [1, 1]
    (ready,) = [json.loads(line) for line in renamed.log.splitlines() if "ready" in line]
    assert ready.items() >= {"message": "ready: one, other", **identity}.items()
