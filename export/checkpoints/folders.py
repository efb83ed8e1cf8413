"""A checkpoint's weights as one, from a file or a folder.

A folder holds one file of weights, or several with an index that says which weight is in which file (the layout of
Hugging Face), or several `.pt` or `.pth` files that share the weights between them. Nothing is ignored: a weight
that only the index or only a file has is an error. Every file that is read is recorded as a source of the bundle.
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
from ..progress import count_megabytes, silent
from .files import SHOWN, TOKENIZER, Config, Weights, listing, read_config, read_weights, refusal, unwrap
from .lora import Adapter

SINGLE = ("model.safetensors", "pytorch_model.safetensors", "pytorch_model.bin")
INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
PAIRS = (("encoder.safetensors", "decoder.safetensors"), ("encoder.jit", "decoder.jit"))  # of image tokenizers
_LOOSE = (".pt", ".pth")
_OTHERS = (".", "optimizer", "training_args", "scheduler", "rng_state")  # what macOS and training leave beside weights
# The models whose folders have a model_type.
_LAYOUTS = {"janus": "Janus", "chameleon": "Anole or Lumina-mGPT", "qwen2": "SimpleAR or another Qwen2"}
_LAYOUTS |= {"emu3": "Emu3", "Emu3": "Emu3", "multi_modality": "Janus as DeepSeek publishes it"}
_FLOATS = "floating-point numbers"
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass
class Checkpoint:
    """A file or folder, opened once: configuration, tokenizer and weights come from here.

    Args:
        place: the file or folder; nothing is read at first.
        role: what it is to the bundle: `target`, `vq`, `drafter` or `text_encoder`.
        progress: how much of the weights is read, in megabytes.
        averaged: as `read_weights` has it.
        adapters: merged into the weights, one after the other, once these are read.
        tied: by names of weights, the weight that each is; an adapter of one leaves the other as it is, as in PEFT.
        weights: by the names that readers give them.
        names: those of the files by those of readers, for messages; `*` stands for the number of a layer.
        prefix: what files put before all names.
        sources: the files that were read, with their roles.
    """

    place: Path
    role: str = "target"
    progress: Progress = silent
    averaged: bool | None = None
    adapters: Sequence[Adapter] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    weights: Weights = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    prefix: str = ""
    sources: list[tuple[str, Path]] = field(default_factory=list)

    def error(self, name: str = "", problem: str = "", **parts: str) -> CheckpointError:
        """An error about a weight of this checkpoint, or all of it."""
        return refusal(self.place, self.shown(name) if name else "", problem, **parts)

    def config(self, name: str = "config.json") -> Config:
        """The configuration in the folder. Raises: CheckpointError."""
        return read_config(self.file(name, name.removesuffix(".json")))

    def model_config(self, repository: str, *model_types: str) -> Config:
        """Read config.json of a folder like that of a repository of the hub. Raises: CheckpointError: it is another.

        model_types: those of such folders; without any, all that `_LAYOUTS` lacks.
        """
        remedy = f"give the folder of {repository} or one like it"
        if not (self.place / "config.json").is_file() and any(self.place.glob("models/*/consolidated*.pth")):
            raise self.error(found="Meta's layout", expected="that of transformers, with config.json", remedy=remedy)
        config = self.config()
        layout = _LAYOUTS.get(str(config.get("model_type")))
        if model_types or layout:
            remedy = f"this is {layout}: {remedy}" if layout else remedy
            config.expect("model_type", *model_types or ("llama",), remedy=remedy)
        return config

    def tokenizer(self) -> Path:
        """The `tokenizer.json` in the folder. Raises: CheckpointError if there is none."""
        return self.file(TOKENIZER, "tokenizer")

    def file(self, name: str, kind: str) -> Path:
        """A file of the folder, which becomes a source of role `<role>_<kind>`. Raises: CheckpointError."""
        path = self.place / name
        if not path.is_file():
            if self.place.is_file():
                raise self.error(found="a file", expected=f"a folder with {name}")
            raise self.error(problem=f"has no {name}", expected="a folder with it", remedy="download it into there")
        self.sources.append((f"{self.role}_{kind}", path))
        return path

    def read(self, keep: Callable[[str], bool] = lambda name: True, optional: Collection[str] = ()) -> None:
        """Read all weights, from the file or all files of the folder.

        Where a folder has the same weights in two formats, safetensors come first.

        Args:
            keep: whether a weight of this name is wanted.
            optional: weights that an index may name though no file holds them, since they are another weight's second
                name and were dropped when the files were converted.

        Raises:
            CheckpointError: there are none, or files and index do not fit.
        """
        paths, index, shards = [self.place], None, {}
        if self.place.is_dir():
            present = {path.name for path in self.place.iterdir() if path.is_file()}
            names = choose_files(present)
            if not names:
                loose = [name for name in present if re.search(r"-\d+-of-\d+\.", name)]
                found = f"{listing(loose)} without an index" if loose else "no weights"
                expected = f"one of {', '.join(SINGLE)}, one of {', '.join(INDEX)} with its files, or .pt files"
                raise self.error(found=found, expected=expected)
            if names[0] in INDEX:
                index = self.place / names[0]
                shards = read_index(index)
                self.sources.append((f"{self.role}_index", index))
            paths = [self.place / name for name in sorted(shards) or names]
            if absent := [path.name for path in paths if not path.is_file()]:
                problem = f"lacks {listing(absent)} of the {len(paths)} files in {names[0]}"
                raise self.error(problem=problem, remedy="download them into that folder")
        size = sum(path.stat().st_size for path in paths if path.is_file())
        progress = count_megabytes(f"reading {self.place.name}", size, self.progress)
        for path in paths:
            part = {name: weight for name, weight in read_weights(path, progress, self.averaged).items() if keep(name)}
            if index:
                listed = {name for name in shards[path.name] if keep(name)}
                if problems := _differences(listed - (set(optional) - part.keys()), part.keys()):
                    problem = f"does not hold what the index says, {', '.join(problems)}"
                    raise refusal(path, problem=problem, remedy="download the folder again")
            if twice := sorted(part.keys() & self.weights):
                remedy = "leave the files of one checkpoint in the folder"
                raise refusal(path, twice[0], "is in a file before it, too", remedy=remedy)
            self.weights |= part
            self.sources.append((self.role, path))
        self.weights |= {name: self.weights[own] for name, own in self.tied.items() if own in self.weights}
        for adapter in self.adapters:
            adapter.merge(self.weights, keep)
            self.sources += adapter.sources

    def shown(self, name: str) -> str:
        """A weight's name in the files."""
        return self.prefix + _translate(name, self.names)

    def rename(self, names: Mapping[str, str]) -> None:
        """Give weights the names that are keys of `names`; its values are those of the files. Others stay."""
        back = {theirs: ours for ours, theirs in names.items()}
        self.weights = {_translate(name, back): weight for name, weight in self.weights.items()}
        self.names.update(names)

    def shape(self, name: str, dimensions: int = 2) -> tuple[int, ...]:
        """Shape of a weight that must be there, with so many dimensions. Raises: CheckpointError."""
        if name not in self.weights:
            raise self.error(name, "missing weight")
        shape = tuple(self.weights[name].shape)
        if len(shape) != dimensions or 0 in shape:
            raise self.error(name, found=f"shape {list(shape)}", expected=f"{dimensions} sizes")
        if not self.weights[name].is_floating_point():
            raise self.error(name, found=_kind(self.weights[name]), expected=_FLOATS)
        return shape

    def count(self, prefix: str) -> int:
        """How many consecutive numbers 0, 1, ... follow `prefix` in the names."""
        found = {name[len(prefix) :].split(".")[0] for name in self.weights if name.startswith(prefix)}
        return next(i for i in range(len(found) + 1) if str(i) not in found)

    def take(self, prefix: str) -> Checkpoint:
        """Remove the weights with a prefix and return them without it."""
        names = [name for name in self.weights if name.startswith(prefix)]
        weights = {name.removeprefix(prefix): self.weights.pop(name) for name in names}
        return Checkpoint(self.place, self.role, weights=weights, prefix=self.prefix + prefix)

    def load_strict(self, module: nn.Module) -> None:
        """Give a module the tensors themselves, in their type: every weight with its shape, and nothing else.

        Raises: CheckpointError that lists what is missing, unexpected or of another shape.
        """
        wanted, weights = module.state_dict(), self.weights
        problems = _differences(wanted.keys(), weights.keys(), self.shown)
        problems += [
            f"{self.shown(name)} has shape {list(weights[name].shape)}, expected {list(value.shape)}"
            for name, value in wanted.items()
            if name in weights and weights[name].shape != value.shape
        ][:SHOWN]
        problems += [
            f"{self.shown(name)} holds {_kind(weights[name])}, expected {_kind(value)}"
            for name, value in wanted.items()
            if name in weights and weights[name].is_floating_point() != value.is_floating_point()
        ][:SHOWN]
        if problems:
            raise self.error(problem=f"the weights do not fit the model, {'; '.join(problems)}")
        module.requires_grad_(False).eval().load_state_dict(weights, assign=True)
        object.__setattr__(module, "checkpoint", self)  # for errors about its weights while they are written


