"""Check that the files in deploy/ name things that exist: metrics, labels, files, ports, options."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer

from lantern_rt import __version__
from lantern_rt.cli.main import run_program
from lantern_rt.serve.state import KEY_VARIABLE

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/lantern-rt.json").read_text("utf-8"))
SCRAPED = {"job", "instance"}  # labels that Prometheus adds


def read_yaml(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text("utf-8"))


def dockerfile_instructions(kind: str) -> list[str]:
    """Return the arguments of every instruction of this kind in the Dockerfile, continued lines joined."""
    text = (DEPLOY / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    return [line.partition(" ")[2].strip() for line in text.splitlines() if line.startswith(f"{kind} ")]


COMPOSE = read_yaml("compose.yaml")
SERVICES = COMPOSE["services"]
CMD: list[str] = json.loads(dockerfile_instructions("CMD")[0])


def list_expressions() -> list[str]:
    """Return every PromQL expression of panels, alerts, and the variable of the dashboard."""
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    alerts = [rule["expr"] for group in read_yaml("alerts.yml")["groups"] for rule in group["rules"]]
    return [*panels, *alerts, *(variable["query"] for variable in DASHBOARD["templating"]["list"])]


@pytest.fixture(scope="module")
def metrics(tiny: RunningServer) -> dict[str, set[str]]:
    """Return the names of a server's samples, after it has drawn, rejected and timed out, each with its labels."""
    assert tiny.post({"prompt": "red cube"})[0] == 200
    assert tiny.post({"prompt": "red cube", "n": 10, "deadline": 1e-6})[0] == 504
    labels_by_name: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? \S+$", tiny.get("/metrics")[1], re.MULTILINE):
        labels_by_name.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return labels_by_name


@pytest.mark.parametrize("expression", list_expressions())
def test_every_metric_and_label_of_dashboard_and_alerts_is_one_of_the_server(
    metrics: dict[str, set[str]], expression: str
) -> None:
    names = set(re.findall(r"\b(?:lantern|process)_\w+", expression))
    assert names <= metrics.keys()
    assert names or expression.startswith("up{")
    labels = {name for part in re.findall(r"by \((.*?)\)", expression) for name in part.split(", ")}
    labels |= set(re.findall(r"(\w+)(?:=~|=)\"", expression))
    for name in names:
        assert labels - SCRAPED <= metrics[name], name


def test_what_compose_mounts_and_builds_exists() -> None:
    build = SERVICES["lantern-rt"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    for name, service in SERVICES.items():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], (name, mount)


def test_everything_is_reached_at_the_port_it_listens_at() -> None:
    port = dockerfile_instructions("EXPOSE")[0]
    command = SERVICES["lantern-rt"]["command"]
    for arguments in (CMD, command):
        assert arguments[arguments.index("--port") + 1] == port
        assert arguments[arguments.index("--host") + 1] == "0.0.0.0"
    assert f":{port}/" in dockerfile_instructions("HEALTHCHECK")[0]
    (job,) = read_yaml("prometheus.yml")["scrape_configs"]
    (config,) = job["static_configs"]
    assert config["targets"] == [f"lantern-rt:{port}"]
    assert 'job="lantern-rt"' in " ".join(list_expressions())
    assert job["job_name"] == "lantern-rt"
    assert [mapping.split(":")[-1] for service in SERVICES.values() for mapping in service["ports"]] == [
        port, "9090", "3000",
    ]  # fmt: skip
    assert all(mapping.startswith("127.0.0.1:") for service in SERVICES.values() for mapping in service["ports"])


MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text("utf-8")))
POD = MANIFESTS[0]["spec"]["template"]["spec"]
UNIT = dict(re.findall(r"^(\w+)=(.*)$", (DEPLOY / "lantern-rt.service").read_text("utf-8"), re.MULTILINE))
KEYS = "/etc/lantern-rt/keys.txt"
COMMANDS = {
    "Dockerfile": CMD,
    "compose.yaml": SERVICES["lantern-rt"]["command"],
    "kubernetes.yaml": POD["containers"][0]["args"],
    "lantern-rt.service": UNIT["ExecStart"].split()[1:],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_command_of_a_container_is_one_of_a_server(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dockerfile_instructions("ENTRYPOINT") == ['["lantern-rt"]']
    assert command[0] == "serve"
    (tmp_path / "keys.txt").write_text("a-key\n")
    command = [str(tmp_path / "keys.txt") if part == KEYS else part for part in command]
    monkeypatch.setattr(
        "uvicorn.Server.run", lambda server, sockets: [server_socket.close() for server_socket in sockets]
    )
    assert run_program([*command, "--port", "0"]) == 0


def test_a_service_has_a_file_of_keys_that_only_its_group_reads_and_that_its_comment_makes() -> None:
    text = (DEPLOY / "lantern-rt.service").read_text("utf-8")
    (group,) = re.findall(r"#   groupadd --system (\S+)", text)
    assert UNIT["SupplementaryGroups"] == group
    assert f"#   install -D -m 640 -g {group} keys.txt {KEYS}\n" in text
    command = COMMANDS["lantern-rt.service"]
    assert command[command.index("--api-key-file") + 1] == KEYS


def test_an_image_has_one_name_everywhere_with_the_version_of_the_program() -> None:
    name = f"lantern-rt:{__version__}"
    assert SERVICES["lantern-rt"]["image"] == POD["containers"][0]["image"] == name
    text = (DEPLOY / "Dockerfile").read_text("utf-8") + (ROOT / "docs/serving.md").read_text("utf-8")
    assert re.findall(r"docker (?:build|run) .* (lantern-rt\S*)", text) == [name, f"{name}-cuda", name, name]


def test_a_container_is_given_longer_to_stop_than_the_server_takes() -> None:
    _, pause = POD["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    rest = POD["terminationGracePeriodSeconds"] - int(pause)
    graces = SERVICES["lantern-rt"]["stop_grace_period"].removesuffix("s"), rest
    for grace, (_, command) in zip((*graces, UNIT["TimeoutStopSec"]), list(COMMANDS.items())[1:], strict=True):
        assert float(grace) >= float(command[command.index("--deadline") + 1]) + 10
    assert dockerfile_instructions("STOPSIGNAL") == ["SIGTERM"]


def check_health(port: int) -> int:
    """Return the exit code of the command that Docker runs."""
    command = json.loads(dockerfile_instructions("HEALTHCHECK")[0].partition("CMD ")[2])
    assert command[0] == "python"
    code = command[2].replace(":8000/", f":{port}/")
    return subprocess.run([sys.executable, command[1], code], stderr=subprocess.DEVNULL).returncode


def test_the_health_check_tells_a_server_that_is_ready_from_one_that_is_not(tiny: RunningServer) -> None:
    assert check_health(int(tiny.address.rpartition(":")[2])) == 0

    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as broken:  # answers 501
        thread = threading.Thread(target=broken.handle_request)
        thread.start()
        assert check_health(broken.server_address[1]) == 1
        thread.join()
    assert check_health(broken.server_address[1]) == 1


def test_the_image_is_made_of_what_the_wheel_needs_and_runs_as_nobody_special() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    sent = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").split() if line[0] == "!"}
    folders = {folder.split("/")[0] for folder in project["tool"]["setuptools"]["package-dir"].values()}
    assert sent == folders | {"pyproject.toml", "setup.py", "constraints.txt", "LICENSE", "NOTICE", "README.md"}
    assert all((ROOT / name).exists() for name in sent)
    (wheel, *_), (user, *_) = dockerfile_instructions("RUN"), dockerfile_instructions("RUN")[1:]
    chosen = re.findall(r"EXTRAS=([a-z,]+)", (DEPLOY / "Dockerfile").read_text("utf-8"))
    assert {extra for extras in chosen for extra in extras.split(",")} == {"cpu", "gpu", "serve"}
    assert {"cpu", "gpu", "serve"} <= project["project"]["optional-dependencies"].keys()
    assert '.whl)[$EXTRAS]"' in wheel
    assert "-c constraints.txt" in wheel
    account = shlex.split(user.partition("&&")[0])
    assert dockerfile_instructions("USER") == [account[account.index("--uid") + 1]]


def test_the_manifests_are_what_kubernetes_knows_and_name_what_the_server_has(
    metrics: dict[str, set[str]], tiny: RunningServer
) -> None:
    deployment, service, scaler, budget = MANIFESTS
    (container,) = POD["containers"]
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    assert budget["spec"]["selector"] == deployment["spec"]["selector"]
    assert budget["spec"]["minAvailable"] < scaler["spec"]["minReplicas"]
    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert scaler["spec"]["metrics"][0]["pods"]["metric"]["name"] in metrics
    assert str(container["ports"][0]["containerPort"]) == container["args"][container["args"].index("--port") + 1]
    assert [container["env"][0]["name"]] == SERVICES["lantern-rt"]["environment"] == [KEY_VARIABLE]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert tiny.get(container[probe]["httpGet"]["path"])[0] == 200
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for manifest in MANIFESTS:
        kubernetes.validate(manifest, "1.33", strict=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_the_unit_is_what_systemd_knows(tmp_path: Path) -> None:
    unit = tmp_path / "lantern-rt.service"
    unit.write_text((DEPLOY / unit.name).read_text("utf-8").replace("/opt/lantern-rt/bin/lantern-rt", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert UNIT["ExecReload"] == "/bin/kill -HUP $MAINPID"
