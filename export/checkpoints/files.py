"""Safe readers of checkpoint files: configurations, tokenizers and weights. They run no code and reject NaN weights.

Weights are memory-mapped, not copied, and keep the dtype of the file.
"""

from __future__ import annotations

import argparse
import json
import logging
import pickle
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from ...errors import CheckpointError
from ...inputs import (
    convert_read_errors,
    format_error,
    format_value,
    open_regular_file,
    read_regular_file,
    reraise_error_of_signal_handler,
)
from ...text.tokenizers import parse_tokenizer
from .pickles import reject_pickle_bombs
from .torchscript import read_torchscript

Weights = dict[str, Tensor]
Reader = TypeVar("Reader", bound=Callable[..., Any])
Item = TypeVar("Item")

_LOG = logging.getLogger(__name__)
# Keys of state dicts by preference; those that end in `ema` are averages over training.
_WRAPPERS = ("model", "module", "state_dict", "vq", "ema", "vq_ema")
# Parts that compiled, data-parallel, sharded, checkpointed and averaged modules add to the names of weights.
_ADDED = {"_orig_mod", "module", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_PEFT_PREFIX = "base_model.model."  # of models in which PEFT has merged an adapter
_POINTER = re.compile(rb"version https://git-lfs")
_PAGE = re.compile(rb"\s*<(!doctype|html|\?xml)", re.IGNORECASE)
TOKENIZER = "tokenizer.json"
_REMEDY = "give the model's own tokenizer"
_TEXT_LIMIT = 1 << 26  # bytes of a configuration or index; published files have a few megabytes at most
_MAX_NAME = 300  # characters of a weight's name
_MAX_SHARING = 4  # maximum size of all weights relative to the file; tied weights share values
_TYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool}
_TYPES |= {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
SHOWN = 6  # maximum number of names in a message; the message counts the others


def wrap_reader_errors(reader: Reader) -> Reader:
    """Return a reader of a path that raises CheckpointError for every failure, and hides warnings of libraries."""

    @wraps(reader)
    def run_reader(*args: Any, **kwargs: Any) -> Any:
        path = [*args, *kwargs.values()][0]
        remedy = "download it again, or save it again as plain tensors"
        with (
            convert_read_errors(path, "a checkpoint's file or folder", CheckpointError, remedy),
            warnings.catch_warnings(action="ignore"),
        ):
            _reject_lfs_pointer_or_web_page(path)
            return reader(*args, **kwargs)

    return cast(Reader, run_reader)


def _reject_lfs_pointer_or_web_page(path: Path) -> None:
    if path.is_file():
        with open_regular_file(path) as file:
            start = file.read(64)
        kind = "a Git LFS pointer" if _POINTER.match(start) else "a web page" if _PAGE.match(start) else ""
        if kind:
            raise make_file_error(
                path, found=kind, remedy="fetch the file itself, by `git lfs pull` or its download link"
            )


def make_file_error(path: Path, name: str = "", problem: str = "", **parts: str) -> CheckpointError:
    """Return an error about a checkpoint's file or folder, or about the weight or field `name` in it."""
    return CheckpointError(problem, field=f"{path}: {name}" if name else str(path), **parts)


@dataclass(frozen=True)
class Config:
    """Fields of a configuration file, by their names in the file.

    `aliases` are the names of fields in the file, by the name that the code uses, where the two differ.
    """

    path: Path
    values: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def make_error(self, name: str = "", problem: str = "", **parts: str) -> CheckpointError:
        """Return an error about a field or the whole file; `found` defaults to the value of the field."""
        if name and not problem:
            parts.setdefault("found", format_value(self.get(name)))
        return make_file_error(self.path, self.aliases.get(name, name), problem, **parts)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a field, or `default` if it is missing or null."""
        value = self.values.get(self.aliases.get(name, name))
        return default if value is None else value

    def with_defaults(self, defaults: Mapping[str, Any]) -> Config:
        """Return the configuration with these values of fields that are missing or null."""
        given = {name: value for name, value in self.values.items() if value is not None}
        return replace(self, values={**defaults, **given})

    def get_integer(self, name: str, low: int = 1) -> int | None:
        """Return a field that must be an integer from `low`; None if the field is missing. Raises: CheckpointError."""
        value = self.get(name)
        if value is not None and (type(value) is not int or value < low):
            raise self.make_error(name, expected=f"a whole number of at least {low}")
        return value

    def get_number(self, name: str, default: float) -> float:
        """Return a positive float32 number, or `default` if the field is missing. Raises: CheckpointError."""
        value = self.get(name, default)
        largest = torch.finfo(torch.float32).max
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= largest:
            raise self.make_error(name, expected=f"a positive number up to {largest:.1e}")
        return float(value)

    def get_section(self, *names: str) -> Config:
        """Return a nested JSON object as a configuration, by the names that lead to it. Raises: CheckpointError."""
        content: Any = self.values
        for name in names:
            content = content.get(name) if isinstance(content, Mapping) else None
        if not isinstance(content, Mapping):
            raise make_file_error(
                self.path, ".".join(names), found="nothing", expected="a JSON object with settings of the model"
            )
        return replace(self, values=content)

    def check_value(self, name: str, *allowed: Any, remedy: str = "give files of one model") -> None:
        """Raise CheckpointError unless a field has an allowed value; None allows a missing field."""
        if self.get(name) not in allowed:
            choices = " or ".join(format_value(choice) for choice in allowed if choice is not None) or "none"
            raise self.make_error(name, expected=choices, remedy=remedy)

    def reject_unknown_fields(self, known_names: Collection[str]) -> None:
        """Raise CheckpointError if a field has another name than these."""
        if unknown := sorted(self.values.keys() - known_names):
            remedy = "correct its name or leave it out"
            raise make_file_error(
                self.path, unknown[0], "unknown field", expected=", ".join(sorted(known_names)), remedy=remedy
            )

    def check_sizes_match_weights(self, **sizes: int) -> None:
        """Raise CheckpointError unless each field has the size that the weights have, or is missing."""
        for name, size in sizes.items():
            if self.get_integer(name) not in (None, size):
                raise self.make_error(name, expected=f"{size}, as in the weights")


@wrap_reader_errors
def read_config(path: Path) -> Config:
    try:
        values = json.loads(read_text(path), object_pairs_hook=_reject_duplicate_fields)
    except (ValueError, RecursionError) as error:
        raise make_file_error(path, found=format_error(error), expected="JSON") from error
    if not isinstance(values, dict):
        raise make_file_error(path, found=f"a {type(values).__name__}", expected="a JSON object")
    return Config(path, values)


def _reject_duplicate_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    duplicate = next((name for name, value in pairs if fields[name] != value), None)
    if duplicate is not None:
        raise ValueError(f"the key {format_value(duplicate)} twice, with different values")
    return fields


@wrap_reader_errors
def read_text(path: Path, max_bytes: int = _TEXT_LIMIT) -> str:
    """Read a UTF-8 text file of at most `max_bytes` bytes."""
    return read_regular_file(path, max_bytes).decode("utf-8")


@wrap_reader_errors
def read_tokenizer(
    path: Path, vocab_size: int, required_ids: Mapping[str, int] | None = None, tokenizer_json: bytes | None = None
) -> Tokenizer:
    """Read the tokenizer of a model, whose embedding table has `vocab_size` rows, and which must have `required_ids`.

    `tokenizer_json` is the tokenizer converted to `tokenizer.json`, if `path` has another format.
    """
    try:
        tokenizer = parse_tokenizer(read_regular_file(path, _TEXT_LIMIT) if tokenizer_json is None else tokenizer_json)
        tokens = tokenizer.get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises plain Exception
        reraise_error_of_signal_handler(error)
        raise make_file_error(path, found=format_error(error), expected="a tokenizer in JSON") from error
    name, highest = max(tokens.items(), key=lambda item: item[1])
    if highest >= vocab_size:
        expected = f"at most {vocab_size - 1}, as the model embeds {vocab_size} tokens"
        raise make_file_error(
            path, f"token {format_value(name)}", found=f"id {highest}", expected=expected, remedy=_REMEDY
        )
    for name, wanted in (required_ids or {}).items():
        if tokens.get(name) != wanted:
            actual = f"id {tokens[name]}" if name in tokens else "no id"
            raise make_file_error(
                path, f"token {format_value(name)}", found=actual, expected=f"id {wanted}", remedy=_REMEDY
            )
    return tokenizer


@wrap_reader_errors
def read_weights(
    path: Path,
    progress: Callable[[int], None] = lambda size: None,
    prefer_ema: bool | None = None,
    name_filter: Callable[[str], bool] = lambda name: True,
) -> Weights:
    """Read the state dict of a `.pt`, `.pth`, `.bin`, `.jit` or `.safetensors` file.

    The tensors are memory-mapped and keep the dtypes of the file. Prefixes that wrapper modules added to names of
    weights are removed. Tensors must be plain, finite and, together, not larger than the file.

    Args:
        progress: gets the number of bytes read since the last call.
        prefer_ema: whether to read the averaged weights (the state dict `ema`) if the file also has other weights.
            None: the other weights are read, with a warning.
        name_filter: returns whether to read the weight with a name.
    """
    if not path.is_file():
        raise make_file_error(path, problem="no such file")
    content = _load_file(path)
    if isinstance(content, Mapping):
        kinds = [wrapper for wrapper in _WRAPPERS if isinstance(content.get(wrapper), Mapping)]
        averages = [kind for kind in kinds if kind.endswith("ema")]
        kind = next(iter(averages if prefer_ema and averages else kinds), None)
        if prefer_ema and not averages:
            _LOG.warning("%s: has no ema; using its only weights", path)
        elif prefer_ema is None and len(kinds) > 1:
            _LOG.warning("%s: has %s; using %s, --weights ema selects the other", path, " and ".join(kinds), kind)
        content = content if kind is None else content[kind]
    if not isinstance(content, Mapping) or not content:
        contents = "an empty dict" if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise make_file_error(path, found=contents, expected="a state dict")
    for name in content:
        if not isinstance(name, str) or len(name) > _MAX_NAME or not name.isprintable():
            raise make_file_error(path, found=format_value(name), expected="names of weights")
    names = {
        plain: name
        for plain, name in strip_wrapper_prefixes(path, {name: name for name in content}).items()
        if name_filter(plain)
    }
    weights = {name: content[name] for name in names.values()}
    for name, value in weights.items():
        if fault := _explain_invalid_tensor(value):
            raise make_file_error(path, name, found=fault, expected="a tensor")
    # A small damaged file may declare huge weights that share storage; they would fill the memory when converted.
    size = path.stat().st_size
    claimed = sum(value.numel() * value.element_size() for value in weights.values())
    claimed = max([claimed, *(value.untyped_storage().nbytes() for value in weights.values())])
    if claimed > _MAX_SHARING * size:
        sizes = f"weights of {claimed:,} bytes in a file of {size:,}"
        raise make_file_error(path, found=sizes, expected="plain tensors", remedy="save it again")
    remaining = size
    for name, value in weights.items():
        if value.is_floating_point() and value.numel():  # aminmax reads a mapped tensor once, without a copy
            low, high = torch.aminmax(value)  # both are NaN if any value is NaN
            if not (torch.isfinite(low) and torch.isfinite(high)):
                raise make_file_error(path, name, found="NaN or infinite values", expected="finite values")
        read = min(remaining, value.nbytes)  # weights may share storage
        remaining -= read
        progress(read)
    progress(remaining)
    return {plain: weights[name].detach() for plain, name in names.items()}


@wrap_reader_errors
def read_training_arguments(path: Path) -> Config:
    """Read the arguments that a training program stored beside the weights of a file; empty if there are none."""
    content = _load_file(path) if path.is_file() and path.suffix in (".pt", ".pth") else {}
    arguments = content.get("args") if isinstance(content, Mapping) else None
    arguments = vars(arguments) if isinstance(arguments, argparse.Namespace) else arguments
    return Config(path, arguments if isinstance(arguments, Mapping) else {})


def strip_wrapper_prefixes(path: Path, values_by_name: Mapping[str, Item]) -> dict[str, Item]:
    """Remove the parts that wrapper modules (such as DataParallel) add to the names of weights, and their counters."""
    unwrapped: dict[str, Item] = {}
    for name, content in values_by_name.items():
        parts = name.removeprefix(_PEFT_PREFIX).split(".")
        plain = ".".join(part for part in parts if part not in _ADDED)
        if plain in unwrapped:
            raise make_file_error(path, name, f"is a second {plain}", remedy="save the state dict of one module alone")
        if not name.endswith("n_averaged"):  # a buffer of averaged modules
            unwrapped[plain] = content
    return unwrapped


def _explain_invalid_tensor(value: Any) -> str | None:
    """Return the reason why a value is not a plain tensor, or None. Its data are not read."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_nested:
        return f"a {type(value).__name__} of another layout"
    if value.dtype not in _TYPES:  # quantised dtypes
        return f"numbers of type {str(value.dtype).removeprefix('torch.')}"
    return None if value.device.type == "cpu" else f"a tensor without values (device {value.device.type})"


def format_names(names: Collection[str]) -> str:
    """Format names in alphabetical order: at most `SHOWN` names, then the number of further names."""
    ordered = sorted(names)
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return ", ".join(ordered[:SHOWN]) + more


def _load_file(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        zipped = reject_pickle_bombs(path)  # files of PyTorch before 1.6 are not archives and cannot be mapped
        if path.suffix == ".jit":
            return read_torchscript(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # training arguments in some files
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:  # the message of PyTorch recommends unsafe loading
        if "GLOBAL" not in str(error):
            raise make_file_error(path, problem="is not a PyTorch checkpoint, or is cut short") from error
        problem = "holds more than tensors (its pickle calls code) and is not loaded"
        raise make_file_error(path, problem=problem, remedy="save its state dict alone") from error
    except Exception as error:  # readers raise any exception for damaged files
        reraise_error_of_signal_handler(error)
        # The whole file is mapped, and the system counts it as memory. Words of PyTorch, and of safetensors:
        if "unable to mmap" in str(error) or "os error 12" in str(error):
            remedy = "split the file into shards"
            raise make_file_error(path, problem="is larger than the memory", remedy=remedy) from error
        kind = "safetensors file" if path.suffix == ".safetensors" else "PyTorch checkpoint"
        raise make_file_error(path, problem=f"is not a {kind}, or is cut short ({format_error(error)})") from error