def choose_files(names: Collection[str]) -> list[str]:
    """Of the files in a folder, those to read weights from: a single file, an index, a pair, or all `.pt` files."""
    for name in (SINGLE[0], INDEX[0], *SINGLE[1:], INDEX[1]):
        if name in names:
            return [name]
    for pair in PAIRS:
        if {*pair} <= {*names}:
            return [*pair]
    return sorted(name for name in names if name.endswith(_LOOSE) and not name.startswith(_OTHERS))


def read_index(path: Path) -> dict[str, list[str]]:
    """The weights in each file, from an index; file names must be plain. Raises: CheckpointError."""
    config = read_config(path)
    weight_map = config.get("weight_map")
    shards: dict[str, list[str]] = {}
    if not isinstance(weight_map, dict) or not weight_map:
        raise config.error("weight_map", expected="the name of a file for every weight")
    for weight, name in unwrap(path, weight_map).items():
        if not isinstance(name, str) or not re.fullmatch(PLAIN_NAME, name):
            raise refusal(path, format_value(weight), found=format_value(name), expected="the name of a file beside it")
        shards.setdefault(name, []).append(weight)
    return shards


def _kind(weight: Tensor) -> str:
    return _FLOATS if weight.is_floating_point() else f"{str(weight.dtype).removeprefix('torch.')} numbers"


def _differences(wanted: Set[str], found: Set[str], shown: Callable[[str], str] = str) -> list[str]:
    names = {"missing": wanted - found, "unexpected": found - wanted}
    return [f"{word}: {listing([shown(name) for name in some])}" for word, some in names.items() if some]


def _translate(name: str, names: Mapping[str, str]) -> str:
    """The name that a table has for another; the first number in it may be a `*` in the table."""
    number = _LAYER.search(name)
    if name in names or number is None:
        return names.get(name, name)
    starred = f"{name[: number.start()]}*{name[number.end() :]}"
    return names[starred].replace("*", number[0]) if starred in names else name
