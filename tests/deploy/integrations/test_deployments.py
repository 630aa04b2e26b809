"""Deployment manifests: their flags exist and their parts match."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.integrations.prometheus_queries import DASHBOARD

from quintet.deploy.cli import route
from quintet.deploy.cli.main import CommandParser
from quintet.deploy.cli.serve import add_option_arguments, options_of
from quintet.deploy.config.flags import Options
from quintet.deploy.config.hosts import hosts_config
from quintet.frontend.http.auth import is_open
from quintet.frontend.routes import ROUTES

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy" / "integrations"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("quintet*.yaml"))

GRACE_S = 30
"""Kubernetes' default termination grace period."""


def things(path: Path) -> list[dict[str, Any]]:
    return [thing for thing in yaml.safe_load_all(path.read_text()) if thing]


def options_from(words: list[str]) -> Options:
    """Parse as `quintet serve` does; an invalid flag fails."""
    assert words[0] == "serve"
    parser = CommandParser()
    add_option_arguments(parser)
    return options_of(parser.parse_args(words[1:]))[0]


def route_options_from(words: list[str]) -> Any:
    """Parse as `quintet route` does."""
    parser = CommandParser()
    route.add_parser(parser.add_subparsers(parser_class=CommandParser))
    return parser.parse_args(words)


def started(path: Path) -> list[dict[str, Any]]:
    """Return the pod specifications of a manifest."""
    pods = []
    for thing in things(path):
        if thing["kind"] == "Deployment":
            pods.append(thing["spec"]["template"]["spec"])
        elif thing["kind"] == "LeaderWorkerSet":
            group = thing["spec"]["leaderWorkerTemplate"]
            pods += [group["leaderTemplate"]["spec"], group["workerTemplate"]["spec"]]
    return pods


def words_of(pod: dict[str, Any], config: Path, controller_env: Mapping[str, str]) -> list[str]:
    """Return the arguments of a pod's container, with the environment of the controller and of the pod filled in."""
    [container] = pod["containers"]
    pod_env = {
        each["name"]: "10.0.0.5"
        for each in container.get("env", ())
        if "fieldRef" in each.get("valueFrom", {})
    }
    known = {each["name"]: "key" for each in container.get("env", ())} | pod_env | controller_env
    return [
        re.sub(r"\$\((\w+)\)", lambda name: known[name[1]], word).replace(
            "/etc/quintet/server.yaml", str(config)
        )
        for word in container["args"]
    ]


def config_of(path: Path, folder: Path) -> Path:
    """Write the configuration file of a manifest."""
    [text] = [thing["data"]["server.yaml"] for thing in things(path) if thing["kind"] == "ConfigMap"]
    (folder / "server.yaml").write_text(text)
    return folder / "server.yaml"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_pod_flags_are_flags_of_their_commands(path: Path, tmp_path: Path) -> None:
    config = config_of(path, tmp_path)
    read = {
        "quintet": options_from,
        "prefill": options_from,
        "leader": options_from,
        "router": route_options_from,
    }
    found = set()
    for pod in started(path):
        [container] = pod["containers"]
        if container["name"] == "worker":
            continue
        options = read[container["name"]](words_of(pod, config, {}))
        found.add(container["name"])
        [port] = [port["containerPort"] for port in container["ports"] if port["name"] == "http"]
        assert (options.host, options.port) == ("0.0.0.0", port)
        assert pod["terminationGracePeriodSeconds"] > options.drain_timeout
    assert found & {"quintet", "leader"}


def test_pods_of_a_group_are_hosts_of_one_model(tmp_path: Path) -> None:
    path = DEPLOY / "kubernetes" / "quintet-hosts.yaml"
    [group] = [
        thing["spec"]["leaderWorkerTemplate"] for thing in things(path) if thing["kind"] == "LeaderWorkerSet"
    ]
    assert group["restartPolicy"] == "None", "a restart of any pod would drop the leader's connections"
    controller_env = {"LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "group-0.group"}
    (tmp_path / "key").write_bytes(bytes(32))
    (tmp_path / "key").chmod(0o440)
    found = []
    for pod in started(path):
        [container] = pod["containers"]
        options = options_from(words_of(pod, config_of(path, tmp_path), controller_env))
        [secret] = [each for each in pod["volumes"] if "secret" in each]
        [mount] = [each for each in container["volumeMounts"] if each["name"] == secret["name"]]
        assert options.group_key == f"{mount['mountPath']}/{secret['secret']['items'][0]['path']}"
        pod_key = dataclasses.replace(options, group_key=str(tmp_path / "key"))
        found.append((options, hosts_config(pod_key)))
    (leader, first), (worker, other) = found
    assert leader.model == worker.model
    assert first is not None and other is not None
    assert first.count == other.count == group["size"]
    assert (first.address, other.address) == ("10.0.0.5:29501", "group-0.group:29501")
    assert (leader.headless, worker.headless, worker.node_rank) == (False, True, 1)
    ports = {each["name"]: each["containerPort"] for each in started(path)[0]["containers"][0]["ports"]}
    assert ports == {"http": leader.port, "hosts": leader.master_port}


def test_kserve_runtime_flags_are_flags_of_serve() -> None:
    [runtime] = things(DEPLOY / "kserve" / "runtime.yaml")
    [container] = runtime["spec"]["containers"]
    options = options_from(container["args"])
    assert options.served_model_name == ["{{.Name}}"]
    assert (options.host, options.port) == ("0.0.0.0", container["ports"][0]["containerPort"])
    [service] = things(DEPLOY / "kserve" / "service.yaml")
    predictor = service["spec"]["predictor"]
    of_service = options_from([*container["args"], *predictor["model"]["args"]])
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert of_service.drain_timeout > options.drain_timeout
    assert predictor["terminationGracePeriodSeconds"] >= of_service.drain_timeout + pause + 10
    assert options.drain_timeout + pause + 10 <= GRACE_S


@pytest.mark.parametrize("path", [*MANIFESTS, DEPLOY / "kserve" / "runtime.yaml"], ids=lambda path: path.stem)
def test_probe_paths_need_no_key(path: Path) -> None:
    probed = re.findall(r"path: (/(?!metrics|var|etc).*)\n *port", path.read_text())
    assert len(probed) >= 3
    routes = {panel_row.path for panel_row in ROUTES}
    assert [where for where in probed if where not in routes or not is_open(where)] == []


def test_dashboard_panels_have_positions_titles_and_descriptions() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    occupied: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & occupied and max(x for x, _ in cells) < 24, panel["title"]
        occupied |= cells
        assert panel["title"]
        assert panel["type"] == "row" or panel["description"]


def test_systemd_unit_flags_are_flags_of_serve(tmp_path: Path) -> None:
    [line] = [
        line
        for line in (DEPLOY / "systemd" / "quintet.service").read_text().splitlines()
        if line.startswith("ExecStart=")
    ]
    (tmp_path / "server.yaml").write_text("model: some/model\nport: 8080\n")
    words = line.replace("${CREDENTIALS_DIRECTORY}", str(tmp_path)).split()
    assert words[0].endswith("/bin/quintet")
    options = options_from(words[1:])
    assert (options.model, options.port) == ("some/model", 8080)


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.yaml")), ids=lambda path: path.name)
def test_versions_are_those_of_the_package(path: Path) -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    named = re.findall(
        r"\bquintet:(\d[\w.]*)|\b(?:appVersion|app\.kubernetes\.io/version): \"([^\"]+)\"", path.read_text()
    )
    assert {version for pair in named for version in pair if version} <= {package}
