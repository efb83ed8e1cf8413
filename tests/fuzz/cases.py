"""Generators of hostile inputs from seeds, and a check of the program's reaction to each input."""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from bundle_folder import write_bundle_manifest
from mutations import VALUES, damage_bytes, damage_file, damage_json, move_weight_to_file
from plan_folder import write_engine_folder
from tiny_bundle import make_tiny_bundle

from lantern_rt import Pipeline
from lantern_rt.bundle.files import GRAPHS, MANIFEST_FILE, open_bundle
from lantern_rt.cli.main import run_program
from lantern_rt.compare.prompts import Prompts
from lantern_rt.engines.engine_folder import ENGINE_FILE
from lantern_rt.errors import LanternError
from lantern_rt.output.formats import PNG
from lantern_rt.output.images import attach_recipe
from lantern_rt.subjects.prompts import ClassId
from lantern_rt.text.tokenizers import CaptionTokenizer, TemplateTokenizer, load_tokenizer
from lantern_rt.train.drafter.data import generate_shards

MAX_SECONDS = 120  # time limit of a case
MAX_MEMORY_GROWTH = 2 << 30  # bytes that a case may add to the peak memory
METHODS = ("ar", "eagle", "lantern", "lantern++", "sjd:window=3", "rows:window=2")
DATA = Path(__file__).parents[1] / "data"
Case = list[str] | Callable[[], object]  # arguments of a command line, or a function that calls the library


class ValidInputs:
    def __init__(self, folder: Path, trained: Path) -> None:
        self.bundle = make_tiny_bundle(folder / "tiny", grid=4)
        self._add_presets()
        pipeline = Pipeline.from_bundle(self.bundle, threads=1)
        self.image = pipeline("red cube", method="lantern").images[0]
        self.classes = make_tiny_bundle(folder / "classes", kind="class", grid=4)
        self.engines = folder / "engines"
        write_engine_folder(self.bundle, self.engines)
        self.trained = trained
        self.shards = folder / "shards"
        with Pipeline.from_bundle(trained, threads=1) as pipeline:
            prompts = Prompts(ClassId, [3, 1])
            list(generate_shards(pipeline, prompts, 2, self.shards, lambda *_: None, images_per_shard=2))

    def _add_presets(self) -> None:
        """Add a prompt file and two quality presets to the bundle."""
        (self.bundle / "prompts.txt").write_text("red cube\ngreen sphere on sand\n")
        manifest = json.loads((self.bundle / MANIFEST_FILE).read_text())
        manifest["files"]["prompts"] = {"path": "prompts.txt"}
        figures = {"tokens_per_pass": 2.0, "excess_nll": 0.01, "images": 9, "date": "2026-01-02"}
        methods = {"balanced": {"method": "sjd", "window": 3}, "fast": {"method": "rows", "window": 2}}
        manifest["presets"] = {name: {"method": method, "figures": figures} for name, method in methods.items()}
        write_bundle_manifest(self.bundle, manifest)


# ---------------------------------------------------------------- kinds of input


# Each function makes a case. `valid_inputs` are not changed, `folder` is an empty folder for the case, and `rng`
# chooses the damage.


def make_run_command(bundle: Path, out: Path, *options: object) -> list[str]:
    condition = ["red cube"] if (bundle / "prompts.txt").exists() else ["--class-id", "3"]
    common_options = ["--threads", "1", "--output", out / "picture.png"]
    return [str(word) for word in ("run", bundle, *condition, *common_options, *options)]


def make_manifest_case(valid_inputs: ValidInputs, folder: Path, rng: random.Random) -> list[str]:
    bundle = Path(shutil.copytree(rng.choice((valid_inputs.bundle, valid_inputs.classes)), folder / "damaged"))
    damage_file(bundle / MANIFEST_FILE, rng)
    return _make_open_command(bundle, folder, rng)


def make_external_data_case(valid_inputs: ValidInputs, folder: Path, rng: random.Random) -> Case:
    """Make a graph file that refers to external data which the manifest does not list; opening it must fail."""
    bundle = Path(shutil.copytree(valid_inputs.bundle, folder / "damaged"))
    manifest = json.loads((bundle / MANIFEST_FILE).read_text())
    role = rng.choice([role for role in GRAPHS if role in manifest["files"]])
    entry = manifest["files"][role]
    locations = ("unlisted.data", "../outside.data", "/etc/hostname", "sub/../target.onnx", "a\\b", "\x1b[2J", "")
    location = rng.choice(locations)
    data = move_weight_to_file((bundle / entry["path"]).read_bytes(), location, rng)
    name = rng.choice(("t", "t.bin", "t.ONNX", "t.onnx ", "t.onnx", "t.onnx.data", "sub/t.onnx"))
    for path in (bundle / "unlisted.data", folder / "outside.data", bundle / name):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    write_bundle_manifest(bundle, manifest | {"files": {**manifest["files"], role: {**entry, "path": name}}})

    def expect_rejection() -> None:
        with pytest.raises(LanternError):
            open_bundle(bundle)

    return expect_rejection


