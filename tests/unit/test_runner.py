"""Running methods in turns: what is drawn, in which order, and what is said of it."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_bundle import make_tiny_bundle

from lantern_rt import Pipeline, RequestError, open_bundle
from lantern_rt.compare.turns import Contender, Subjects, parse_contenders, run, scored, subjects_of, take_turns

PROMPTS = ("red cube", "green cube on sand", "red sphere on snow")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    return Pipeline.from_bundle(make_tiny_bundle(tmp_path_factory.mktemp("runner") / "tiny"), threads=1)


# ---------------------------------------------------------------- subjects


def test_requests_go_through_all_subjects_and_begin_anew_with_new_seeds() -> None:
    subjects = Subjects("prompts", PROMPTS)
    red, green, snow = PROMPTS
    assert subjects.request(0, 2) == {"prompts": [red, green], "seed": [10_000, 10_001]}
    assert subjects.request(1, 2, 7) == {"prompts": [snow, red], "seed": [9, 10]}
    assert Subjects("class_ids", [3, 5]).request(0, 1, 0) == {"class_ids": [3], "seed": [0]}
    assert Subjects("class_ids", [3, 5]).labels == ["class 3", "class 5"]


@pytest.mark.parametrize("images", [1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize("seeds", [1, 3])
def test_every_subject_is_asked_for_with_every_seed_once(images: int, seeds: int) -> None:
    asked = []
    for request in Subjects("prompts", PROMPTS).requests(images, seeds, 100):
        assert len(request["prompts"]) * request["num_images"] <= max(images, 1)
        for prompt, first in zip(request["prompts"], request["seed"], strict=True):
            asked += [(prompt, first + i) for i in range(request["num_images"])]
    assert asked == [(prompt, 100 + seeds * i + k) for i, prompt in enumerate(PROMPTS) for k in range(seeds)]


def test_subjects_are_those_of_a_file_or_of_the_bundle(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    words = open_bundle(make_tiny_bundle(tmp_path / "words"))
    assert subjects_of(words, tmp_path / "prompts.txt", 2) == Subjects("prompts", list(PROMPTS[:2]))
    classes = open_bundle(make_tiny_bundle(tmp_path / "classes", "class"))
    assert subjects_of(classes, None, 3) == Subjects("class_ids", [0, 3, 6])
    assert subjects_of(classes, None) == Subjects("class_ids", list(range(10)))
    scenes = open_bundle("scenes")
    assert subjects_of(scenes, None).items == scenes.path("prompts").read_text().splitlines()


# ---------------------------------------------------------------- turns


def test_every_turn_begins_with_another_method_and_likelihoods_wait_for_its_end(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def recorded(name: str, real: Any) -> Any:
        def record(*given: Any, **options: Any) -> Any:
            called.append(f"{name} {options['method']}")
            return real(*given, **options)

        return record

    for name in ("stream", "likelihoods"):
        monkeypatch.setattr(pipeline, name, recorded(name, getattr(pipeline, name)))
    contenders = parse_contenders("sjd,eagle", {}, pipeline.bundle)
    subjects = Subjects("prompts", PROMPTS)
    turns = list(take_turns(pipeline, contenders, [subjects.request(i, 1) for i in range(3)]))
    assert [[one.contender.label for one in turn] for turn in turns] == [["ar", "sjd", "eagle"]] * 3
    assert [one.split()[1] for one in called if one.startswith("stream")] == [
        "ar",
        "sjd",
        "eagle",
        "sjd",
        "eagle",
        "ar",
        "eagle",
        "ar",
        "sjd",
    ]
    assert [one.split()[0] for one in called] == (["stream"] * 3 + ["likelihoods"] * 3) * 3


def test_a_run_is_what_the_pipeline_gives(pipeline: Pipeline) -> None:
    request = {"prompts": PROMPTS[:2], "seed": [5, 6]}
    one = run(pipeline, Contender("relaxed", {"method": "lantern++", "temperature": 0.9}), request)
    result = pipeline(**request, method="lantern++", temperature=0.9)
    assert [codes.tolist() for codes in one.codes] == [codes.tolist() for codes in result.codes]
    assert [image.tobytes() for image in one.images] == [image.tobytes() for image in result.images]
    assert one.settings == result.settings
    assert one.tvd_per_token == pytest.approx(result.stats.realised_tvd / 36)
    assert one.tvd_per_token > 0
    assert one.seconds >= one.statistics.seconds
    assert one.likelihoods == []
    assert scored(pipeline, one, request).likelihoods == pipeline.likelihoods(result.codes, **request, temperature=0.9)


def test_only_what_is_asked_for_is_done(pipeline: Pipeline) -> None:
    plain, request = Contender("ar", {"method": "ar"}), Subjects("prompts", PROMPTS).request(0, 2)
    assert run(pipeline, plain, request, paint=False).images == []
    ((unscored,),) = take_turns(pipeline, [plain], [request], score=False)
    assert (len(unscored.images), unscored.likelihoods) == (2, [])


def test_a_turn_that_is_not_done_in_time_is_dropped_with_those_after_it(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    contenders = parse_contenders("sjd", {}, pipeline.bundle)
    looks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(looks))
    requests = [Subjects("prompts", PROMPTS).request(i, 1) for i in range(9)]
    turns = list(take_turns(pipeline, contenders, requests, paint=False, score=False, deadline=100))
    assert 0 < len(turns) < 3  # 35 looks of each `ar`: one after every pass but the last
    assert all(len(one.codes[0]) == 36 for turn in turns for one in turn)
    assert next(looks) == 102  # the first one past the deadline was the last


# ---------------------------------------------------------------- method strings


def test_parameters_of_a_method_string_reach_its_options_and_ar_comes_first(pipeline: Pipeline) -> None:
    contenders = parse_contenders("lantern++:lambda=3:tree=chain-3, sjd", {"temperature": 0.5}, pipeline.bundle)
    assert [one.label for one in contenders] == ["ar", "lantern++:lambda=3:tree=chain-3", "sjd"]
    settings = pipeline(PROMPTS[0], **contenders[1].options).settings.as_dict()
    assert (settings["lambda"], settings["tree"], settings["temperature"]) == (3, "chain-3", 0.5)
    assert [one.label for one in parse_contenders("sjd,ar", {}, pipeline.bundle)] == ["ar", "sjd"]
    with pytest.raises(RequestError, match="found 'sjd' twice"):
        parse_contenders("sjd,sjd", {}, pipeline.bundle)
