"""Text tokenizers: prompts are cleaned, truncated and converted to token ids; wrong prompts and files are rejected."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from lantern_rt.errors import BundleError, RequestError
from lantern_rt.text.captions import clean_caption
from lantern_rt.text.tokenizers import CaptionTokenizer, TemplateTokenizer, load_tokenizer

TOKENIZER_FILE = Path(__file__).parent.parent / "data" / "tiny-text-tokenizer" / "tokenizer.json"
BPE_TOKENIZER_FILE = Path(__file__).parent.parent / "data" / "simplear" / "model" / "tokenizer.json"  # BPE
END_TOKEN = 1


@pytest.fixture
def tokenizer() -> CaptionTokenizer:
    return CaptionTokenizer(load_tokenizer(TOKENIZER_FILE), "llamagen")


def test_the_token_ids_of_a_prompt_end_with_the_end_token(tokenizer: CaptionTokenizer) -> None:
    ids = tokenizer.encode("a red cube", 120)
    assert ids.dtype == np.int64
    assert ids.tolist() == [*tokenizer.hf_tokenizer.encode("a red cube", add_special_tokens=False).ids, END_TOKEN]


def test_a_truncated_prompt_still_ends_with_the_end_token(tokenizer: CaptionTokenizer) -> None:
    all_ids = tokenizer.encode("a red cube on the snow, " * 20, 1000)
    for slots in (1, 2, 7, 120, len(all_ids) - 1):
        assert tokenizer.encode("a red cube on the snow, " * 20, slots).tolist() == [*all_ids[: slots - 1], END_TOKEN]
    assert tokenizer.encode("a red cube on the snow, " * 20, len(all_ids)).tolist() == all_ids.tolist()


def test_prompts_are_cleaned_only_if_the_bundle_says_so(tokenizer: CaptionTokenizer) -> None:
    tokenizer_without_cleaning = CaptionTokenizer(load_tokenizer(TOKENIZER_FILE), None)
    assert tokenizer.encode("A RED cube (c)", 120).tolist() == tokenizer.encode("a red cube c", 120).tolist()
    capitals, small_letters = (tokenizer_without_cleaning.encode(text, 120) for text in ("A RED cube", "a red cube"))
    assert capitals.tolist() != small_letters.tolist()


def test_truncation_and_padding_stored_in_the_file_are_ignored(tmp_path: Path) -> None:
    saved_tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZER_FILE))
    saved_tokenizer.enable_truncation(3)
    saved_tokenizer.enable_padding(length=50)
    saved_tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids, expected_ids = (
        CaptionTokenizer(load_tokenizer(path), None).encode("a red cube on the snow", 120).tolist()
        for path in (tmp_path / "tokenizer.json", TOKENIZER_FILE)
    )
    assert ids == expected_ids


def test_dropout_stored_in_the_file_is_ignored(tmp_path: Path) -> None:
    saved_tokenizer = json.loads(BPE_TOKENIZER_FILE.read_text("utf-8"))
    saved_tokenizer["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved_tokenizer), "utf-8")
    prompts = [f"a red fox in deep snow {i}" for i in range(20)]
    tokenizer_with_dropout, tokenizer_without_dropout = (
        TemplateTokenizer(load_tokenizer(path)) for path in (tmp_path / "tokenizer.json", BPE_TOKENIZER_FILE)
    )
    assert [tokenizer_with_dropout.encode(text, 120).tolist() for text in prompts] == [
        tokenizer_without_dropout.encode(text, 120).tolist() for text in prompts
    ]


@pytest.mark.parametrize("prompt", ["中文", "***", "http://example.com", "   "])
def test_a_prompt_that_is_empty_after_cleaning_is_rejected(tokenizer: CaptionTokenizer, prompt: str) -> None:
    with pytest.raises(RequestError, match=r"^prompt: found only text .*expected a description in English"):
        tokenizer.encode(prompt, 120)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"model": 3}'])
def test_a_file_that_is_not_a_tokenizer_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(BundleError, match=r"tokenizer\.json: .*, expected a tokenizer; export the bundle again"):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.fixture
def word_tokenizer_file(tmp_path: Path) -> Path:
    """Return a tokenizer file with four words that also sets truncation, padding and a special token."""
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    tokenizer = {
        "version": "1.0",
        "truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"},
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        },
        "model": {"type": "WordLevel", "vocab": {"<s>": 0, "a": 1, "red": 2, "cube": 3, "<?>": 4}, "unk_token": "<?>"},
    }
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(tokenizer))
    return file


def test_a_template_tokenizer_adds_no_tokens_and_cuts_none(word_tokenizer_file: Path) -> None:
    assert TemplateTokenizer(load_tokenizer(word_tokenizer_file)).encode("a red cube", 8).tolist() == [1, 2, 3]


def test_a_prompt_with_too_many_or_no_tokens_is_rejected(word_tokenizer_file: Path) -> None:
    with pytest.raises(RequestError, match=r"^prompt: found 3 tokens, expected at most 2$"):
        TemplateTokenizer(load_tokenizer(word_tokenizer_file)).encode("a red cube", 2)
    with pytest.raises(RequestError, match=r"^prompt: found no tokens, expected a few words$"):
        TemplateTokenizer(load_tokenizer(word_tokenizer_file)).encode("\u3000", 2)


def test_cleaned_prompts_equal_the_recorded_results() -> None:
    pairs = json.loads((TOKENIZER_FILE.parents[1] / "llamagen-captions/cleaned.json").read_text("utf-8"))
    assert len(pairs) > 200
    assert [pair for pair in pairs if clean_caption(pair[0]) != pair[1]] == []