def make_image_case(valid_inputs: ValidInputs, folder: Path, rng: random.Random) -> list[str]:
    """Make a PNG file with damaged bytes or metadata; return a command that generates an image from the metadata."""
    texts = dict(valid_inputs.image.info)
    has_damaged_metadata = rng.random() < 0.6
    if has_damaged_metadata:
        name = rng.choice([*texts, "settings", "settings"])
        text = (
            damage_json(texts[name], rng) if name == "settings" else str(rng.choice(VALUES)).encode("utf-8", "replace")
        )
        texts[name] = text.decode("utf-8", "replace")
    path = folder / "damaged.png"
    path.write_bytes(PNG.encode_image(attach_recipe(valid_inputs.image, texts)))
    if not has_damaged_metadata or rng.random() < 0.3:
        damage_file(path, rng)
    options = ["--from", str(path), "--output", str(folder / "out/a.png"), "--threads", "1"]
    return ["run", str(valid_inputs.bundle), *options]


def make_shard_case(valid_inputs: ValidInputs, folder: Path, rng: random.Random) -> list[str]:
    damaged = Path(shutil.copytree(valid_inputs.shards, folder / "damaged"))
    damage_file(next(damaged.iterdir()), rng)
    options = ["--data", str(damaged), "--steps", "1", "--output", str(folder / "out/drafter")]
    return ["train-drafter", "fit", str(valid_inputs.trained), *options]


def make_bundle_case(valid_inputs: ValidInputs, folder: Path, rng: random.Random) -> list[str]:
    """Make a bundle with a damaged file whose hash in the manifest matches; return a command that opens the bundle."""
    bundle = Path(shutil.copytree(rng.choice((valid_inputs.bundle, valid_inputs.classes)), folder / "damaged"))
    manifest = json.loads((bundle / MANIFEST_FILE).read_text())
    damage_file(bundle / manifest["files"][rng.choice(sorted(manifest["files"]))]["path"], rng)
    write_bundle_manifest(bundle, manifest)
    return _make_open_command(bundle, folder, rng)


def _make_open_command(bundle: Path, folder: Path, rng: random.Random) -> list[str]:
    if rng.random() < 0.15:
        return ["inspect", str(bundle), *rng.choice(((), ("--json",)))]
    return make_run_command(bundle, folder / "out", *_choose_method_options(rng))


def _choose_method_options(rng: random.Random) -> list[str]:
    """Return the options `--quality` or `--method` with a random value, or no options."""
    if rng.random() < 0.2:
        return rng.choice(([], ["--quality", "balanced"], ["--quality", "fast"], ["--quality", "best"]))
    return ["--method", rng.choice(METHODS)]


def make_engine_case(valid_inputs: ValidInputs, folder: Path, rng: random.Random) -> list[str]:
    damaged = Path(shutil.copytree(valid_inputs.engines, folder / "damaged"))
    damage_file(damaged / rng.choice((ENGINE_FILE, ENGINE_FILE, "target.plan")), rng)
    if rng.random() < 0.4:
        return ["inspect", str(damaged)]
    return make_run_command(valid_inputs.bundle, folder / "out", "--engines", damaged, *_choose_method_options(rng))


def make_tree_case(valid_inputs: ValidInputs, folder: Path, rng: random.Random) -> list[str]:
    numbers = [str(rng.choice((0, 1, 2, 3, 9, 40, 99, 100, 128, 999, 10**9))) for _ in range(3)]
    names = [
        "-".join(("dynamic", *numbers)),
        f"chain-{numbers[0]}",
        "tree" + "".join(f"-{''.join(rng.choices('0123z', k=rng.choice((1, 2, 9, 600))))}" for _ in range(3)),
        str(rng.choice([value for value in VALUES if isinstance(value, str)])),
    ]
    name = _keep_argument_characters(rng.choice(names))
    return make_run_command(
        valid_inputs.bundle, folder / "out", f"--method={rng.choice(('eagle', 'lantern'))}:tree={name}"
    )


def _keep_argument_characters(text: str) -> str:
    """Return a text without the characters that a command-line argument cannot contain: NUL and surrogates."""
    return text.replace("\x00", "").encode("utf-8", "ignore").decode()


