"""Reading checkpoint files safely: fields, tokenizers and tensors only, no code, every weight finite.

Weights are mapped, not copied: a weight is in memory only while it is read, in the type it is stored in.
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
from ...inputs import format_error, format_value, open_plain_file, read_plain_file, reading
from .pickles import check_pickles
from .torchscript import read_torchscript

Weights = dict[str, Tensor]
Reader = TypeVar("Reader", bound=Callable[..., Any])
Content = TypeVar("Content")

_LOG = logging.getLogger(__name__)
_WRAPPERS = ("model", "module", "state_dict", "ema")  # the first one that a file has; ema: averaged in training
# Parts of names that compiled, data-parallel, sharded, checkpointed and averaged modules add to those of their module.
_ADDED = {"_orig_mod", "module", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_POINTER, _PAGE = re.compile(rb"version https://git-lfs"), re.compile(rb"\s*<(!doctype|html|\?xml)", re.IGNORECASE)
TOKENIZER = "tokenizer.json"
_REMEDY = "give the model's own tokenizer"
_TEXT_LIMIT = 1 << 26  # bytes of a configuration or index; published ones have a few megabytes at most
_LONGEST_NAME = 300  # characters of a weight's name
_SHARING = 4  # times that the numbers of a file may be used, by weights with two names
_TYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool}
_TYPES |= {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
SHOWN = 6  # names listed in a message before the rest is counted


def refusing(read: Reader) -> Reader:
    """Decorates a reader of a user's file or folder, its first argument: whatever goes wrong is a CheckpointError.

    Warnings of libraries about the file stay unsaid.
    """

    @wraps(read)
    def refuse(*args: Any, **named: Any) -> Any:
        path = [*args, *named.values()][0]
        remedy = "download it again, or save it again as plain tensors"
        with (
            reading(path, "a checkpoint's file or folder", CheckpointError, remedy),
            warnings.catch_warnings(action="ignore"),
        ):
            _refuse_stand_in(path)
            return read(*args, **named)

    return cast(Reader, refuse)


def _refuse_stand_in(path: Path) -> None:
    if path.is_file():
        with open_plain_file(path) as file:
            start = file.read(64)
        found = "a Git LFS pointer" if _POINTER.match(start) else "a web page" if _PAGE.match(start) else ""
        if found:
            raise refusal(path, found=found, remedy="fetch the file itself, by `git lfs pull` or its download link")


def refusal(place: Path, name: str = "", problem: str = "", **parts: str) -> CheckpointError:
    """An error about a checkpoint.

    Args:
        place: its file or folder.
        name: of the weight or field at fault, as the file has it.
        problem: as `LanternError` takes it, and so are the other parts.
    """
    return CheckpointError(problem, field=f"{place}: {name}" if name else str(place), **parts)


@dataclass(frozen=True)
class Config:
    """Fields read from `path`; names: what the file calls a field, where readers call it otherwise."""

    path: Path
    values: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)

    def error(self, name: str = "", problem: str = "", **parts: str) -> CheckpointError:
        """An error about a field of this file, or all of it; its value is found unless `parts` say more."""
        if name and not problem:
            parts.setdefault("found", format_value(self.get(name)))
        return refusal(self.path, self.names.get(name, name), problem, **parts)

    def get(self, name: str, default: Any = None) -> Any:
        """A field as it is."""
        return self.values.get(self.names.get(name, name), default)

    def whole(self, name: str) -> int | None:
        """A positive whole number, None if the field is not there. Raises: CheckpointError."""
        value = self.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise self.error(name, expected="a whole number of at least 1")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive number, or its default. Raises: CheckpointError."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(name, expected="a positive number")
        return float(value)

    def section(self, *names: str) -> Config:
        """The fields under a name, or under names within each other. Raises: CheckpointError."""
        content: Any = self.values
        for name in names:
            content = content.get(name) if isinstance(content, Mapping) else None
        if not isinstance(content, Mapping):
            raise refusal(self.path, ".".join(names), found="nothing", expected="the model's settings there")
        return replace(self, values=content)

    def expect(self, name: str, *allowed: Any, remedy: str = "give files of one model") -> None:
        """Refuse a field of any other value. Raises: CheckpointError."""
        if self.get(name) not in allowed:
            choices = " or ".join(format_value(choice) for choice in allowed if choice is not None) or "none"
            raise self.error(name, expected=choices, remedy=remedy)

    def know(self, names: Collection[str]) -> None:
        """Refuse a field of any other name. Raises: CheckpointError."""
        if unknown := sorted(self.values.keys() - names):
            remedy = "correct its name or leave it out"
            raise refusal(self.path, unknown[0], "unknown field", expected=", ".join(sorted(names)), remedy=remedy)

    def agree(self, **sizes: int) -> None:
        """Refuse a field that contradicts what the weights have. Raises: CheckpointError."""
        for name, size in sizes.items():
            if self.whole(name) not in (None, size):
                raise self.error(name, expected=f"{size}, as the weights have")


@refusing
def read_config(path: Path) -> Config:
    """A JSON object from a file. Raises: CheckpointError."""
    try:
        values = json.loads(read_text(path), object_pairs_hook=_fields_once)
    except (ValueError, RecursionError) as error:
        raise refusal(path, found=format_error(error), expected="JSON") from error
    if not isinstance(values, dict):
        raise refusal(path, found=f"a {type(values).__name__}", expected="a JSON object")
    return Config(path, values)


def _fields_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    twice = next((name for name, value in pairs if fields[name] != value), None)
    if twice is not None:
        raise ValueError(f"{format_value(twice)} twice, with two values")
    return fields


@refusing
def read_text(path: Path) -> str:
    """Read a short text from a plain file. Raises: CheckpointError."""
    return read_plain_file(path, _TEXT_LIMIT).decode("utf-8")


@refusing
def read_tokenizer(
    path: Path, rows: int, named: Mapping[str, int] | None = None, content: bytes | None = None
) -> Tokenizer:
    """The tokenizer of a model.

    Args:
        path: its `tokenizer.json`.
        rows: token ids that the model embeds.
        named: ids that some tokens must have.
        content: what a file of another format at `path` is as a `tokenizer.json`.

    Raises:
        CheckpointError: it cannot be read, gives ids that the model does not embed, or other ids than `named`.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path)) if content is None else Tokenizer.from_buffer(content)
        tokens = tokenizer.get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises plain Exception
        raise refusal(path, found=format_error(error), expected="a tokenizer in JSON") from error
    name, highest = max(tokens.items(), key=lambda item: item[1])
    if highest >= rows:
        expected = f"at most {rows - 1}, as the model embeds {rows} tokens"
        raise refusal(path, f"token {format_value(name)}", found=f"id {highest}", expected=expected, remedy=_REMEDY)
    for name, wanted in (named or {}).items():
        if tokens.get(name) != wanted:
            found = f"id {tokens[name]}" if name in tokens else "no id"
            raise refusal(path, f"token {format_value(name)}", found=found, expected=f"id {wanted}", remedy=_REMEDY)
    return tokenizer


