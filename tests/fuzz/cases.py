"""Hostile inputs by seed, and a check of the program's reaction to each."""

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
from bundle_folder import write_manifest
from mutations import VALUES, damage, damage_file, damage_json, refer
from plan_folder import write_plans
from tiny_bundle import make_tiny_bundle

from lantern_rt import Pipeline
from lantern_rt.bundle.files import GRAPHS, MANIFEST_FILE, open_bundle
from lantern_rt.cli.main import run_program
from lantern_rt.compare.prompts import Prompts
from lantern_rt.engines.engine_folder import ENGINE_FILE
from lantern_rt.errors import LanternError
from lantern_rt.output.images import encode_png
from lantern_rt.text.tokenizers import CaptionTokenizer, TemplateTokenizer, load_tokenizer
from lantern_rt.train.drafter.data import generate_shards

SECONDS = 120
MEMORY = 2 << 30
METHODS = ("ar", "eagle", "lantern", "lantern++", "sjd:window=3", "rows:window=2")
DATA = Path(__file__).parents[1] / "data"
Case = list[str] | Callable[[], object]  # words of a command line, or a call of the library


class Originals:
    """Valid inputs of every kind.

    Args:
        folder: folder for the inputs.
        trained: LlamaGen bundle whose images fill the shards.
    """

    def __init__(self, folder: Path, trained: Path) -> None:
        self.bundle = make_tiny_bundle(folder / "tiny", grid=4)
        self._add_presets()
        pipeline = Pipeline.from_bundle(self.bundle, threads=1)
        self.picture = pipeline("red cube", method="lantern").images[0]
        self.classes = make_tiny_bundle(folder / "classes", kind="class", grid=4)
        self.engines = folder / "engines"
        write_plans(self.bundle, self.engines)
        self.trained = trained
        self.shards = folder / "shards"
        with Pipeline.from_bundle(trained, threads=1) as pipeline:
            list(
                generate_shards(
                    pipeline, Prompts("class_ids", [3, 1]), 2, self.shards, lambda *_: None, images_per_shard=2
                )
            )

    def _add_presets(self) -> None:
        (self.bundle / "prompts.txt").write_text("red cube\ngreen sphere on sand\n")
        manifest = json.loads((self.bundle / MANIFEST_FILE).read_text())
        manifest["files"]["prompts"] = {"path": "prompts.txt"}
        figures = {"tokens_per_pass": 2.0, "excess_nll": 0.01, "images": 9, "date": "2026-01-02"}
        methods = {"balanced": {"method": "sjd", "window": 3}, "fast": {"method": "rows", "window": 2}}
        manifest["presets"] = {name: {"method": method, "figures": figures} for name, method in methods.items()}
        write_manifest(self.bundle, manifest)


# ---------------------------------------------------------------- kinds of input


def run(bundle: Path, out: Path, *options: object) -> list[str]:
    subject = ["red cube"] if (bundle / "prompts.txt").exists() else ["--class-id", "3"]
    common = ["--threads", "1", "--output", out / "picture.png"]
    return [str(word) for word in ("run", bundle, *subject, *common, *options)]


def manifests(originals: Originals, folder: Path, rng: random.Random) -> list[str]:
    """Make a bundle with a damaged manifest."""
    bundle = Path(shutil.copytree(rng.choice((originals.bundle, originals.classes)), folder / "damaged"))
    damage_file(bundle / MANIFEST_FILE, rng)
    return _open(bundle, folder, rng)


def references(originals: Originals, folder: Path, rng: random.Random) -> Case:
    """Make a graph that reads a file which its bundle does not list, under any name that could hide a graph."""
    bundle = Path(shutil.copytree(originals.bundle, folder / "damaged"))
    manifest = json.loads((bundle / MANIFEST_FILE).read_text())
    role = rng.choice(GRAPHS[:4])
    entry = manifest["files"][role]
    locations = ("unlisted.data", "../outside.data", "/etc/hostname", "sub/../target.onnx", "a\\b", "\x1b[2J", "")
    location = rng.choice(locations)
    data = refer((bundle / entry["path"]).read_bytes(), location, rng)
    name = rng.choice(("t", "t.bin", "t.ONNX", "t.onnx ", "t.onnx", "t.onnx.data", "sub/t.onnx"))
    for path in (bundle / "unlisted.data", folder / "outside.data", bundle / name):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    write_manifest(bundle, manifest | {"files": {**manifest["files"], role: {**entry, "path": name}}})

    def open_it() -> None:
        with pytest.raises(LanternError):
            open_bundle(bundle)

    return open_it


