"""Test that metrics, labels, files, ports and options named by the files in deploy/ exist."""

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
PROMETHEUS_LABELS = {"job", "instance"}  # labels that Prometheus adds to every sample


def read_yaml(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text("utf-8"))


def read_dockerfile_arguments(instruction: str) -> list[str]:
    """Return the arguments of every occurrence of an instruction, such as RUN, in the Dockerfile."""
    text = (DEPLOY / "Dockerfile").read_text("utf-8").replace("\\\n", " ")  # joins continued lines
    return [line.partition(" ")[2].strip() for line in text.splitlines() if line.startswith(f"{instruction} ")]


COMPOSE = read_yaml("compose.yaml")
SERVICES = COMPOSE["services"]
CMD: list[str] = json.loads(read_dockerfile_arguments("CMD")[0])


def list_expressions() -> list[str]:
    """Return every PromQL expression in the dashboard's panels and variables and in the alerts."""
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    alerts = [rule["expr"] for group in read_yaml("alerts.yml")["groups"] for rule in group["rules"]]
    return [*panels, *alerts, *(variable["query"] for variable in DASHBOARD["templating"]["list"])]


@pytest.fixture(scope="module")
def metrics(tiny_server: RunningServer) -> dict[str, set[str]]:
    """Return the label names of every metric, by metric name, after a successful request and a timeout."""
    assert tiny_server.post({"prompt": "red cube"})[0] == 200
    assert tiny_server.post({"prompt": "red cube", "n": 10, "deadline": 1e-6})[0] == 504
    labels_by_name: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? \S+$", tiny_server.get("/metrics")[1], re.MULTILINE):
        labels_by_name.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return labels_by_name


@pytest.mark.parametrize("expression", list_expressions())
def test_every_metric_and_label_in_the_dashboard_and_alerts_is_exported_by_the_server(
    metrics: dict[str, set[str]], expression: str
) -> None:
    names = set(re.findall(r"\b(?:lantern|process)_\w+", expression))
    assert names <= metrics.keys()
    assert names or expression.startswith("up{")
    labels = {name for name_list in re.findall(r"by \((.*?)\)", expression) for name in name_list.split(", ")}
    labels |= set(re.findall(r"(\w+)(?:=~|=)\"", expression))
    for name in names:
        assert labels - PROMETHEUS_LABELS <= metrics[name], name


def test_every_path_and_volume_in_the_compose_file_exists() -> None:
    build = SERVICES["lantern-rt"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    for name, service in SERVICES.items():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], (name, mount)


def test_all_deployment_files_use_the_same_server_port() -> None:
    port = read_dockerfile_arguments("EXPOSE")[0]
    command = SERVICES["lantern-rt"]["command"]
    for arguments in (CMD, command):
        assert arguments[arguments.index("--port") + 1] == port
        assert arguments[arguments.index("--host") + 1] == "0.0.0.0"
    assert f":{port}/" in read_dockerfile_arguments("HEALTHCHECK")[0]
    (job,) = read_yaml("prometheus.yml")["scrape_configs"]
    (config,) = job["static_configs"]
    assert config["targets"] == [f"lantern-rt:{port}"]
    assert 'job="lantern-rt"' in " ".join(list_expressions())
    assert job["job_name"] == "lantern-rt"
    mappings = [mapping for service in SERVICES.values() for mapping in service["ports"]]
    assert [mapping.split(":")[-1] for mapping in mappings] == [port, "9090", "3000"]
    assert all(mapping.startswith("127.0.0.1:") for mapping in mappings)


MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text("utf-8")))
POD = MANIFESTS[0]["spec"]["template"]["spec"]
UNIT = dict(re.findall(r"^(\w+)=(.*)$", (DEPLOY / "lantern-rt.service").read_text("utf-8"), re.MULTILINE))
KEY_FILE = "/etc/lantern-rt/keys.txt"
COMMANDS = {
    "Dockerfile": CMD,
    "compose.yaml": SERVICES["lantern-rt"]["command"],
    "kubernetes.yaml": POD["containers"][0]["args"],
    "lantern-rt.service": UNIT["ExecStart"].split()[1:],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_server_accepts_the_command_line_of_each_deployment_file(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_dockerfile_arguments("ENTRYPOINT") == ['["lantern-rt"]']
    assert command[0] == "serve"
    (tmp_path / "keys.txt").write_text("a-key\n")
    command = [str(tmp_path / "keys.txt") if argument == KEY_FILE else argument for argument in command]

    def close_sockets(server: Any, sockets: list[Any]) -> None:
        for server_socket in sockets:
            server_socket.close()

    monkeypatch.setattr("uvicorn.Server.run", close_sockets)  # the server ends right after start-up
    assert run_program([*command, "--port", "0"]) == 0


def test_the_systemd_unit_and_the_comment_in_its_file_use_the_same_key_file_and_group() -> None:
    text = (DEPLOY / "lantern-rt.service").read_text("utf-8")
    (group,) = re.findall(r"#   groupadd --system (\S+)", text)
    assert UNIT["SupplementaryGroups"] == group
    assert f"#   install -D -m 640 -g {group} keys.txt {KEY_FILE}\n" in text
    command = COMMANDS["lantern-rt.service"]
    assert command[command.index("--api-key-file") + 1] == KEY_FILE


def test_the_container_image_name_and_version_are_the_same_in_every_file() -> None:
    name = f"lantern-rt:{__version__}"
    assert SERVICES["lantern-rt"]["image"] == POD["containers"][0]["image"] == name
    text = (DEPLOY / "Dockerfile").read_text("utf-8") + (ROOT / "docs/serving.md").read_text("utf-8")
    assert re.findall(r"docker (?:build|run) .* (lantern-rt\S*)", text) == [name, f"{name}-cuda", name, name]


def test_the_stop_timeout_of_each_deployment_exceeds_the_request_deadline_by_10_seconds() -> None:
    _, pause = POD["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    stop_seconds = {
        "compose.yaml": SERVICES["lantern-rt"]["stop_grace_period"].removesuffix("s"),
        "kubernetes.yaml": POD["terminationGracePeriodSeconds"] - int(pause),
        "lantern-rt.service": UNIT["TimeoutStopSec"],
    }
    for name, seconds in stop_seconds.items():
        command = COMMANDS[name]
        assert float(seconds) >= float(command[command.index("--deadline") + 1]) + 10
    assert read_dockerfile_arguments("STOPSIGNAL") == ["SIGTERM"]


def run_health_check(port: int) -> int:
    command = json.loads(read_dockerfile_arguments("HEALTHCHECK")[0].partition("CMD ")[2])
    assert command[0] == "python"
    code = command[2].replace(":8000/", f":{port}/")
    return subprocess.run([sys.executable, command[1], code], stderr=subprocess.DEVNULL).returncode


def test_the_docker_health_check_passes_only_for_a_ready_server(tiny_server: RunningServer) -> None:
    assert run_health_check(int(tiny_server.address.rpartition(":")[2])) == 0

    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as broken_server:  # responds with status 501
        thread = threading.Thread(target=broken_server.handle_request)
        thread.start()
        assert run_health_check(broken_server.server_address[1]) == 1
        thread.join()
    assert run_health_check(broken_server.server_address[1]) == 1


def test_the_docker_build_sends_only_the_wheel_sources_and_runs_as_an_unprivileged_user() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    ignore_lines = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").split()
    included_files = {line[1:] for line in ignore_lines if line[0] == "!"}
    folders = {folder.split("/")[0] for folder in project["tool"]["setuptools"]["package-dir"].values()}
    other_files = {"pyproject.toml", "setup.py", "constraints.txt", "LICENSE", "NOTICE", "README.md"}
    assert included_files == folders | other_files
    assert all((ROOT / name).exists() for name in included_files)
    install_wheel, add_user = read_dockerfile_arguments("RUN")[:2]
    extra_lists = re.findall(r"EXTRAS=([a-z,]+)", (DEPLOY / "Dockerfile").read_text("utf-8"))
    assert {extra for extras in extra_lists for extra in extras.split(",")} == {"cpu", "gpu", "serve"}
    assert {"cpu", "gpu", "serve"} <= project["project"]["optional-dependencies"].keys()
    assert '.whl)[$EXTRAS]"' in install_wheel
    assert "-c constraints.txt" in install_wheel
    user_arguments = shlex.split(add_user.partition("&&")[0])
    assert read_dockerfile_arguments("USER") == [user_arguments[user_arguments.index("--uid") + 1]]


def test_the_kubernetes_manifests_are_valid_and_match_the_server(metrics: Any, tiny_server: RunningServer) -> None:
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
        assert tiny_server.get(container[probe]["httpGet"]["path"])[0] == 200
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for manifest in MANIFESTS:
        kubernetes.validate(manifest, "1.33", strict=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_service_unit(tmp_path: Path) -> None:
    unit = tmp_path / "lantern-rt.service"
    unit.write_text((DEPLOY / unit.name).read_text("utf-8").replace("/opt/lantern-rt/bin/lantern-rt", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert UNIT["ExecReload"] == "/bin/kill -HUP $MAINPID"
