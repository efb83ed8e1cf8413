"""Safe reader of the weights of a TorchScript archive (`.jit`).

The file is a zip archive with code, tensors and a pickle that describes modules and their tensors. The reader does not
run code and does not use `pickle`. It interprets only the opcodes that describe modules and tensors, keeps classes and
functions as names, and rejects all other opcodes.
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

_LOCAL_HEADER = struct.Struct("<26xHH")  # lengths of name and extra field, which precede the content
_REBUILD = "torch._utils _rebuild_tensor_v2"
_NAMES = {"Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Int": "int32", "Long": "int64"}
_STORAGES = {f"torch {kind}Storage": getattr(torch, name) for kind, name in _NAMES.items()}
_ARGUMENTS = {"GLOBAL", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
_CONSTANTS = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None, "EMPTY_TUPLE": ()}


class _ScriptModule(list[Any]):
    """Module in a TorchScript pickle: a list that contains one dict, the module's attributes."""


def read_torchscript(path: Path) -> dict[str, Tensor]:
    """Read the parameters and buffers of a TorchScript archive as memory-mapped tensors, by name.

    Raises any exception for a damaged file.
    """
    contents = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        (pickle_name,) = (name for name in entries if name.endswith("/data.pkl"))

        def read_storage(reference: Any) -> Tensor:
            _, kind, key, _, _ = reference
            entry = entries[f"{pickle_name.removesuffix('.pkl')}/{key}"]
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{entry.filename} is compressed, which is not supported")
            header = contents[entry.header_offset :][: _LOCAL_HEADER.size].numpy().tobytes()
            start = entry.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
            return contents[start : start + entry.file_size].view(_STORAGES[kind])

        root = _interpret_pickle(archive.read(pickle_name), read_storage)
    return dict(_walk_tensors(root, ""))


def _walk_tensors(module: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    (attributes,) = module
    for name, value in attributes.items():
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif isinstance(value, _ScriptModule):
            yield from _walk_tensors(value, f"{prefix}{name}.")


def _interpret_pickle(stream: bytes, read_storage: Callable[[Any], Tensor]) -> Any:
    """Return the object that a pickle describes; `read_storage` reads a tensor storage by its reference."""
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
            stack[-2:] = [_ScriptModule()]
        elif name == "BINPERSID":
            stack[-1] = read_storage(stack[-1])
        elif name == "BUILD":
            stack[-2].append(stack.pop())
        elif name == "REDUCE":
            arguments = stack.pop()
            function = stack.pop()
            is_tensor = function == _REBUILD
            stack.append(arguments[0][arguments[1] :].as_strided(*arguments[2:4]) if is_tensor else None)
        elif name not in ("PROTO", "STOP"):
            raise ValueError(f"the pickle of its weights has the opcode {name}, which is not supported")
    (result,) = stack
    return result
