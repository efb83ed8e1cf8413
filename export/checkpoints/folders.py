"""Checkpoints, each a file or a folder; every file that is read is recorded as a source of the bundle.

A folder has one file of weights, several files with an index (the layout of Hugging Face), or several `.pt` or `.pth`
files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from ...bundle.hub import PLAIN_NAME
from ...engines.contracts import Progress
from ...errors import CheckpointError
from ...inputs import format_value
from ..progress import ignore_progress, make_megabyte_counter
from .files import (
    SHOWN,
    TOKENIZER,
    Config,
    Weights,
    format_names,
    make_file_error,
    read_config,
    read_weights,
    strip_wrapper_prefixes,
)
from .lora import LoraAdapter

SINGLE = ("model.safetensors", "pytorch_model.safetensors", "pytorch_model.bin")
INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
PAIRS = (("encoder.safetensors", "decoder.safetensors"), ("encoder.jit", "decoder.jit"))  # image tokenizers
_LOOSE = (".pt", ".pth")
# Prefixes of files that are not weights: hidden files of macOS, and states of training.
_OTHERS = (".", "optimizer", "training_args", "scheduler", "rng_state")
_ROTARY_BUFFER = ".inv_freq"  # old versions of transformers save these frequencies, which the configuration determines
_FLOATS = "floating-point numbers"
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass
class Checkpoint:
    """Configuration, tokenizer and weights in a file or folder.

    Args:
        role: role in the bundle: `target`, `vq`, `drafter` or `text_encoder`.
        progress: gets the megabytes read.
        prefer_ema: whether to prefer averaged weights in a file with both kinds; None: other weights, with a warning.
        adapters: adapters to merge into the weights, in this order.
        tied_weights: weights that are copies of other weights: name of the original, by name of the copy. As in PEFT,
            an adapter changes only one of the two weights.
        weights: weights by the names that the code uses; empty until `read_weights` is called.
        stored_names: name of a weight in the files, by the name that the code uses, for error messages. In both names,
            `*` stands for a layer's number.
        prefix: prefix of all names in the files.
        sources: files that were read, with their roles.
    """

    path: Path
    role: str = "target"
    progress: Progress = ignore_progress
    prefer_ema: bool | None = None
    adapters: Sequence[LoraAdapter] = ()
    tied_weights: Mapping[str, str] = field(default_factory=dict)
    weights: Weights = field(default_factory=dict)
    stored_names: dict[str, str] = field(default_factory=dict)
    prefix: str = ""
    sources: list[tuple[str, Path]] = field(default_factory=list)

    def open_subfolder(self, name: str) -> Checkpoint:
        return Checkpoint(self.path / name, self.role, self.progress, adapters=self.adapters)

    def make_error(self, name: str = "", problem: str = "", **parts: str) -> CheckpointError:
        """Return an error about a weight, named as in the files, or the whole checkpoint."""
        return make_file_error(self.path, self.get_stored_name(name) if name else "", problem, **parts)

    def read_config_file(self, name: str = "config.json") -> Config:
        return read_config(self.require_file(name, name.removesuffix(".json")))

    def read_model_config(self, repository: str, *model_types: str) -> Config:
        """Read config.json, and check that the folder has the layout of a repository and one of the types, if given."""
        remedy = f"give the folder of {repository} or one like it"
        if not (self.path / "config.json").is_file() and any(self.path.glob("models/*/consolidated*.pth")):
            raise self.make_error(
                found="Meta's layout", expected="the layout of transformers, with config.json", remedy=remedy
            )
        config = self.read_config_file()
        if model_types:
            config.check_value("model_type", *model_types, remedy=remedy)
        return config

    def find_tokenizer_path(self) -> Path:
        return self.require_file(TOKENIZER, "tokenizer")

    def require_file(self, name: str, role_suffix: str) -> Path:
        """Return the path of a file, and record it as source `<role>_<role_suffix>`. Raises: CheckpointError."""
        path = self.path / name
        if not path.is_file():
            if self.path.is_file():
                raise self.make_error(found="a file", expected=f"a folder with {name}")
            raise self.make_error(problem=f"has no {name}", remedy="download it into this folder")
        self.sources.append((f"{self.role}_{role_suffix}", path))
        return path

    def read_weights(
        self, name_filter: Callable[[str], bool] = lambda name: True, optional_names: Collection[str] = ()
    ) -> None:
        """Read all weights of the file or folder into `weights`. Safetensors files take precedence over other formats.

        Args:
            name_filter: returns whether to read the weight with a name.
            optional_names: names of tied weights that may be in the index but not in the files, because conversion
                programs drop them from the files.

        Raises:
            CheckpointError: the folder has no weights, or files and index differ.
        """

        def is_read(name: str) -> bool:
            return not name.endswith(_ROTARY_BUFFER) and name_filter(name)

        paths = [self.path]
        index = None
        shards: dict[str, list[str]] = {}
        if self.path.is_dir():
            present = {path.name for path in self.path.iterdir() if path.is_file()}
            names = choose_weight_files(present)
            if not names:
                loose = [name for name in present if re.search(r"-\d+-of-\d+\.", name)]
                contents = f"{format_names(loose)} without an index" if loose else "no weights"
                expected = f"one of {', '.join(SINGLE)}, one of {', '.join(INDEX)} with its files, or .pt files"
                raise self.make_error(found=contents, expected=expected)
            if names[0] in INDEX:
                index = self.path / names[0]
                shards = read_weight_index(index)
                self.sources.append((f"{self.role}_index", index))
            paths = [self.path / name for name in sorted(shards) or names]
            if absent := [path.name for path in paths if not path.is_file()]:
                problem = f"lacks {format_names(absent)} of the {len(paths)} files in {names[0]}"
                raise self.make_error(problem=problem, remedy="download the missing files into this folder")
        size = sum(path.stat().st_size for path in paths if path.is_file())
        progress = make_megabyte_counter(f"reading {self.path.name}", size, self.progress)
        for path in paths:
            part = read_weights(path, progress, self.prefer_ema, is_read)
            if index:
                listed = {name for name in shards[path.name] if is_read(name)}
                if problems := _describe_differences(listed - (set(optional_names) - part.keys()), part.keys()):
                    problem = f"does not hold what the index says, {', '.join(problems)}"
                    raise make_file_error(path, problem=problem, remedy="download the folder again")
            if duplicates := sorted(part.keys() & self.weights):
                remedy = "leave the files of one checkpoint in the folder"
                raise make_file_error(path, duplicates[0], "is also in an earlier file", remedy=remedy)
            self.weights |= part
            self.sources.append((self.role, path))
        self.weights |= {
            name: self.weights[source] for name, source in self.tied_weights.items() if source in self.weights
        }
        for adapter in self.adapters:
            adapter.merge(self.weights, name_filter)
            self.sources += adapter.sources

    def get_stored_name(self, name: str) -> str:
        return self.prefix + _map_weight_name(name, self.stored_names)

    def rename_weights(self, stored_names: Mapping[str, str]) -> None:
        """Rename weights by `stored_names`: name in the files by the name that the code uses."""
        new_names = {file_name: name for name, file_name in stored_names.items()}
        self.weights = {_map_weight_name(name, new_names): weight for name, weight in self.weights.items()}
        self.stored_names.update(stored_names)

    def get_shape(self, name: str, num_dimensions: int = 2) -> tuple[int, ...]:
        """Return the shape of a floating-point weight with `num_dimensions` axes. Raises: CheckpointError."""
        if name not in self.weights:
            raise self.make_error(name, "missing weight", found=self.format_names())
        shape = tuple(self.weights[name].shape)
        if len(shape) != num_dimensions or 0 in shape:
            raise self.make_error(name, found=f"shape {list(shape)}", expected=f"{num_dimensions} sizes")
        if not self.weights[name].is_floating_point():
            raise self.make_error(name, found=_describe_dtype(self.weights[name]), expected=_FLOATS)
        return shape

    def format_names(self) -> str:
        """List names of weights in the files, for messages about a missing weight."""
        return format_names([self.get_stored_name(name) for name in self.weights])

    def count_layers(self, prefix: str) -> int:
        """Count the layers of a network, whose weights are named by `prefix` and a layer's number 0, 1, ..."""
        parts = {name[len(prefix) :].split(".")[0] for name in self.weights if name.startswith(prefix)}
        return next(i for i in range(len(parts) + 1) if str(i) not in parts)

    def extract_weights(self, prefix: str) -> Checkpoint:
        """Move the weights with a prefix to a new checkpoint, without the prefix."""
        names = [name for name in self.weights if name.startswith(prefix)]
        weights = {name.removeprefix(prefix): self.weights.pop(name) for name in names}
        return Checkpoint(self.path, self.role, weights=weights, prefix=self.prefix + prefix)

    def extract_renamed_weights(self, stored_names: Mapping[str, str]) -> Checkpoint:
        """Move the weights with these names in the files to a new checkpoint, with the names that the code uses."""
        new_names = {file_name: name for name, file_name in stored_names.items()}
        names = [name for name in self.weights if _map_weight_name(name, new_names) != name]
        extracted = Checkpoint(self.path, self.role, weights={name: self.weights.pop(name) for name in names})
        extracted.rename_weights(stored_names)
        return extracted

    def load_module_weights(self, module: nn.Module) -> None:
        """Load all weights, without copying them, into a module, which must have the same names and shapes."""
        wanted = module.state_dict()
        weights = self.weights
        problems = _describe_differences(wanted.keys(), weights.keys(), self.get_stored_name)
        problems += [
            f"{self.get_stored_name(name)} has shape {list(weights[name].shape)}, expected {list(value.shape)}"
            for name, value in wanted.items()
            if name in weights and weights[name].shape != value.shape
        ][:SHOWN]
        problems += [
            f"{self.get_stored_name(name)} holds {_describe_dtype(weights[name])}, expected {_describe_dtype(value)}"
            for name, value in wanted.items()
            if name in weights and weights[name].is_floating_point() != value.is_floating_point()
        ][:SHOWN]
        if problems:
            raise self.make_error(problem=f"the weights do not fit the model, {'; '.join(problems)}")
        module.requires_grad_(False).eval().load_state_dict(weights, assign=True)
        # Errors while the weights are written name this checkpoint. `nn.Module.__setattr__` would check the type.
        object.__setattr__(module, "checkpoint", self)


