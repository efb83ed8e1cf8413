"""Reading checkpoint files safely: tensors only, no code, every weight finite, every key accounted for.

Files are mapped, not copied: a weight is in memory only while it is read, in the type it is stored in.
Does not know model families: which keys there should be is the caller's business.
"""

from __future__ import annotations

import argparse
import json
import pickle
import struct
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ...errors import CheckpointError

Weights = dict[str, Tensor]

_WRAPPERS = ("model", "module", "state_dict")
_SHOWN = 6  # names listed in a message before the rest is counted


def read_weights(path: Path) -> Weights:
    """The state dict in a `.pt`, `.pth`, `.bin` or `.safetensors` file, mapped, checked to be finite.

    Tensors keep their type; whoever computes with them converts them (`parity.py`, `weight_file.py`).
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    for wrapper in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
            break
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"{path}: expected a state dict, found {_kind(content)}")
    weights: Weights = {}
    for name, value in content.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: expected a state dict of tensors, found {_kind(value)} under {name!r}")
        weights[str(name)] = value.detach()
        if not _is_finite(value):
            raise CheckpointError(f"{path}: weight {name} has NaN or infinite values")
    return weights


def read_config(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: expected JSON, found {_line(error)}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {_kind(config)}")
    return config


def config_int(config: Mapping[str, Any], name: str, path: Path) -> int | None:
    """A positive whole number of a configuration, None if it is not there."""
    value = config.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{path}: {name} is {value!r}, expected a whole number of at least 1")
    return value


def config_float(config: Mapping[str, Any], name: str, default: float, path: Path) -> float:
    """A positive number of a configuration, or its default."""
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise CheckpointError(f"{path}: {name} is {value!r}, expected a positive number")
    return float(value)


def shape_of(weights: Weights, name: str, dimensions: int, path: Path) -> tuple[int, ...]:
    """Shape of a weight that must be there, with so many dimensions."""
    if name not in weights:
        raise CheckpointError(f"{path}: missing weight {name}")
    shape = tuple(weights[name].shape)
    if len(shape) != dimensions or 0 in shape:
        raise CheckpointError(f"{path}: weight {name} has shape {list(shape)}, expected {dimensions} sizes")
    return shape


def count_blocks(weights: Iterable[str], prefix: str) -> int:
    """How many consecutive numbers 0, 1, ... follow `prefix` in the names."""
    heads = {name[len(prefix) :].split(".")[0] for name in weights if name.startswith(prefix)}
    numbers = {int(head) for head in heads if head.isdecimal()}
    return next(i for i in range(len(numbers) + 1) if i not in numbers)


def fill(module: nn.Module, weights: Weights, path: Path, names: Mapping[str, str] | None = None) -> None:
    """Load weights into a module, strictly; `names` maps the module's names to the checkpoint's, for messages.

    Every parameter and buffer of the module must be given with its shape, and nothing else may be given.
    The module takes the tensors themselves, in their type; `without_weights()` builds it without its own.
    """
    wanted = module.state_dict()
    shown = {name: (names or {}).get(name, name) for name in wanted.keys() | weights.keys()}
    problems = [
        f"{word}: {_listing(shown[n] for n in found)}"
        for word, found in (("missing", wanted.keys() - weights.keys()), ("unexpected", weights.keys() - wanted.keys()))
        if found
    ]
    problems += [
        f"{shown[name]} has shape {list(weights[name].shape)}, expected {list(value.shape)}"
        for name, value in wanted.items()
        if name in weights and weights[name].shape != value.shape
    ][:_SHOWN]
    if problems:
        raise CheckpointError(f"{path}: the weights do not fit the model; {'; '.join(problems)}")
    for prefix, part in module.named_modules():
        for own in (part._parameters, part._buffers):
            for leaf, old in own.items():
                name = f"{prefix}.{leaf}" if prefix else leaf
                if old is not None and name in wanted:  # others are computed by the module itself
                    weight = weights[name]
                    own[leaf] = nn.Parameter(weight, requires_grad=False) if own is part._parameters else weight
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())), "left without weights"
    module.requires_grad_(False).eval()


def _read_torch(path: Path) -> Any:
    try:
        zipped = zipfile.is_zipfile(path)  # files of PyTorch before 1.6 are not, and cannot be mapped
        with torch.serialization.safe_globals([argparse.Namespace]):  # the training arguments some files keep
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:  # its own message advises to load the file unsafely
        if "GLOBAL" in str(error):
            reason = "holds more than tensors (its pickle calls code) and is not loaded; save its state dict alone"
        else:
            reason = "is not a PyTorch checkpoint, or is cut short"
        raise CheckpointError(f"{path}: {reason}") from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: is not a PyTorch checkpoint, or is cut short ({_line(error)})") from error


def _read_safetensors(path: Path) -> Any:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, struct.error) as error:
        raise CheckpointError(f"{path}: is not a safetensors file, or is cut short ({_line(error)})") from error


def _is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite; reads a mapped tensor once and copies nothing."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)  # a NaN anywhere makes both NaN
    return bool(torch.isfinite(low) and torch.isfinite(high))


def _line(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:100]


def _kind(value: object) -> str:
    return "an empty dict" if isinstance(value, Mapping) and not value else f"a {type(value).__name__}"


def _listing(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more
