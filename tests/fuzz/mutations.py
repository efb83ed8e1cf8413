"""Functions that damage files at random: bytes, JSON, zip archives, PNG images, safetensors files and ONNX graphs."""

from __future__ import annotations

import io
import json
import random
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

CONTROL = "\x1b]0;owned\x07\x1b[2J\x9b\u202eevil\u2066\x7f\r\n\x00"
_DIGITS = "many digits"  # replaced by a number too long for any JSON library
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 3, 7, 31, 255, 513, 65_536, 1_000_000, 10**7, 2**31, 2**63, 2**64, -(2**65)),
    *(10**30, 0.0, -0.0, 0.5, 1e-320, 1e300, -1.5, float("nan"), float("inf")),
    *("", " ", "a" * 5_000, CONTROL, "..", "../x", "/dev/zero", "\ud800", "ar", "eagle", "lantern++", "strict"),
    *("chain-4", "chain-99", "dynamic-999-99-99", "dynamic-40", "mc-25", "tree-zz", "oak.json", "0" * 64),
    *([], {}, [[]], [1, 2, 3], [None] * 100, {"a": {"b": []}}, {CONTROL: CONTROL}, [0] * 2_000),
    _DIGITS,
)
_CHUNKS = b"tEXt zTXt iTXt iCCP tRNS PLTE gAMA sRGB cHRM pHYs eXIf acTL fcTL fdAT IHDR abcd".split()


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        # Half of the positions are in the first 200 bytes, where most formats have a header.
        at = rng.randrange(len(data) + 1) if rng.random() < 0.5 else rng.randrange(min(len(data), 200) + 1)
        size = rng.choice((1, 2, 4, 8, 40))
        junk = rng.choice((rng.randbytes(size), b"\x00" * size, b"\xff" * size, CONTROL.encode()[:size], data[:size]))
        kind = rng.randrange(6)
        if kind == 0:
            data = data[:at]
        elif kind == 1:
            data = data[:at] + junk + data[at:]
        elif kind == 2:
            data = data[:at] + data[at + size :]
        elif kind == 3 and data:
            bit = rng.randrange(len(data))
            data = data[:bit] + bytes([data[bit] ^ 1 << rng.randrange(8)]) + data[bit + 1 :]
        else:
            data = data[:at] + junk + data[at + size :]
    return data


def damage_json(text: str, rng: random.Random) -> bytes:
    """Replace, remove, add or rename one to three values of a JSON text; sometimes damage bytes instead."""
    if rng.random() < 0.15:
        return damage_bytes(text.encode(), rng)
    value = json.loads(text)
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = _change_value(value, rng)
    text = json.dumps(value).replace(f'"{_DIGITS}"', "9" * 5_000)
    if rng.random() < 0.02:
        text = "[" * 50_000 + text
    return text.encode("utf-8", "surrogatepass")


