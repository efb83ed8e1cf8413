"""Test that the server reports the methods, qualities, names and versions of its models correctly."""

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
    path = folder / "bundle.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def add_heads(folder: Path) -> Path:
    """Add draft heads with zero weights to the bundle in `folder`; return the folder of the changed bundle."""
    tables = {name: np.zeros(shape, np.float16) for name, shape in draft_head_shapes(CODES, WIDTH, 4, 4).items()}
    return write_draft_heads(open_bundle(folder), tables).folder


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tree drafter", "ar eagle lantern lantern++ sjd rows"),
        ("heads", "ar eagle sjd rows"),
        ("no drafter", "ar sjd rows"),
        ("groups", "ar groups"),
        ("both drafters", "ar eagle lantern lantern++ sjd rows"),
        ("neighbours alone", "ar sjd rows"),
        ("drafter alone", "ar eagle sjd rows"),
        ("heads and neighbours", "ar eagle lantern lantern++ sjd rows"),
    ],
)
def test_a_model_accepts_exactly_its_listed_methods(name: str, expected: str, tmp_path: Path) -> None:
    condition: Any = {"class_ids": 1} if name == "groups" else {"prompts": "red cube"}
    BUNDLES[name](tmp_path / "tiny")

    async def list_methods() -> tuple[list[str], list[str]]:
        pipeline = AsyncPipeline(Pipeline.from_bundle(tmp_path / "tiny", threads=1))
        accepted_methods = []
        for method in METHODS:
            try:
                pipeline.service.submit(lambda _: None, **condition, method=method).cancel()
            except RequestError:
                continue
            accepted_methods.append(method)
        listed_methods = LocalBackend(pipeline).describe()["methods"]
        await pipeline.close(drain=False)
        return listed_methods, accepted_methods

    assert asyncio.run(list_methods()) == (expected.split(), expected.split())


def test_a_quality_preset_with_too_many_nodes_for_a_batched_forward_pass_is_not_listed(tmp_path: Path) -> None:
    manifest = make_tiny_bundle(tmp_path / "tiny") / "bundle.json"
    content = json.loads(manifest.read_text())
    wide_preset = {"method": {"method": "eagle", "tree": "chain-80"}}
    content["presets"] = {"strict": {"method": {"method": "ar"}}, "fast": wide_preset}
    manifest.write_text(json.dumps(content))

    async def list_qualities() -> list[str]:
        pipeline = AsyncPipeline(Pipeline.from_bundle(tmp_path / "tiny", threads=1))
        with pytest.raises(RequestError):
            pipeline.service.submit(lambda _: None, "red cube", quality="fast")
        listed_qualities = LocalBackend(pipeline).describe()["qualities"]
        await pipeline.close(drain=False)
        return list(listed_qualities)

    assert asyncio.run(list_qualities()) == ["strict"]


@pytest.fixture(scope="module")
def renamed_models_server(start_server: Callable[..., RunningServer], tiny_folder: Path) -> RunningServer:
    """Start a server of two bundles, `tiny` and `other`, with an alias of `other`."""
    copy = shutil.copytree(tiny_folder, tiny_folder.with_name("tiny-2"), dirs_exist_ok=True)
    manifest = json.loads((copy / "bundle.json").read_text())
    (copy / "bundle.json").write_text(json.dumps(manifest | {"name": "other"}))
    return start_server(tiny_folder, copy, "--threads=1", "--alias=gpt-image-1=other")


def test_models_have_the_names_and_aliases_of_the_command_line(renamed_models_server: RunningServer) -> None:
    models = renamed_models_server.get("/v1/models")[1]["data"]
    roots = {"tiny": "tiny", "other": "other", "gpt-image-1": "other"}
    assert [(model["id"], model["root"]) for model in models] == [*roots.items()]
    for name, root in (("other", "other"), ("gpt-image-1", "other"), (None, "tiny")):
        status, response = renamed_models_server.post({"prompt": "red cube", "model": name})
        assert (status, response["lantern"]["model"]) == (200, root)
    assert renamed_models_server.post({"prompt": "red cube", "model": "tiny-2"})[0] == 404
    read_log = renamed_models_server.read_request_log
    wait_until(lambda: [line["model"] for line in read_log()] == ["other", "other", "tiny", ""])


def test_models_readyz_metrics_and_log_report_the_version_and_the_bundle_digest(
    renamed_models_server: RunningServer, tiny_folder: Path
) -> None:
    bundle = open_bundle(tiny_folder)
    digests = {"tiny": bundle.digest, "other": open_bundle(tiny_folder.with_name("tiny-2")).digest}
    identity = {"version": __version__, "models": digests}
    facts = renamed_models_server.get("/v1/models/tiny")[1]["lantern"]
    assert facts["parameters"] == {
        "ar": "",
        "eagle": "tree=chain-3",
        "lantern": "tree=dynamic-6-3-2:neighbors=4:residual=aggregated:delta=0.2",
        "lantern++": "tree=chain-3:neighbors=4:residual=aggregated:lambda=2",
        "sjd": "window=8",
        "rows": "window=6:drafts=0",
    }
    expected_facts = {"version": __version__, "bundle": "tiny", "digest": bundle.digest}
    assert facts.items() >= (expected_facts | {"format_version": bundle.manifest.format_version}).items()
    for path in ("/readyz", "/version"):
        assert renamed_models_server.get(path) == (200, {"status": "ready", **identity})
    for name, digest in digests.items():
        labels = {"model": name, "bundle": name, "digest": digest, "version": __version__}
        assert renamed_models_server.read_metric("lantern_model_info", **labels) == 1
    (ready,) = [json.loads(line) for line in renamed_models_server.log.splitlines() if "ready" in line]
    assert ready.items() >= {"message": "ready: tiny, other", **identity}.items()