def pictures(originals: Originals, folder: Path, rng: random.Random) -> list[str]:
    """Make a damaged image to generate again, or an image with a false record."""
    texts = dict(originals.picture.info)
    has_false_record = rng.random() < 0.6
    if has_false_record:
        name = rng.choice([*texts, "settings", "settings"])
        text = (
            damage_json(texts[name], rng) if name == "settings" else str(rng.choice(VALUES)).encode("utf-8", "replace")
        )
        texts[name] = text.decode("utf-8", "replace")
    path = folder / "damaged.png"
    path.write_bytes(encode_png(originals.picture, texts))
    if not has_false_record or rng.random() < 0.3:
        damage_file(path, rng)
    return ["run", str(originals.bundle), "--from", str(path), "--output", str(folder / "out/a.png"), "--threads", "1"]


def shards(originals: Originals, folder: Path, rng: random.Random) -> list[str]:
    """Make damaged images to train a drafter on."""
    damaged = Path(shutil.copytree(originals.shards, folder / "damaged"))
    damage_file(next(damaged.iterdir()), rng)
    output = str(folder / "out/drafter")
    return ["train-drafter", "fit", str(originals.trained), "--data", str(damaged), "--steps", "1", "--output", output]


def bundles(originals: Originals, folder: Path, rng: random.Random) -> list[str]:
    """Make a bundle with a damaged file and its hash in the manifest."""
    bundle = Path(shutil.copytree(rng.choice((originals.bundle, originals.classes)), folder / "damaged"))
    manifest = json.loads((bundle / MANIFEST_FILE).read_text())
    damage_file(bundle / manifest["files"][rng.choice(sorted(manifest["files"]))]["path"], rng)
    write_manifest(bundle, manifest)
    return _open(bundle, folder, rng)


def _open(bundle: Path, folder: Path, rng: random.Random) -> list[str]:
    if rng.random() < 0.15:
        return ["inspect", str(bundle), *rng.choice(((), ("--json",)))]
    return run(bundle, folder / "out", *_method(rng))


def _method(rng: random.Random) -> list[str]:
    if rng.random() < 0.2:
        return rng.choice(([], ["--quality", "balanced"], ["--quality", "fast"], ["--quality", "best"]))
    return ["--method", rng.choice(METHODS)]


def engines(originals: Originals, folder: Path, rng: random.Random) -> list[str]:
    """Make a damaged engine record or engine."""
    damaged = Path(shutil.copytree(originals.engines, folder / "damaged"))
    damage_file(damaged / rng.choice((ENGINE_FILE, ENGINE_FILE, "target.plan")), rng)
    if rng.random() < 0.4:
        return ["inspect", str(damaged)]
    return run(originals.bundle, folder / "out", "--engines", damaged, *_method(rng))


def trees(originals: Originals, folder: Path, rng: random.Random) -> list[str]:
    """Make invalid and unusual names of trees."""
    numbers = [str(rng.choice((0, 1, 2, 3, 9, 40, 99, 100, 128, 999, 10**9))) for _ in range(3)]
    names = [
        "-".join(("dynamic", *numbers)),
        f"chain-{numbers[0]}",
        "tree" + "".join(f"-{''.join(rng.choices('0123z', k=rng.choice((1, 2, 9, 600))))}" for _ in range(3)),
        str(rng.choice([value for value in VALUES if isinstance(value, str)])),
    ]
    name = _argument(rng.choice(names))
    return run(originals.bundle, folder / "out", f"--method={rng.choice(('eagle', 'lantern'))}:tree={name}")


