"""The word tokenizer: prompts of known words as token ids, and errors of wrong prompts and tokenizer files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from refusals import catch_error
from tokenizers import Tokenizer

from lantern_rt.bundle.files import EMBEDDED
from lantern_rt.errors import BundleError, RequestError
from lantern_rt.text.words import WordTokenizer, read_word_tokenizer

WORDS = ["<pad>", "<unk>", "a", "ball", "blue", "cube", "on", "red", "snow", "under"]


def make_tokenizer_json(**model: Any) -> dict[str, Any]:
    """Return the content of a `tokenizer.json` of the `tokenizers` library, with other fields of `model`."""
    defaults = {"type": "WordLevel", "unk_token": "<unk>", "vocab": {word: i for i, word in enumerate(WORDS)}}
    return {"version": "1.0", "added_tokens": [], "model": defaults | model}


def write_json(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data))
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> WordTokenizer:
    return read_word_tokenizer(write_json(tmp_path / "tokenizer.json", make_tokenizer_json()))


def get_encode_error(tokenizer: WordTokenizer, prompt: str, slots: int = 8) -> str:
    error = catch_error(RequestError, tokenizer.encode, prompt, slots)
    assert "\n" not in str(error)
    return str(error)


def test_words_are_encoded_as_ids_padded_on_the_right(tokenizer: WordTokenizer) -> None:
    ids = tokenizer.encode("A red ball, on SNOW!", 8)
    assert ids.tolist() == [2, 7, 3, 6, 8, 0, 0, 0]
    assert ids.dtype == "int64"
    assert tokenizer.words == ("a", "ball", "blue", "cube", "on", "red", "snow", "under")
    assert tokenizer.encode("a-red_ball\n(blue)", 4).tolist() == [2, 7, 3, 4]


def test_an_unknown_word_names_the_most_similar_word(tokenizer: WordTokenizer) -> None:
    message = get_encode_error(tokenizer, "a rad ball under xylophones")
    assert "unknown words 'rad' (did you mean red?), 'xylophones', expected words among the 8" in message
    assert "and 2 more" in get_encode_error(tokenizer, "zzz yyy xxx www vvv")
    assert "did you mean" not in get_encode_error(tokenizer, "a bon")  # `on` is not similar enough


def test_an_unknown_word_lists_known_words_or_example_prompts(tokenizer: WordTokenizer) -> None:
    assert "this model knows: a, ball, blue, cube, on, red, snow, under;" in get_encode_error(tokenizer, "dragon")
    with_examples = replace(tokenizer, example_prompts=("a blue ball under snow",))
    assert "this model knows, such as blue, ball, under;" in get_encode_error(with_examples, "dragon")


@pytest.mark.parametrize("prompt", ["<pad>", "a <unk>", "3 ball", "a café ball", "球"])
def test_digits_and_letters_beyond_a_to_z_are_unknown_words(tokenizer: WordTokenizer, prompt: str) -> None:
    assert "unknown word" in get_encode_error(tokenizer, prompt)


@pytest.mark.parametrize("prompt", ["", "  \n", "?!...", "🙂"])
def test_a_prompt_without_words_is_rejected(tokenizer: WordTokenizer, prompt: str) -> None:
    assert get_encode_error(tokenizer, prompt) == "prompt: found no words, expected 1 to 8 words such as a, ball, blue"


def test_too_many_words_are_rejected_with_the_excess(tokenizer: WordTokenizer) -> None:
    assert len(get_encode_error(tokenizer, " ".join(f"w{i}" for i in range(2000)), slots=3000)) < 300
    assert get_encode_error(tokenizer, "a " * 11) == "prompt: found 11 words, expected at most 8; remove 3"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (None, "expected a tokenizer"),
        (b"\xff{", "expected a tokenizer"),
        ([], "expected a tokenizer"),
        (make_tokenizer_json(type="BPE"), "`model.type`.*WordLevel"),
        (make_tokenizer_json(unk_token="?"), "`model.unk_token`.*<unk>"),
        (make_tokenizer_json(vocab=None), "`model.vocab`"),
        (make_tokenizer_json(vocab={"<pad>": 0, "<unk>": "1"}), "`model.vocab.<unk>`.*whole number"),
        (make_tokenizer_json(vocab={"<pad>": 0, "<unk>": 1, "a": 3}), "`model.vocab`.*each once"),
        (make_tokenizer_json(vocab={"<pad>": 0, "<unk>": 1, "a": 1}), "`model.vocab`.*each once"),
        (make_tokenizer_json(vocab={"a": 0, "<unk>": 1, "<pad>": 2}), "`model.vocab`.*<pad> with id 0"),
        (make_tokenizer_json(vocab={"<pad>": 0, "<unk>": 1}), "`model.vocab`.*then words"),
        (make_tokenizer_json(vocab={"<pad>": 0, "<unk>": 1, "Red\n": 2}), "`model.vocab`.*letters a to z"),
    ],
)
def test_a_file_that_is_not_a_word_tokenizer_is_rejected(tmp_path: Path, data: Any, expected: str) -> None:
    path = tmp_path / "tokenizer.json"
    if isinstance(data, bytes):
        path.write_bytes(data)
    elif data is not None:
        write_json(path, data)
    with pytest.raises(BundleError, match=rf"tokenizer\.json: .*{expected}.*export the bundle again\Z"):
        read_word_tokenizer(path)


def test_the_word_tokenizer_agrees_with_the_tokenizers_library() -> None:
    path = EMBEDDED / "scenes" / "tokenizer.json"
    words = read_word_tokenizer(path)
    library = Tokenizer.from_file(str(path))
    prompt = ", ".join(words.words).upper()
    assert words.encode(prompt, len(words.words)).tolist() == library.encode(prompt).ids