def make_prompt_case(valid_inputs: ValidInputs, folder: Path, rng: random.Random) -> list[str]:
    text = "red cube\ngreen sphere on sand\na cube on snow\n"
    if rng.random() < 0.3:
        words = _keep_argument_characters(damage_bytes(text.encode(), rng).decode("utf-8", "replace"))
        return ["run", "--output", str(folder / "out/a.png"), "--", str(valid_inputs.bundle), words]
    path = folder / "prompts.txt"
    path.write_bytes(
        rng.choice((damage_bytes(text.encode(), rng), damage_bytes(text.encode() * 9, rng), rng.randbytes(300)))
    )
    options = ["--method", "ar", "--output", str(folder / "out/report"), "--threads", "1"]
    return ["eval", str(valid_inputs.bundle), "--prompts", str(path), *options]


def make_tokenizer_case(valid_inputs: ValidInputs, folder: Path, rng: random.Random) -> Case:
    """Make a damaged tokenizer.json, and return a function that loads the tokenizer and encodes a prompt."""
    path = Path(shutil.copy(DATA / "tiny-text-tokenizer/tokenizer.json", folder))
    damage_file(path, rng)

    def encode() -> None:
        CaptionTokenizer(load_tokenizer(path), None).encode("a red cube, on snow", 8)
        TemplateTokenizer(load_tokenizer(path)).encode("a red cube, on snow", 40)

    return encode


def make_checkpoint_case(valid_inputs: ValidInputs, folder: Path, rng: random.Random) -> Case:
    """Make a damaged LlamaGen checkpoint or drafter, and return a function that reads the model."""
    from family_readers import read_llamagen

    vq = DATA / "llamagen-vq/vq_tiny.pt"
    if rng.random() < 0.4:
        target = Path(shutil.copytree(DATA / "lantern-llamagen-hf/c2i", folder / "target"))
        damage_file(target / rng.choice(("config.json", "model.safetensors")), rng)
        return partial(read_llamagen, target, vq)
    damaged = Path(shutil.copytree(DATA / "llamagen-t2i", folder / "damaged"))
    drafter = Path(shutil.copytree(DATA / "lantern-drafter-llamagen", folder / "drafter"))
    target = damaged / "t2i_tiny.pt"
    config = damaged / "config.json"
    damage_file(rng.choice((target, target, config, drafter / "config.json", drafter / "pytorch_model.bin")), rng)
    return partial(read_llamagen, target, vq, drafter=drafter, config=config)


KINDS: dict[str, Callable[[ValidInputs, Path, random.Random], Case]] = {
    "manifests": make_manifest_case,
    "bundles": make_bundle_case,
    "references": make_external_data_case,
    "pictures": make_image_case,
    "shards": make_shard_case,
    "engines": make_engine_case,
    "trees": make_tree_case,
    "prompts": make_prompt_case,
    "tokenizers": make_tokenizer_case,
    "checkpoints": make_checkpoint_case,
}

# ---------------------------------------------------------------- checks


def check_case(kind: str, seed: int, valid_inputs: ValidInputs, capture: pytest.CaptureFixture[str]) -> None:
    """Run a case and check the exit code, output, remaining files, time and memory of the program."""
    rng = random.Random(f"{kind} {seed}")
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.setenv("LANTERN_RT_CACHE", str(folder / "cache"))
        (folder / "out").mkdir()
        case = KINDS[kind](valid_inputs, folder, rng)
        code, text = run_case(case, capture)
        description = f"{kind} {seed}: {case}\n{text[-3000:]}"
        assert code in (0, 2, 130), f"exit code {code}: {description}"
        forbidden_words = [word for word in ("Traceback", "panicked", "Warning:") if word in text]
        assert not forbidden_words, f"{forbidden_words}: {description}"
        *_, last_line = text.splitlines() or [""]
        has_error_line = last_line.startswith("lantern-rt: ") or callable(case)
        assert code != 2 or has_error_line, f"no error line: {description}"
        is_printable = all(character.isprintable() or character == "\n" for character in text)
        assert is_printable, f"control characters: {description!r}"
        remaining_files = sorted(str(path.relative_to(folder)) for path in (folder / "out").rglob("*"))
        assert code == 0 or not remaining_files, f"left behind: {remaining_files} by {description}"
        assert not [path for path in remaining_files if ".partial" in path], (
            f"left behind: {remaining_files} by {description}"
        )


def run_case(case: Case, capture: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a case; return the exit code, 2 for a `LanternError`, and all output."""

    def raise_timeout(*_: object) -> None:
        raise AssertionError(f"still running after {MAX_SECONDS} seconds: {case}")

    previous_handler = signal.signal(signal.SIGALRM, raise_timeout)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.alarm(MAX_SECONDS)
    code = 0
    error = ""
    try:
        if isinstance(case, list):
            code = run_program(case)
        else:
            case()
    except LanternError as exception:
        code = 2
        error = str(exception)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous_handler)
    memory_growth = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak)  # ru_maxrss is in KiB
    assert memory_growth < MAX_MEMORY_GROWTH, f"{memory_growth:,} bytes: {case}"
    return code, "".join(capture.readouterr()) + error