def _change_value(value: Any, rng: random.Random) -> Any:
    """Return a copy of a JSON value with one random change at any depth."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        kind = rng.random()
        if kind < 0.07:
            return {key: item for key, item in value.items() if key != name}
        if kind < 0.1:
            return {**value, rng.choice((CONTROL, "extra", "a" * 9_000)): rng.choice(VALUES)}
        return {**value, name: _change_value(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        kind = rng.random()
        if kind < 0.1:
            return value[:at] + value[at + 1 :]
        if kind < 0.15:
            return value + value[at : at + 1] * rng.choice((1, 50))
        return [*value[:at], _change_value(value[at], rng), *value[at + 1 :]]
    if type(value) in (int, float) and rng.random() < 0.4:
        return rng.choice((value + 1, value - 1, -value, value * 2, value * 1000, value / 7, str(value)))
    same_type = [candidate for candidate in VALUES if type(candidate) is type(value)]
    return rng.choice(same_type) if rng.random() < 0.6 and same_type else rng.choice(VALUES)


def damage_zip(data: bytes, rng: random.Random) -> bytes:
    """Return a zip archive with one damaged or removed member and recompressed members, or with damaged bytes."""
    if rng.random() < 0.3:
        return damage_bytes(data, rng)
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(packed, "w") as copy:
        damaged_name = rng.choice(source.namelist())
        for name in source.namelist():
            member = source.read(name)
            if name == damaged_name and rng.random() < 0.1:
                continue
            compression = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2))
            copy.writestr(name, damage_bytes(member, rng) if name == damaged_name else member, compression)
    return packed.getvalue()


def damage_png(data: bytes, rng: random.Random) -> bytes:
    """Return a PNG file with a removed, repeated, renamed, damaged or added chunk, or with damaged bytes."""
    if rng.random() < 0.4:
        return damage_bytes(data, rng)
    chunks = []
    at = 8
    while at < len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4])
        chunks.append((data[at + 4 : at + 8], data[at + 8 : end]))
        at = end + 4
    index = rng.randrange(len(chunks))
    name, body = chunks[index]
    other_name = rng.choice(_CHUNKS)
    chunks[index : index + 1] = rng.choice(
        (
            [],
            [(name, body)] * 2,
            [(other_name, body)],
            [(name, damage_bytes(body, rng))],
            [(name, body), (other_name, rng.randbytes(rng.choice((0, 4, 8, 26, 40))))],
            [(name, body), (other_name, b"prompt\0\0" + zlib.compress(bytes(1 << 23), 9))],
        )
    )
    encoded = [len(body).to_bytes(4) + name + body + zlib.crc32(name + body).to_bytes(4) for name, body in chunks]
    return data[:8] + b"".join(encoded)


def damage_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Return a safetensors file with a damaged JSON header, or with damaged bytes at any position."""
    if rng.random() < 0.4:
        return damage_bytes(data, rng)
    size = int.from_bytes(data[:8], "little")
    header = damage_json(json.dumps(json.loads(data[8 : 8 + size])), rng)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def move_weight_to_file(data: bytes, location: str, rng: random.Random) -> bytes:
    """Move a random weight of an ONNX model to an external file, without writing that file."""
    model = onnx.load_from_string(data)
    tensor = rng.choice([tensor for tensor in model.graph.initializer if tensor.raw_data])
    onnx.external_data_helper.set_external_data(tensor, location, 0, len(tensor.raw_data))
    if rng.random() < 0.5:
        tensor.ClearField("raw_data")
    return bytes(model.SerializeToString())


def damage_file(path: Path, rng: random.Random) -> None:
    """Replace a file by a damaged copy; the kind of damage depends on the file name extension."""
    damage_by_ending: dict[str, Callable[[bytes], bytes]] = {
        ".json": lambda data: damage_json(data.decode(), rng),
        ".onnx": lambda data: rng.choice((damage_bytes, damage_graph))(data, rng),
        ".png": lambda data: damage_png(data, rng),
        ".safetensors": lambda data: damage_safetensors(data, rng),
        **dict.fromkeys((".npz", ".pt", ".bin"), lambda data: damage_zip(data, rng)),
    }
    path.write_bytes(damage_by_ending.get(path.suffix, lambda data: damage_bytes(data, rng))(path.read_bytes()))


def damage_graph(data: bytes, rng: random.Random) -> bytes:
    """Return an ONNX model with changed names, sizes, types, weights or nodes; the model stays valid protobuf."""
    model = onnx.load_from_string(data)
    graph = model.graph
    for _ in range(rng.choice((1, 1, 2))):
        tensor = rng.choice(graph.initializer)
        node = rng.choice(graph.node)
        value = rng.choice([*graph.input, *graph.output])
        kind = rng.randrange(8)
        if kind == 0:
            tensor.dims[:] = [rng.choice((0, -1, 1, 3, 2**20, 2**62, *tensor.dims)) for _ in tensor.dims]
        elif kind == 1:
            tensor.data_type = rng.randrange(25)
        elif kind == 2:
            tensor.raw_data = damage_bytes(tensor.raw_data, rng)
        elif kind == 3:
            node.op_type = rng.choice(("Add", "MatMul", "Gather", "Loop", "Range", "Expand", "Identity", CONTROL))
        elif kind == 4:
            node.input[rng.randrange(len(node.input))] = rng.choice((CONTROL, "", tensor.name, value.name))
        elif kind == 5:
            value.name = rng.choice((CONTROL, "x" * 9_000, tensor.name))
        elif kind == 6:
            value.type.tensor_type.elem_type = rng.randrange(25)
        elif value.type.tensor_type.shape.dim:
            rng.choice(value.type.tensor_type.shape.dim).dim_value = rng.choice((0, -1, 1, 5, 2**40))
    return bytes(model.SerializeToString())
