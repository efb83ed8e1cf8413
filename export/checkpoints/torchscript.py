"""Weights out of a TorchScript archive (`.jit`), of which nothing is run or unpickled.

Such a file is a zip archive of code, of tensors, and of a pickle that says which module has which. Of its opcodes, the
few that describe modules and tensors are followed here, where classes and functions stay names; others are refused.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_LOCAL_HEADER = struct.Struct("<26xHH")  # of an archive's entry: lengths of what is between it and the content
_REBUILD = "torch._utils _rebuild_tensor_v2"
_NAMES = {"Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Int": "int32", "Long": "int64"}
_STORAGES = {f"torch {kind}Storage": getattr(torch, name) for kind, name in _NAMES.items()}
_ARGUMENTS = {"GLOBAL", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
_CONSTANTS = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None, "EMPTY_TUPLE": ()}


class _Module(list[Any]):
    """What a module was built with: one dict of attributes."""


def read_torchscript(path: Path) -> dict[str, Tensor]:
    """The parameters and buffers of the module in an archive, mapped, by their names.

    Raises: ValueError, or whatever else its readers raise, for what is no such file.
    """
    whole = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        (listing,) = (name for name in entries if name.endswith("/data.pkl"))

        def numbers(reference: Any) -> Tensor:
            """What a storage holds, of its type."""
            _, kind, key, _, _ = reference
            entry = entries[f"{listing.removesuffix('.pkl')}/{key}"]
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{entry.filename} is compressed")
            header = whole[entry.header_offset :][: _LOCAL_HEADER.size].numpy().tobytes()
            start = entry.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
            return whole[start : start + entry.file_size].view(_STORAGES[kind])

        root = _follow(archive.read(listing), numbers)
    return dict(_named(root, ""))


def _named(module: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module and of those in it, with their names."""
    (attributes,) = module
    for name, value in attributes.items():
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif isinstance(value, _Module):
            yield from _named(value, f"{prefix}{name}.")


def _follow(stream: bytes, numbers: Callable[[Any], Tensor]) -> Any:
    """What the opcodes of a pickle describe; numbers: gives a storage that it refers to."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(stream):
        name = opcode.name
        if name in _ARGUMENTS:
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
        elif name in ("TUPLE", "SETITEMS"):
            start = marks.pop()
            items = tuple(stack[start:])
            del stack[start:]
            if name == "TUPLE":
                stack.append(items)
            else:
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name == "NEWOBJ":
            stack[-2:] = [_Module()]
        elif name == "BINPERSID":
            stack[-1] = numbers(stack[-1])
        elif name == "BUILD":
            stack[-2].append(stack.pop())
        elif name == "REDUCE":
            given, called = stack.pop(), stack.pop()
            stack.append(given[0][given[1] :].as_strided(*given[2:4]) if called == _REBUILD else None)
        elif name not in ("PROTO", "STOP"):
            raise ValueError(f"its list of weights has the opcode {name}")
    (result,) = stack
    return result
