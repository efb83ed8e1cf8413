"""ONNX graphs that evaluate images: preprocessing, tokenization, and rejection of unsuitable graphs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from evaluation_graphs import make_agreement_graph, make_feature_graph
from PIL import Image
from refusals import catch_error
from tiny_bundle import make_tiny_bundle

from lantern_rt import RequestError, open_bundle
from lantern_rt.compare.image_graph import ImageFeatureModel, Preprocessing, PromptAgreementModel, read_preprocessing

WORDS = ("<pad>", "<start>", "a", "red", "cube", "on", "sand")
START = 1  # token id of <start>
PROMPTS = ("red cube", "a red cube on sand", "cube", "a cube", "sand on sand on sand")
# Sums of token ids; a prompt is truncated to four tokens.
SUMS = (START + 7, START + 9, START + 4, START + 6, START + 17)
IMAGES = [Image.new("RGB", (8, 8), (51 * i, 51 * i, 51 * i)) for i in range(5)]


def write_tokenizer(path: Path) -> None:
    """Write a tokenizer with one token per word after a start token, at most four tokens, with padding."""
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.post_processor = tokenizers.processors.TemplateProcessing("<start> $A", None, [("<start>", START)])
    library.enable_padding(length=9)
    library.enable_truncation(4)
    library.save(str(path))


def load_agreement(graph: Path) -> PromptAgreementModel:
    return PromptAgreementModel(graph, read_preprocessing(graph), open_bundle("scenes"), 1)


def test_image_features_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    images = [Image.new("RGB", (8, 8), (shade, 0, 255)) for shade in range(0, 255, 15)]
    extract = ImageFeatureModel(make_feature_graph(tmp_path / "f.onnx"), Preprocessing(), 1)
    assert extract(images) == pytest.approx(np.array([[i / 17, 0, 1] for i in range(17)]), abs=1e-6)


@pytest.mark.parametrize("size", [9, {"shortest_edge": 9}, {"height": 9, "width": 9}])
def test_images_are_preprocessed_as_the_config_says(tmp_path: Path, size: Any) -> None:
    path = make_feature_graph(tmp_path / "f.onnx", pooled=False, size=9)
    image = Image.new("RGB", (9, 7), (255, 51, 0))

    def extract() -> Any:
        return ImageFeatureModel(path, read_preprocessing(path), 1)([image])

    assert extract() == pytest.approx(np.array([[1, 0.2, 0]]), abs=1e-6)
    config = {"size": size, "image_mean": [0.5, 0, 0], "image_std": [0.5, 1, 2], "resample": 3, "crop_size": None}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    assert extract() == pytest.approx(np.array([[1, 0.2, 0]]), abs=1e-6)
    config |= {"image_mean": [0, 0, 0.5]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    assert extract() == pytest.approx(np.array([[2, 0.2, -0.25]]), abs=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        "[]", "{", '"a"', '{"size": 4}', '{"size": 9.5}', '{"size": {"height": 9, "width": 8}}', '{"size": {}}',
        '{"image_mean": 0.5}', '{"image_mean": [NaN, 0, 0]}', '{"image_std": [0, 1, 1]}', '{"image_std": [1, 1]}',
        "[" * 100_000,
    ],
)  # fmt: skip
def test_an_invalid_preprocessing_file_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(RequestError):
        read_preprocessing(tmp_path / "graph.onnx")


def test_a_file_that_is_not_a_feature_graph_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no graph")
    decoder = make_tiny_bundle(tmp_path / "tiny") / "vq_decoder.onnx"
    os.mkfifo(tmp_path / "pipe.onnx")
    for path in (tmp_path / "bad.onnx", tmp_path / "pipe.onnx", tmp_path / "none.onnx", tmp_path, decoder):
        assert catch_error(RequestError, ImageFeatureModel, path, Preprocessing(), 1).field == f"features {path}"
    graph = make_feature_graph(tmp_path / "f.onnx", size=9)
    error = catch_error(RequestError, ImageFeatureModel, graph, Preprocessing(size=8), 1)
    assert error.expected.startswith("9 x 9")


@pytest.mark.parametrize("every_pair", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_every_image_is_compared_with_the_truncated_prompt(tmp_path: Path, every_pair: bool, mask: bool) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    agreement = load_agreement(make_agreement_graph(tmp_path / "g.onnx", mask=mask, every_pair=every_pair))
    assert agreement(IMAGES, PROMPTS) == pytest.approx([10 * SUMS[i] + i / 5 for i in range(5)], abs=1e-3)
    larger_batch = agreement(IMAGES * 3, ["cube", "a cube", "cube"] * 5)
    assert larger_batch == pytest.approx([10 * (4, 6, 4)[i % 3] + 10 + i % 5 / 5 for i in range(15)], abs=1e-3)


def test_a_graph_that_compares_no_images_is_rejected(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    graph = make_feature_graph(tmp_path / "features.onnx")
    assert catch_error(RequestError, load_agreement, graph).found.startswith("inputs pixels")
    agreement = load_agreement(make_agreement_graph(tmp_path / "g.onnx"))
    agreement.session = SimpleNamespace(run=lambda *_: [np.zeros((1, 5))])
    assert catch_error(RequestError, agreement, IMAGES[:1], ["cube"]).found == "an output [1, 5] of 1 images"
    agreement.session = SimpleNamespace(run=lambda *_: [np.array([np.nan])])
    assert catch_error(RequestError, agreement, IMAGES[:1], ["cube"]).problem == "returned NaN or infinity"


def test_a_fixed_text_length_is_rejected_with_a_remedy(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    agreement = load_agreement(make_agreement_graph(tmp_path / "g.onnx", length=4))
    error = catch_error(RequestError, agreement, IMAGES[:1], ["cube"])
    assert "ids [1, 2]" in error.problem
    assert "truncation in tokenizer.json" in error.remedy


def test_an_invalid_tokenizer_of_the_graph_is_rejected(tmp_path: Path) -> None:
    graph = make_agreement_graph(tmp_path / "g.onnx")
    without_tokenizer = open_bundle(make_tiny_bundle(tmp_path / "tiny", "embeddings"))
    error = catch_error(RequestError, PromptAgreementModel, graph, Preprocessing(), without_tokenizer, 1)
    assert error.field == "agreement"
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(RequestError, match=r"tokenizer\.json: .*expected a tokenizer\.json"):
        load_agreement(graph)
