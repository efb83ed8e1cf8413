"""The folder of a text encoder as an exporter needs it: the T5 encoder, its `tokenizer.json`, and what they came from.

Checked to belong together and to the captions of an image model. Does not know graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError, EngineError
from ..checkpoints.files import config_int, read_config
from .t5 import T5Encoder, read_t5

_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class TextEncoder:
    """An encoder, the bytes of its tokenizer, and the files with roles."""

    encoder: T5Encoder
    tokenizer: bytes
    files: tuple[tuple[str, Path], ...]


def read_text_encoder(folder: Path, caption_dim: int) -> TextEncoder:
    """The encoder in a folder such as flan-t5-xl's, for captions of a width.

    Raises CheckpointError if the encoder has another width, or its tokenizer other tokens; EngineError if
    `tokenizers` is not installed.
    """
    path = folder / _TOKENIZER
    if not path.is_file():
        cure = "save it there with transformers' AutoTokenizer" if folder.is_dir() else "give the folder of flan-t5-xl"
        raise CheckpointError(f"{folder}: found no {_TOKENIZER}, expected a text encoder's folder with one; {cure}")
    source = folder / "config.json"
    arguments = read_config(source) if source.is_file() else {}
    _check_width(folder, config_int(arguments, "d_model", source), caption_dim)  # before gigabytes are read
    files = read_t5(folder)
    config = files.encoder.config
    _check_width(folder, config.width, caption_dim)
    tokenizer = path.read_bytes()
    _check_tokenizer(path, tokenizer, config.vocabulary, config_int(arguments, "eos_token_id", source) or 1)
    return TextEncoder(files.encoder, tokenizer, (*files.files, ("text_tokenizer", path)))


def _check_width(folder: Path, width: int | None, caption_dim: int) -> None:
    if width not in (None, caption_dim):
        raise CheckpointError(
            f"{folder}: the text encoder has width {width}, but the transformer's captions {caption_dim}; "
            "LlamaGen's text models take flan-t5-xl (2048)"
        )


def _check_tokenizer(path: Path, content: bytes, vocabulary: int, end: int) -> None:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise EngineError(f"{path}: needs tokenizers; run `pip install 'lantern-rt[export]'`") from error
    try:
        tokenizer = Tokenizer.from_str(content.decode("utf-8"))
        ids = tokenizer.encode("a").ids
    except Exception as error:  # the library raises plain Exception
        brief = " ".join(str(error).split())[:100]
        raise CheckpointError(f"{path}: expected a tokenizer, found {brief}") from error
    if tokenizer.get_vocab_size() > vocabulary:
        raise CheckpointError(
            f"{path}: has {tokenizer.get_vocab_size()} tokens, but the encoder {vocabulary}; give both of one model"
        )
    if not ids or ids[-1] != end:
        raise CheckpointError(
            f"{path}: does not end a text with token {end}, as config.json says; give both of one model"
        )