@refusing
def read_weights(
    path: Path, progress: Callable[[int], None] = lambda size: None, averaged: bool | None = None
) -> Weights:
    """Read the state dict in a `.pt`, `.pth`, `.bin`, `.jit` or `.safetensors` file, mapped, in the types stored.

    Names are those of the module itself, without what wrappers added to them.

    Args:
        path: the file.
        progress: told of so many bytes of the file as each weight is read, all together its size.
        averaged: of a file with `ema` and another state dict, whether to take `ema`; None takes the other and warns.

    Raises:
        CheckpointError: also for weights that are no plain tensors, claim more numbers than the file holds, or have
            numbers that are not finite.
    """
    if not path.is_file():
        raise refusal(path, problem="no such file")
    content = _read(path)
    if isinstance(content, Mapping):
        kinds = [wrapper for wrapper in _WRAPPERS if isinstance(content.get(wrapper), Mapping)]
        kind = "ema" if averaged and "ema" in kinds else next(iter(kinds), None)
        if averaged and kind != "ema":
            _LOG.warning("%s: has no ema; taking its only weights", path)
        elif averaged is None and len(kinds) > 1:
            _LOG.warning("%s: has %s; taking %s, --weights ema takes the other", path, " and ".join(kinds), kind)
        content = content if kind is None else content[kind]
    if not isinstance(content, Mapping) or not content:
        found = "an empty dict" if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise refusal(path, found=found, expected="a state dict")
    weights = dict(content)
    for name, value in weights.items():
        if not isinstance(name, str) or len(name) > _LONGEST_NAME or not name.isprintable():
            raise refusal(path, found=format_value(name), expected="names of weights")
        if odd := _oddity(value):
            raise refusal(path, name, found=odd, expected="a tensor")
    size = path.stat().st_size
    claimed = sum(value.numel() * value.element_size() for value in weights.values())
    claimed = max([claimed, *(value.untyped_storage().nbytes() for value in weights.values())])
    if claimed > _SHARING * size:
        found = f"weights of {claimed:,} bytes in a file of {size:,}"
        raise refusal(path, found=found, expected="plain tensors", remedy="save it again")
    left = size
    for name, value in weights.items():
        if value.is_floating_point() and value.numel():  # a mapped tensor is read once and not copied
            low, high = torch.aminmax(value)  # a NaN anywhere makes both NaN
            if not (torch.isfinite(low) and torch.isfinite(high)):
                raise refusal(path, name, found="NaN or infinite values", expected="finite ones")
        read = min(left, value.nbytes)  # weights may share numbers
        left -= read
        progress(read)
    progress(left)
    return unwrap(path, {name: value.detach() for name, value in weights.items()})


