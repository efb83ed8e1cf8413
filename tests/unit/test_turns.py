"""Comparison of methods: the requests, the order in which methods run, and the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_bundle import CAPTION, make_tiny_bundle

from lantern_rt import Pipeline, RequestError, open_bundle
from lantern_rt.compare.prompts import Prompts, read_bundle_prompts
from lantern_rt.compare.turns import ComparedMethod, add_likelihoods, parse_methods, run_method, run_methods_in_turns
from lantern_rt.subjects.prompts import ClassId, Text

PROMPTS = ("red cube", "green cube on sand", "red sphere on snow")


def test_a_batch_uses_the_next_prompts_and_then_new_seeds() -> None:
    prompts = Prompts(Text, PROMPTS)
    red, green, snow = PROMPTS
    assert prompts.request(0, 2) == {"prompts": [red, green], "seed": [10_000, 10_001]}
    assert prompts.request(1, 2, 7) == {"prompts": [snow, red], "seed": [9, 10]}
    assert Prompts(ClassId, [3, 5]).request(0, 1, 0) == {"class_ids": [3], "seed": [0]}
    assert Prompts(ClassId, [3, 5]).labels == ["class 3", "class 5"]


@pytest.mark.parametrize("images", [1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize("seeds", [1, 3])
def test_the_batches_contain_every_prompt_once_with_every_seed(images: int, seeds: int) -> None:
    pairs = []
    for request in Prompts(Text, PROMPTS).requests(images, seeds, 100):
        assert len(request["prompts"]) <= images
        pairs += zip(request["prompts"], request["seed"], strict=True)
    assert pairs == [(prompt, 100 + seeds * i + k) for i, prompt in enumerate(PROMPTS) for k in range(seeds)]


def test_prompts_are_of_a_file_the_bundle_classes_or_embeddings(tmp_path: Path) -> None:
    text = tmp_path / "prompts.txt"
    text.write_text("\n".join(PROMPTS) + "\n\n")
    text_bundle = open_bundle(make_tiny_bundle(tmp_path / "words"))
    assert read_bundle_prompts(text_bundle, text, 2) == Prompts(Text, list(PROMPTS[:2]))
    class_bundle = open_bundle(make_tiny_bundle(tmp_path / "classes", "class"))
    assert read_bundle_prompts(class_bundle, None, 3) == Prompts(ClassId, [0, 3, 6])
    assert read_bundle_prompts(class_bundle) == Prompts(ClassId, list(range(10)))
    scenes_bundle = open_bundle("scenes")
    assert read_bundle_prompts(scenes_bundle).items == scenes_bundle.path("prompts").read_text().splitlines()
    embeddings_bundle = open_bundle(make_tiny_bundle(tmp_path / "embeddings", "embeddings"))
    np.savez(tmp_path / "texts.npz", embeddings=np.ones((2, 3, CAPTION), np.float32))
    request = read_bundle_prompts(embeddings_bundle, tmp_path / "texts.npz").request(0, 2)
    assert [part.shape for part in request["embeddings"]] == [(2, 3, CAPTION), (2, 3)]
    for bundle, path, count, field in (
        (class_bundle, text, None, "prompts"),
        (text_bundle, None, None, "prompts"),
        (text_bundle, text, 0, "count"),
        (embeddings_bundle, None, None, "prompts"),
    ):
        with pytest.raises(RequestError) as error:
            read_bundle_prompts(bundle, path, count)
        assert field in (error.value.field, str(error.value).partition(":")[0])


@pytest.mark.parametrize("command", ["bench", "train-drafter data"])
def test_a_wrong_prompt_in_a_file_names_file_and_line(
    program: Any, words_bundle: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    if command == "train-drafter data":
        pytest.importorskip("safetensors")
    monkeypatch.setattr(Pipeline, "from_bundle", lambda *_, **__: pytest.fail("loaded a graph"))
    Path("prompts.txt").write_text("red cube\n\ngreen cube\na zebra\n")
    arguments = ["scenes", "--output", "shards"] if command.endswith("data") else [words_bundle]
    code, out, err = program(*command.split(), *arguments, "--prompts", "prompts.txt")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("lantern-rt: prompts.txt:4: found unknown word 'zebra'")


def test_each_batch_runs_the_methods_in_rotated_order(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def make_recorder(name: str, function: Any) -> Any:
        def record_call(*arguments: Any, **options: Any) -> Any:
            calls.append(f"{name} {options['method']}")
            return function(*arguments, **options)

        return record_call

    for name in ("stream", "likelihoods"):
        monkeypatch.setattr(pipe, name, make_recorder(name, getattr(pipe, name)))
    methods = parse_methods(["sjd", "eagle"], {}, pipe.bundle)
    requests = [Prompts(Text, PROMPTS).request(i, 1) for i in range(3)]
    turns = list(run_methods_in_turns(pipe, methods, requests))
    assert [[result.method.label for result in turn] for turn in turns] == [["ar", "sjd", "eagle"]] * 3
    order = ["ar", "sjd", "eagle", "sjd", "eagle", "ar", "eagle", "ar", "sjd"]
    assert [call.split()[1] for call in calls if call.startswith("stream")] == order
    assert [call.split()[0] for call in calls] == (["stream"] * 3 + ["likelihoods"] * 3) * 3


def test_running_a_method_gives_the_pipelines_result(pipe: Pipeline) -> None:
    request = {"prompts": PROMPTS[:2], "seed": [5, 6]}
    method = ComparedMethod("relaxed", {"method": "lantern++", "temperature": 0.9})
    run_result = run_method(pipe, method, request)
    result = pipe(**request, method="lantern++", temperature=0.9)
    assert [codes.tolist() for codes in run_result.codes] == [codes.tolist() for codes in result.codes]
    assert [image.tobytes() for image in run_result.images] == [image.tobytes() for image in result.images]
    assert run_result.settings == result.settings
    assert run_result.tvd_per_token == pytest.approx(result.stats.realised_tvd / 36)
    assert run_result.tvd_per_token > 0
    assert run_result.seconds >= run_result.statistics.seconds
    likelihoods = pipe.likelihoods(result.codes, **request, temperature=0.9)
    assert add_likelihoods(pipe, run_result, request).likelihoods == likelihoods
    ((result_without_likelihoods,),) = run_methods_in_turns(pipe, [method], [request], with_likelihoods=False)
    assert (len(result_without_likelihoods.images), result_without_likelihoods.likelihoods) == (2, [])


def test_methods_are_parsed_and_ar_is_the_first(pipe: Pipeline) -> None:
    methods = parse_methods(["lantern++:lambda=3:tree=chain-3", " sjd"], {"temperature": 0.5}, pipe.bundle)
    assert [method.label for method in methods] == ["ar", "lantern++:lambda=3:tree=chain-3", "sjd"]
    settings = pipe(PROMPTS[0], **methods[1].options).settings.as_dict()
    assert (settings["lambda"], settings["tree"], settings["temperature"]) == (3, "chain-3", 0.5)
    assert [method.label for method in parse_methods(["sjd", "ar"], {}, pipe.bundle)] == ["ar", "sjd"]
