"""Prompt agreement: each picture meets its own prompt's tokens, and what does not fit is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from evaluation_graphs import make_agreement, make_features
from PIL import Image
from tiny_bundle import PREFIX, make_tiny_bundle

from lantern_rt import RequestError, open_bundle
from lantern_rt.compare.image_graph import Agreement, Preprocessing, bundle_tokens, file_tokens

WORDS = ("<pad>", "<start>", "a", "red", "cube", "on", "sand")
PAD, START = 0, 1
PROMPTS = ("red cube", "a red cube on sand", "cube", "a cube", "sand on sand on sand")
SUMS = (START + 7, START + 20, START + 4, START + 6, START + 28)
PICTURES = [Image.new("RGB", (8, 8), (51 * i, 51 * i, 51 * i)) for i in range(5)]


def write_tokenizer(path: Path, padding: dict[str, Any] | None = None, truncation: int | None = None) -> Path:
    """One token a word, after a start token."""
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.post_processor = tokenizers.processors.TemplateProcessing("<start> $A", None, [("<start>", START)])
    if padding is not None:
        library.enable_padding(**padding)
    if truncation is not None:
        library.enable_truncation(truncation)
    library.save(str(path))
    return path


def agreement_of(graph: Path, tokenizer: Path) -> Agreement:
    return Agreement(graph, Preprocessing(), tokenizer, 1)


@pytest.mark.parametrize("pictures", ["n", 1, 3])
@pytest.mark.parametrize("every_pair", [False, True])
def test_every_picture_meets_its_own_prompt_unpadded(tmp_path: Path, pictures: int | str, every_pair: bool) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    agreement = agreement_of(make_agreement(tmp_path / "g.onnx", pictures, every_pair=every_pair), tokenizer)
    assert agreement(PICTURES, PROMPTS) == pytest.approx([10 * SUMS[i] + i / 5 for i in range(5)], abs=1e-3)
    again = agreement(PICTURES * 3, ["cube", "a cube", "cube"] * 5)
    assert again == pytest.approx([10 * (4, 6, 4)[i % 3] + 10 + i % 5 / 5 for i in range(15)], abs=1e-3)


@pytest.mark.parametrize(("mask", "padded"), [(True, 0), (False, 2)])
def test_prompts_are_padded_and_cut_to_the_graphs_length(tmp_path: Path, mask: bool, padded: int) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", {"pad_id": 2, "pad_token": "a"}, truncation=77)
    agreement = agreement_of(make_agreement(tmp_path / "g.onnx", length=4, mask=mask), tokenizer)
    found = agreement(PICTURES[:1] * 3, ["cube", "a red cube", "a red cube on sand"])
    assert found == pytest.approx(10 * np.array([START + 4 + 2 * padded, START + 9, START + 9]))


def test_a_shorter_limit_in_the_file_counts(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", {"pad_id": PAD}, truncation=3)
    for length in (6, "length"):
        agreement = agreement_of(make_agreement(tmp_path / "g.onnx", length=length), tokenizer)
        assert agreement(PICTURES[:1], ["red cube on sand"]) == pytest.approx([10 * (START + 7)])


@pytest.mark.parametrize(("length", "slots"), [(None, PREFIX), (9, 9)])
def test_a_bundles_words_are_padded_as_the_model_reads_them_or_as_the_graph_does(
    tmp_path: Path, length: int | None, slots: int
) -> None:
    bundle = open_bundle(make_tiny_bundle(tmp_path / "tiny"))
    ids, mask = bundle_tokens(bundle, length)("Red cube!")
    assert ids.tolist() == [3, 6] + [0] * (slots - 2)
    assert mask.tolist() == [1, 1] + [0] * (slots - 2)


def test_a_graph_that_compares_no_pictures_with_prompts_is_refused(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(
        RequestError, match=r"agreement .*features\.onnx: found inputs pixels .*, expected one float .*"
    ):
        agreement_of(make_features(tmp_path / "features.onnx"), tokenizer)
    agreement = agreement_of(make_agreement(tmp_path / "g.onnx"), tokenizer)
    agreement.session = BrokenSession(np.zeros((1, 5)))
    with pytest.raises(RequestError, match=r"found an output \[1, 5\] of 1 images, expected \[n\]"):
        agreement(PICTURES[:1], ["cube"])
    agreement.session = BrokenSession(np.array([np.nan]))
    with pytest.raises(RequestError, match="gave NaN or infinity"):
        agreement(PICTURES[:1], ["cube"])


class BrokenSession:
    def __init__(self, output: np.ndarray) -> None:
        self.output = output

    def run(self, *_: object) -> list[np.ndarray]:
        return [self.output]


def test_a_graph_that_takes_no_such_length_names_the_cure(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", {"pad_id": PAD})
    agreement = agreement_of(make_agreement(tmp_path / "g.onnx", length=4), tokenizer)
    agreement.tokenize = file_tokens(tokenizer, 6)
    with pytest.raises(RequestError, match=r"failed on pixels \[1, 3, 8, 8\], ids \[1, 6\] .*truncation in"):
        agreement(PICTURES[:1], ["cube"])


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(RequestError, match=r"found no padding in it, but the graph takes 6 tokens; export .* open"):
        file_tokens(tokenizer, 6)
    (tmp_path / "bad.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(
        RequestError, match=r"bad\.json: expected a tokenizer\.json, found .* give another with agreement-tokenizer"
    ):
        file_tokens(tmp_path / "bad.json", None)


def test_tokens_of_a_models_own_text_encoder_are_not_given_to_another_graph(tmp_path: Path) -> None:
    bundle = open_bundle(make_tiny_bundle(tmp_path / "tiny", "embeddings"))
    with pytest.raises(RequestError, match=r"has no word list of its own; give the tokenizer\.json that belongs to"):
        bundle_tokens(bundle, None)
