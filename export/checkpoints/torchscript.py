"""Weights out of a TorchScript archive (`.jit`), of which nothing is run or unpickled.

Such a file is a zip archive of code, of tensors, and of a pickle that says which module has which. The opcodes of that
pickle are read one by one, and the few that describe modules and tensors make lists, dicts and tensors; a class or
function that it names stays a name, and any other opcode is refused. The code is not looked at.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MOST_BYTES = 1 << 22  # of the pickle; published ones have some ten thousands
_LONGEST_NAME = 300  # characters
_LOCAL_HEADER = struct.Struct("<26xHH")  # of an archive's entry: lengths of what is between it and the content
_REBUILD = "torch._utils _rebuild_tensor_v2"
_STORAGES = {
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch FloatStorage": torch.float32,
    "torch DoubleStorage": torch.float64,
    "torch IntStorage": torch.int32,
    "torch LongStorage": torch.int64,
}
_PLAIN = {"BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
_CONSTANTS = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None, "EMPTY_TUPLE": ()}


class _Module(list[Any]):
    """A module's attributes, once they are there: a dict."""


def read_torchscript(path: Path) -> dict[str, Tensor]:
    """The parameters and buffers of the module in an archive, mapped, by their names.

    Raises: whatever its readers do of a file that is none; ValueError for what is no tensor of plain numbers.
    """
    whole = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        (listing,) = (name for name in entries if name.endswith("/data.pkl"))
        if entries[listing].file_size > _MOST_BYTES:
            raise ValueError(f"its list of weights has {entries[listing].file_size:,} bytes")

        def numbers(reference: Any) -> Tensor:
            """What a storage holds, of its type."""
            _, kind, key, _, _ = reference
            entry = entries[f"{listing.removesuffix('.pkl')}/{key}"]
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{entry.filename} is compressed")
            header = whole[entry.header_offset :][: _LOCAL_HEADER.size].numpy().tobytes()
            start = entry.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
            return whole[start : start + entry.file_size].view(_STORAGES[kind])

        root = _read_opcodes(archive.read(listing), numbers)
    weights: dict[str, Tensor] = {}
    _collect(root, "", weights, set())
    return weights


def _collect(module: Any, prefix: str, weights: dict[str, Tensor], before: set[int]) -> None:
    """Name the tensors of a module and of those in it; before: modules that were met."""
    if id(module) in before or len(prefix) > _LONGEST_NAME:
        raise ValueError(f"a module within itself, or twice: {prefix[:_LONGEST_NAME]}")
    before.add(id(module))
    (attributes,) = module
    for name, value in attributes.items():
        if isinstance(value, Tensor):
            weights[prefix + name] = value
        elif isinstance(value, _Module):
            _collect(value, f"{prefix}{name}.", weights, before)


def _read_opcodes(stream: bytes, numbers: Callable[[Any], Tensor]) -> Any:
    """What the opcodes of a pickle describe; numbers: gives a storage that it refers to."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def from_mark() -> list[Any]:
        start = marks.pop()
        taken = stack[start:]
        del stack[start:]
        return taken

    for opcode, argument, _ in pickletools.genops(stream):
        name = opcode.name
        if name in _PLAIN or name == "GLOBAL":
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "TUPLE":
            stack.append(tuple(from_mark()))
        elif name == "APPENDS":
            items = from_mark()
            stack[-1].extend(items)
        elif name == "SETITEMS":
            items = from_mark()
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name == "NEWOBJ":
            stack[-2:] = [_Module()]
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].append(state)
        elif name == "BINPERSID":
            stack[-1] = numbers(stack[-1])
        elif name == "REDUCE":
            arguments = stack.pop()
            stack[-1] = _tensor(*arguments) if stack[-1] == _REBUILD else None
        elif name not in ("PROTO", "STOP"):
            raise ValueError(f"its list of weights has the opcode {name}")
    (result,) = stack
    return result


def _tensor(storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
    return storage[offset:].as_strided(size, stride)
