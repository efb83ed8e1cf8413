"""Where in a model a node of an ONNX file belongs, for error messages: a short walk over the file's bytes.

Does not know operators; needs no onnx package.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from .onnx_scan import NotOnnx, fields

_GRAPH, _NODE, _INPUT, _OUTPUT = 7, 1, 1, 2  # field numbers of ModelProto, GraphProto and NodeProto


def place_of_node(path: Path, index: int) -> str | None:
    """The last dotted name (`layers.3.attention.qkv.weight`) that node `index` or one before it reads or writes.

    Names of weights and of some results say which module they belong to; names of most nodes do not. None where
    no name does, or the file cannot be read.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            place = None
            seen = -1
            for number, start, end in fields(data, 0, len(data)):
                if number != _GRAPH:
                    continue
                for kind, low, high in fields(data, start, end):
                    if kind != _NODE or seen >= index:
                        continue
                    seen += 1
                    names = [data[a:b] for field, a, b in fields(data, low, high) if field in (_INPUT, _OUTPUT)]
                    dotted = [name.decode("utf-8", "replace") for name in names if b"." in name]
                    place = dotted[0] if dotted else place
            return place
    except (OSError, ValueError, NotOnnx):
        return None
