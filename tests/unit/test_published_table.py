"""The table of published models: what docs say of it, and hosts that cannot use a model."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lantern_rt import published
from lantern_rt.cli.models import format_count
from lantern_rt.errors import LanternError
from lantern_rt.export.registry import check_family

ROOT = Path(__file__).parents[2]
NAME = "llamagen-c2i-b-256"


def test_the_table_in_docs_is_that_of_the_program() -> None:
    page = (ROOT / "docs/models.md").read_text("utf-8")
    for name, model in published.published_models().items():
        sizes = f"{format_count(model.parameters)} | {model.download_bytes / 1e9:.1f} | {model.memory_bytes / 1e9:.1f}"
        assert f"\n`{name}` | {model.sizes} | {sizes} | {model.licence}\n" in page
    assert len(re.findall(r"^`\S+` \| \d", page, re.MULTILINE)) == len(published.published_models())


def test_names_in_docs_are_names_of_models() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    names = re.findall(r"lantern-rt (?:run|serve|export) ((?:llamagen|janus|emu3|simplear|anole|lumina)\S*)", text)
    assert len(names) > 3
    assert set(names) <= published.published_models().keys()


@pytest.mark.parametrize("name", published.published_models())
def test_every_row_has_what_its_family_needs(name: str) -> None:
    model = published.find_model(name)
    check_family(model.family, model.export_options)
    assert model.repositories
    assert model.download_bytes > 1e8
    assert model.memory_bytes > model.parameters  # int8


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A host that can use every model: memory, disk and libraries."""
    monkeypatch.setenv("LANTERN_RT_CACHE", str(tmp_path))
    monkeypatch.setattr(published, "available_memory", lambda: 1 << 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 50))
    monkeypatch.setattr(published, "require_library", lambda *_: None)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    return monkeypatch


def change(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    row = published.find_model(NAME).model_copy(update=fields)
    monkeypatch.setattr(published, "published_models", lambda: {NAME: row})


def refusal(name: str) -> str:
    with pytest.raises(LanternError) as error:
        published.check_host(name)
    return str(error.value)


def test_what_a_host_lacks_is_said_before_anything_is_downloaded(host: pytest.MonkeyPatch) -> None:
    published.check_host(NAME)
    assert refusal("llamagen").endswith("`lantern-rt models` lists the names")
    host.setattr(published, "available_memory", lambda: 2 << 30)
    assert refusal(NAME) == "memory: found 2.1 GB free, expected 2.2 GB; use a smaller model"
    host.setattr(published, "available_memory", lambda: 1 << 40)
    host.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    assert "found 1.1 GB free on the disk, expected 1.5 GB; set HF_HOME and LANTERN_RT_CACHE" in refusal(NAME)


def test_a_model_behind_a_login_says_where_to_accept_its_terms(host: pytest.MonkeyPatch) -> None:
    change(host, login=True)
    pages = "https://huggingface.co/FoundationVision/LlamaGen"
    assert refusal(NAME) == (f"{NAME}: the hub asks for a login; accept the terms at {pages}, then run `hf auth login`")
    host.setattr("huggingface_hub.get_token", lambda: "token")
    published.check_host(NAME)


def test_without_pytorch_the_extra_is_named(host: pytest.MonkeyPatch) -> None:
    host.undo()
    host.setattr("importlib.util.find_spec", lambda _: None)
    assert refusal(NAME) == "export: torch is not installed; run `pip install 'lantern-rt[cpu,export]'`"


def test_a_gpu_has_bundles_of_its_own(host: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert published.default_precision() == "int8"
    host.setattr(published, "detect_provider", lambda _: "cuda")
    assert published.default_precision() == "fp16"
    for precision in ("int8", "fp16"):
        (tmp_path / f"{NAME}@{precision}").mkdir()
    assert published.cached_bundle(NAME) is None  # incomplete
    (tmp_path / f"{NAME}@fp16" / "bundle.json").touch()
    assert published.cached_bundle(NAME) == tmp_path / f"{NAME}@fp16"


def test_nothing_is_downloaded_for_a_command_that_cannot_run(program: Any, host: pytest.MonkeyPatch) -> None:
    host.setattr(published, "check_host", lambda _: pytest.fail("a download begins"))
    for arguments in (("run", NAME, "--yes"), ("serve", NAME, "--yes", "--methods", "other")):
        code, _, err = program(*arguments)
        assert (code, err.count("\n")) == (2, 1)
