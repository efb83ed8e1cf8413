"""Tests that damaged or malicious checkpoints are rejected with a short error of one line and without much memory."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from family_readers import read_llamagen_transformer
from goldens import DATA
from refusals import catch_error
from safetensors.torch import save_file
from torch import Tensor

from lantern_rt.cli.main import run_program
from lantern_rt.errors import CheckpointError
from lantern_rt.export.checkpoints.files import read_config, read_weights
from lantern_rt.export.models.eagle import read_drafter

C2I = DATA / "llamagen-c2i/c2i_tiny.pt"
VQ = DATA / "llamagen-vq/vq_tiny.pt"
VQGAN = DATA / "chameleon-vqgan"
CYCLIC_PICKLE = b"cm\nModule\n)\x81q\x00}(X\x01\x00\x00\x00ah\x00ub."  # a module whose attribute `a` is the module
JIT = DATA / "simplear/cosmos/encoder.jit"


class TensorWithFalseMetadata(Tensor):
    """Tensor that is saved with sizes, strides or an offset that exceed the storage of 4 numbers."""

    metadata: tuple[int, tuple[int, ...], tuple[int, ...]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        storage = torch.storage.TypedStorage(
            wrap_storage=torch.ones(4).untyped_storage(), dtype=torch.float32, _internal=True
        )
        return torch._utils._rebuild_tensor_v2, (storage, *self.metadata, False, OrderedDict())


def make_tensor_with_false_metadata(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    tensor = torch.ones(4).as_subclass(TensorWithFalseMetadata)
    tensor.metadata = (offset, sizes, strides)
    return tensor


# By words of the error message: function that makes the tensor.
UNUSUAL_TENSORS: dict[str, Callable[[], Any]] = {
    "float8_e4m3fn": lambda: torch.ones(4).to(torch.float8_e4m3fn),
    "complex64": lambda: torch.ones(4, dtype=torch.complex64),
    "qint8": lambda: torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8),
    "another layout": lambda: torch.ones(4, 4).to_sparse(),
    "a Tensor of another layout": lambda: torch.ones(4, 4).to_sparse_csr(),
    "Tensor of another layout": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "a NestedTensor of another": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "without values": lambda: torch.empty(4, device="meta"),
    "weights of 4,398,046,511,112 bytes in a file of": lambda: torch.ones(1).expand(1 << 40),
    "weights of 4,398,046,511,112 bytes in": lambda: torch.ones(1, 1).expand(1 << 20, 1 << 20),
    "NaN or infinite": lambda: torch.tensor([1.0, float("nan")]),
    "NaN or infinite values": lambda: torch.tensor([1.0, float("-inf")]),
    "a str": lambda: "text",
}


def copy_torchscript(path: Path, data_pickle: bytes | None = None, compression: int = zipfile.ZIP_STORED) -> None:
    """Copy the valid TorchScript archive `JIT` with changes."""
    with zipfile.ZipFile(JIT) as source, zipfile.ZipFile(path, "w", compression) as copy:
        for name in source.namelist():
            copy.writestr(name, data_pickle if data_pickle and name.endswith("/data.pkl") else source.read(name))


LEVELS = 24  # levels of nested objects: they expand to 2^24 objects, so a reader without the check still ends
# header of checkpoints before PyTorch 1.6: magic number, protocol version, information about the system
OLD_HEADER = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2)


def make_nested_pickle(container: bytes) -> bytes:
    """Return a pickle of tuples that each contain the previous tuple twice."""
    pairs = [b"(h%ch%ctq%c" % (i, i, i + 1) for i in range(LEVELS)]
    return b"\x80\x02)q\x00" + b"".join(pairs) + container % (b"h%c" % LEVELS)


def make_nested_list_pickle(outermost_first: bool) -> bytes:
    """Return a pickle of nested lists, of which each contains the next inner list twice."""
    if outermost_first:
        empty_lists = b"".join(b"]q%c" % i for i in range(LEVELS + 1))
        filled_lists = b"".join(b"h%c(h%ch%ce" % (i, i + 1, i + 1) for i in range(LEVELS))
        return b"\x80\x02" + empty_lists + filled_lists + b"h\x00)R."
    return b"\x80\x02" + b"]q\x00" + b"".join(b"]q%c(h%ch%ce" % (i + 1, i, i) for i in range(LEVELS)) + b")R."


def write_archive(path: Path, content: bytes, name: str = "data.pkl") -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for entry, data in ((name, content), ("version", b"3\n"), ("byteorder", b"little")):
            file.writestr(f"archive/{entry}", data)


class CommandPickle:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


# By file name: function that writes the file to a path, and words of the error message.
NESTED_DICT = make_nested_pickle(b"}(%sNu.")  # %s loads the key
NESTED_SET = make_nested_pickle(b"cbuiltins\nset\n%s\x85\x85R.")  # %s loads the item
NESTED_LISTS = make_nested_list_pickle(outermost_first=False)
LISTS_FILLED_LATER = make_nested_list_pickle(outermost_first=True)
BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "half.pt": (lambda path: path.write_bytes(C2I.read_bytes()[: C2I.stat().st_size // 2]), "cut short"),
    "empty.pt": (lambda path: path.write_bytes(b""), "cut short"),
    "text.bin": (lambda path: path.write_bytes(b"not found"), "not a PyTorch checkpoint"),
    "half.safetensors": (lambda path: path.write_bytes(b"\x10" + b"\x00" * 7 + b"{"), "not a safetensors file"),
    "code.pt": (lambda path: torch.save({"model": CommandPickle()}, path), "calls code"),
    "list.pt": (lambda path: torch.save([torch.ones(2)], path), "found a list, expected a state dict"),
    "nothing.pt": (lambda path: torch.save({"model": {}}, path), "found an empty dict"),
    "inf.safetensors": (lambda path: save_file({"a": torch.tensor([float("inf")])}, path), "NaN or infinite"),
    "numbers-as-names.pt": (lambda path: torch.save({0: torch.ones(2)}, path), "found 0, expected names of weights"),
    "large.pt": (lambda path: write_archive(path, b"\x80\x02" + b"N" * (1 << 26) + b"."), "has 67,108,867 bytes"),
    "absent.pt": (lambda path: None, "no such file"),
    "cut.jit": (lambda path: path.write_bytes(JIT.read_bytes()[:9000]), "not a PyTorch checkpoint"),
    "compressed.jit": (lambda path: copy_torchscript(path, compression=zipfile.ZIP_DEFLATED), "is compressed"),
    "build.jit": (lambda path: copy_torchscript(path, b"Vos\nVsystem\n\x93."), "has the opcode UNICODE"),
    "code.jit": (lambda path: copy_torchscript(path, pickle.dumps(CommandPickle(), 2)), "not a PyTorch checkpoint"),
    "within-itself.jit": (lambda path: copy_torchscript(path, CYCLIC_PICKLE), "changes an object that others contain"),
    "nested.jit": (lambda path: copy_torchscript(path, NESTED_DICT), "objects within each other"),
    "nested.pt": (lambda path: write_archive(path, NESTED_DICT), "objects within each other"),
    "nested.PKL.pt": (lambda path: write_archive(path, NESTED_DICT, "Data.PKL"), "objects within each other"),
    "nested-set.pt": (lambda path: write_archive(path, NESTED_SET), "objects within each other"),
    "nested-lists.pt": (lambda path: write_archive(path, NESTED_LISTS), "objects within each other"),
    "nested-before-zip.pt": (lambda path: path.write_bytes(NESTED_DICT + C2I.read_bytes()), "within each other"),
    "nested-old.pt": (lambda path: path.write_bytes(OLD_HEADER + NESTED_DICT), "within each other"),
    "lists-filled-later.pt": (lambda path: write_archive(path, LISTS_FILLED_LATER), "that others contain"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_damaged_or_malicious_file_is_rejected(tmp_path: Path, name: str) -> None:
    write, words = BAD_FILES[name]
    write(tmp_path / name)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_weights(tmp_path / name)
    assert caught.value.field.startswith(str(tmp_path / name))


def save_checkpoint(path: Path, content: Any, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(content() if callable(content) else content, path, **options)
    return path


@pytest.mark.parametrize("words", UNUSUAL_TENSORS)
def test_unsupported_tensors_are_rejected_where_they_are_read(tmp_path: Path, words: str) -> None:
    path = save_checkpoint(
        tmp_path / "odd.pt", lambda: {"module.good": torch.ones(2), "module.loss.bad": UNUSUAL_TENSORS[words]()}
    )
    with pytest.raises(CheckpointError, match=words) as caught:
        read_weights(path)
    assert caught.value.field in (str(path), f"{path}: module.loss.bad", f"{path}: loss.bad")
    assert [*read_weights(path, name_filter=lambda name: not name.startswith("loss."))] == ["good"]


@pytest.mark.parametrize(
    "metadata", [(0, (1 << 20, 1 << 20), (1 << 20, 1)), (0, (4,), (1 << 40,)), (1 << 33, (4,), (1,))]
)
@pytest.mark.parametrize("is_zip_archive", [True, False])
def test_a_weight_larger_than_its_storage_is_rejected(
    tmp_path: Path, metadata: tuple[int, tuple[int, ...], tuple[int, ...]], is_zip_archive: bool
) -> None:
    path = save_checkpoint(
        tmp_path / "big.pt",
        {"a": make_tensor_with_false_metadata(*metadata)},
        _use_new_zipfile_serialization=is_zip_archive,
    )
    with pytest.raises(CheckpointError, match=r"big\.pt: (is not a PyTorch checkpoint|found weights of)"):
        read_weights(path)


@pytest.mark.parametrize("name", ["large.safetensors", "large.pt"])
def test_a_file_larger_than_the_memory_is_rejected(tmp_path: Path, name: str) -> None:
    resource = pytest.importorskip("resource")
    weights = {"weight": torch.zeros(1 << 26)}
    save_file(weights, tmp_path / name) if name.endswith("safetensors") else torch.save(weights, tmp_path / name)
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (1 << 27), before[1]))
        error = catch_error(CheckpointError, read_weights, tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert error.problem == "is larger than the memory"


@pytest.mark.parametrize(
    "content",
    [
        {"n" * 100_000: torch.tensor(float("nan"))},
        {"\x1b[2Jlayers\n": torch.ones(1)},
        {"model": {"a" * 100_000: "text"}},
        {"a" * 290 + str(i): torch.ones(1) for i in range(9)},
    ],
)
def test_errors_are_short_and_printable_for_any_names_of_weights(
    tmp_path: Path, content: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_checkpoint(tmp_path / "a.pt", content)
    exit_code = run_program(["export", "--target", str(path), "--vq", str(VQ), "--output", str(tmp_path / "b")])
    lines = capsys.readouterr().err.splitlines()
    (error_line,) = [line for line in lines if not line.startswith("reading ")]
    assert exit_code == 2
    assert error_line.startswith(f"lantern-rt: {path}: ")
    assert error_line.isprintable()
    assert len(error_line) < 2500


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"n_head": ' + "9" * 5000 + "}",
        f'{{"n_head": "{"x" * 100_000}"}}',
        '{"n_head": 1e999}',
        "\0\xff",
    ],
)
def test_a_configuration_that_breaks_the_json_parser_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, "latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json: ") as caught:
        read_llamagen_transformer(C2I, config=path)
    assert len(str(caught.value)) < 600


def test_a_pipe_or_a_device_as_configuration_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match=f"{path}: .*a pipe or a device"):
            read_config(path)


def test_a_too_long_path_is_rejected_with_the_systems_message(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="File name too long"):
        read_weights(tmp_path / ("a" * 300))
    target = read_llamagen_transformer(C2I, config=C2I.with_name("config.json")).decoder
    with pytest.raises(CheckpointError, match="File name too long"):
        read_drafter(tmp_path / ("a" * 300), target)


def test_a_rejected_checkpoint_prints_no_warnings_of_pytorch(tmp_path: Path) -> None:
    path = save_checkpoint(
        tmp_path / "csr.pt", lambda: {"a": torch.ones(4, 4).to_sparse_csr(), "b": torch.ones(2).to_sparse()}
    )
    command = ["export", "--target", path, "--vq", VQ, "--output", tmp_path / "b"]
    process = subprocess.run([sys.executable, "-m", "lantern_rt", *map(str, command)], capture_output=True, text=True)
    assert process.returncode == 2
    *progress, error_line = process.stderr.splitlines()
    # Slow hosts also print progress.
    stages = [line for line in progress if "so far" not in line and " of " not in line]
    assert stages == ["reading checkpoints", "reading csr.pt"]
    assert error_line.startswith(f"lantern-rt: {path}: a: found a Tensor of another")
    assert json.dumps(error_line).isascii()
