"""Check of pickles before they are read, because a few bytes can describe objects that take years to hash or print.

A pickle can refer to earlier objects. For example, sixty nested tuples that each contain the previous tuple twice take
600 bytes and have 2^60 parts. The readers of weights run no code from a pickle, but may hash or print nested tuples.
"""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path
from typing import BinaryIO

_MAX_BYTES = 1 << 26  # size of a pickle; published pickles have less than a megabyte
_MAX_REFERRED = 1 << 20  # parts and characters of referenced objects that are always allowed
_MAX_GROWTH = 20  # referenced parts that are also allowed per described part; state dicts have about two
_FILLING = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}  # opcodes that change an object


def reject_pickle_bombs(path: Path) -> bool:
    """Check that the pickles of a PyTorch checkpoint are not too large; return whether the file is a zip archive.

    Raises any exception for a damaged file.
    """
    with path.open("rb") as file:
        if file.read(4) != b"PK\3\4":  # same test as in torch.load
            file.seek(0)
            for _ in range(5):  # files of PyTorch before 1.6 begin with five pickles
                _reject_pickle_bomb(file)
            return False
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.filename.lower().endswith(".pkl"):
                    if entry.file_size > _MAX_BYTES:
                        raise ValueError(f"its pickle {entry.filename} has {entry.file_size:,} bytes")
                    _reject_pickle_bomb(archive.read(entry))
    return True


def _reject_pickle_bomb(stream: bytes | BinaryIO) -> None:
    described = referred = 0  # parts and characters
    stack: list[list[int]] = []  # sizes of objects; all references of an object share a list
    marks: list[int] = []
    memo: dict[object, list[int]] = {}
    shared: set[int] = set()
    for opcode, argument, _ in pickletools.genops(stream):
        before = opcode.stack_before
        if opcode.name == "MARK":
            marks.append(len(stack))
        elif "PUT" in opcode.name:
            memo[argument] = stack[-1]
        elif "GET" in opcode.name:
            stack.append(memo[argument])
            shared.add(id(stack[-1]))
            referred += stack[-1][0]
            if referred > _MAX_REFERRED + _MAX_GROWTH * described:
                raise ValueError("its pickle describes objects within each other without end")
        else:
            size = 1 + (len(argument) if isinstance(argument, str | bytes) else 0)
            described += size
            marked = pickletools.markobject in before
            start = marks.pop() - before.index(pickletools.markobject) if marked else len(stack) - len(before)
            parts = stack[start:]
            # Opcodes that fill an object keep its size counter; all others create a new object.
            made = parts[0] if opcode.name in _FILLING else [0]
            if id(made) in shared:
                raise ValueError("its pickle changes an object that others contain")
            made[0] = size + sum(part[0] for part in parts)
            stack[start:] = [made] * len(opcode.stack_after)