def _argument(text: str) -> str:
    """Return the part of a text that a program's argument can contain."""
    return text.replace("\x00", "").encode("utf-8", "ignore").decode()


def prompts(originals: Originals, folder: Path, rng: random.Random) -> list[str]:
    """Make unusual prompts, in a damaged file or as arguments."""
    text = "red cube\ngreen sphere on sand\na cube on snow\n"
    if rng.random() < 0.3:
        words = _argument(damage(text.encode(), rng).decode("utf-8", "replace"))
        return ["run", "--output", str(folder / "out/a.png"), "--", str(originals.bundle), words]
    path = folder / "prompts.txt"
    path.write_bytes(rng.choice((damage(text.encode(), rng), damage(text.encode() * 9, rng), rng.randbytes(300))))
    options = ["--method", "ar", "--output", str(folder / "out/report"), "--threads", "1"]
    return ["eval", str(originals.bundle), "--prompts", str(path), *options]


def tokenizers(originals: Originals, folder: Path, rng: random.Random) -> Case:
    """Make damaged tokenizers in the format of the library."""
    path = Path(shutil.copy(DATA / "tiny-text-tokenizer/tokenizer.json", folder))
    damage_file(path, rng)

    def encode() -> None:
        CaptionTokenizer(load_tokenizer(path), None).encode("a red cube, on snow", 8)
        TemplateTokenizer(load_tokenizer(path)).encode("a red cube, on snow", 40)

    return encode


def checkpoints(originals: Originals, folder: Path, rng: random.Random) -> Case:
    """Make damaged checkpoints in official layouts."""
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


KINDS: dict[str, Callable[[Originals, Path, random.Random], Case]] = {
    "manifests": manifests,
    "bundles": bundles,
    "references": references,
    "pictures": pictures,
    "shards": shards,
    "engines": engines,
    "trees": trees,
    "prompts": prompts,
    "tokenizers": tokenizers,
    "checkpoints": checkpoints,
}

# ---------------------------------------------------------------- checks


def check(kind: str, seed: int, originals: Originals, capture: pytest.CaptureFixture[str]) -> None:
    """Run a case and check the program's output, files, time and memory.

    Args:
        kind: name in `KINDS`.
        seed: seed of the case.
        originals: valid inputs.
        capture: fixture that captures output, also of libraries (`capfd`).
    """
    rng = random.Random(f"{kind} {seed}")
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.setenv("LANTERN_RT_CACHE", str(folder / "cache"))
        (folder / "out").mkdir()
        case = KINDS[kind](originals, folder, rng)
        code, text = outcome(case, capture)
        description = f"{kind} {seed}: {case}\n{text[-3000:]}"
        assert code in (0, 2, 130), f"exit code {code}: {description}"
        noise = [word for word in ("Traceback", "panicked", "Warning:") if word in text]
        assert not noise, f"{noise}: {description}"
        *_, last = text.splitlines() or [""]
        assert code != 2 or last.startswith("lantern-rt: ") or callable(case), f"no line with the reason: {description}"
        is_printable = all(character.isprintable() or character == "\n" for character in text)
        assert is_printable, f"control characters: {description!r}"
        remaining_files = sorted(str(path.relative_to(folder)) for path in (folder / "out").rglob("*"))
        assert code == 0 or not remaining_files, f"left behind: {remaining_files} by {description}"
        assert not [path for path in remaining_files if ".partial" in path], (
            f"left behind: {remaining_files} by {description}"
        )


def outcome(case: Case, capture: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a case; return its exit code and all output.

    For calls of the library, a `LanternError` is exit code 2 with its message; other exceptions are raised.
    """

    def stop(*_: object) -> None:
        raise AssertionError(f"hangs: {case}")

    before = signal.signal(signal.SIGALRM, stop)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.alarm(SECONDS)
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
        signal.signal(signal.SIGALRM, before)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak)
    assert grown < MEMORY, f"{grown:,} bytes: {case}"
    return code, "".join(capture.readouterr()) + error