def unwrap(path: Path, contents: Mapping[str, Content]) -> dict[str, Content]:
    """Take what wrappers of modules add out of the names of weights in a file.

    Raises: CheckpointError: two weights then have the same name.
    """
    unwrapped: dict[str, Content] = {}
    for name, content in contents.items():
        plain = ".".join(part for part in name.split(".") if part not in _ADDED)
        if plain in unwrapped:
            raise refusal(path, name, f"is a second {plain}", remedy="save the state dict of one module alone")
        if not name.endswith("n_averaged"):  # a buffer of averaged modules
            unwrapped[plain] = content
    return unwrapped


def _oddity(value: Any) -> str | None:
    """What a value is, where it is no plain tensor; only its description is looked at."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_nested:
        return f"a {type(value).__name__} of another layout"
    if value.dtype not in _TYPES:  # quantised ones have types of their own
        return f"numbers of type {str(value.dtype).removeprefix('torch.')}"
    return None if value.device.type == "cpu" else f"a tensor without numbers (device {value.device.type})"


def listing(names: Collection[str]) -> str:
    """Names in order, the first six of them in full."""
    ordered = sorted(names)
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return ", ".join(ordered[:SHOWN]) + more


def _read(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        zipped = check_pickles(path)  # files of PyTorch before 1.6 are no archives, and cannot be mapped
        if path.suffix == ".jit":
            return read_torchscript(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # the training arguments some files keep
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:  # its own message advises to load the file unsafely
        if "GLOBAL" not in str(error):
            raise refusal(path, problem="is not a PyTorch checkpoint, or is cut short") from error
        problem = "holds more than tensors (its pickle calls code) and is not loaded"
        raise refusal(path, problem=problem, remedy="save its state dict alone") from error
    except Exception as error:  # of broken files, readers raise whatever they like
        kind = "safetensors file" if path.suffix == ".safetensors" else "PyTorch checkpoint"
        raise refusal(path, problem=f"is not a {kind}, or is cut short ({format_error(error)})") from error