def choose_weight_files(file_names: Collection[str]) -> list[str]:
    """Choose a folder's files of weights: a single file, an index, a pair of encoder and decoder, or all `.pt` files.

    Safetensors files come before other formats. The result is empty if the folder has no weights.
    """
    for name in (SINGLE[0], INDEX[0], *SINGLE[1:], INDEX[1]):
        if name in file_names:
            return [name]
    for pair in PAIRS:
        if {*pair} <= {*file_names}:
            return [*pair]
    return sorted(name for name in file_names if name.endswith(_LOOSE) and not name.startswith(_OTHERS))


def read_weight_index(path: Path) -> dict[str, list[str]]:
    """Read an index file and return the names of the weights in each file."""
    config = read_config(path)
    weight_map = config.get("weight_map")
    shards: dict[str, list[str]] = {}
    if not isinstance(weight_map, dict) or not weight_map:
        raise config.make_error("weight_map", expected="the name of a file for every weight")
    for weight, name in strip_wrapper_prefixes(path, weight_map).items():
        if not isinstance(name, str) or not re.fullmatch(PLAIN_NAME, name):
            raise make_file_error(
                path, format_value(weight), found=format_value(name), expected="the name of a file in its folder"
            )
        shards.setdefault(name, []).append(weight)
    return shards


def _describe_dtype(weight: Tensor) -> str:
    return _FLOATS if weight.is_floating_point() else f"{str(weight.dtype).removeprefix('torch.')} numbers"


def _describe_differences(expected: Set[str], actual: Set[str], format_name: Callable[[str], str] = str) -> list[str]:
    groups = {"missing": expected - actual, "unexpected": actual - expected}
    return [f"{word}: {format_names([format_name(name) for name in names])}" for word, names in groups.items() if names]


def _map_weight_name(name: str, name_map: Mapping[str, str]) -> str:
    """Return the new name of a weight, or `name`; in `name_map`, `*` stands for the number of a layer."""
    number = _LAYER.search(name)
    if name in name_map or number is None:
        return name_map.get(name, name)
    starred = f"{name[: number.start()]}*{name[number.end() :]}"
    return name_map[starred].replace("*", number[0]) if starred in name_map else name
