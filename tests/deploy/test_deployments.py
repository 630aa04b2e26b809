"""What is shipped for other systems to run Quintet with: its flags exist, its parts fit each other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from quintet.deploy.cli import CommandParser
from quintet.deploy.commands import route
from quintet.deploy.commands.serve import add_option_arguments, options_of
from quintet.deploy.resolve.flags import Options
from quintet.frontend.app import ROUTES
from quintet.frontend.guard import is_open
from tests.deploy.queries import DASHBOARD

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("quintet*.yaml"))

GRACE_S = 30
"""What Kubernetes gives a pod to leave where nothing else is said."""


def things(path: Path) -> list[dict[str, Any]]:
    return [thing for thing in yaml.safe_load_all(path.read_text()) if thing]


def options_from(words: list[str]) -> Options:
    """As `quintet serve` reads them; what it would refuse fails."""
    assert words[0] == "serve"
    parser = CommandParser()
    add_option_arguments(parser)
    return options_of(parser.parse_args(words[1:]))[0]


def route_options_from(words: list[str]) -> Any:
    """As `quintet route` reads them."""
    parser = CommandParser()
    route.add_parser(parser.add_subparsers(parser_class=CommandParser))
    return parser.parse_args(words)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_the_pods_flags_are_those_of_their_commands(path: Path, tmp_path: Path) -> None:
    [text] = [thing["data"]["server.yaml"] for thing in things(path) if thing["kind"] == "ConfigMap"]
    config = tmp_path / "server.yaml"
    config.write_text(text)
    read = {"quintet": options_from, "prefill": options_from, "router": route_options_from}
    for deployment in (thing for thing in things(path) if thing["kind"] == "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        [container] = pod["containers"]
        words = [word.replace("/etc/quintet/server.yaml", str(config)) for word in container["args"]]
        options = read.pop(container["name"])(words)
        [port] = [port["containerPort"] for port in container["ports"] if port["name"] == "http"]
        assert (options.host, options.port) == ("0.0.0.0", port)
        assert pod["terminationGracePeriodSeconds"] > options.drain_timeout
    assert "quintet" not in read


def test_the_pods_of_a_group_are_hosts_of_one_model() -> None:
    [group] = [
        thing for thing in things(DEPLOY / "kubernetes" / "hosts.yaml") if thing["kind"] == "LeaderWorkerSet"
    ]
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "None", "or the leader's clients lose their connections with any pod"
    told = {
        "LWS_GROUP_SIZE": str(template["size"]),
        "LWS_WORKER_INDEX": "1",
        "LWS_LEADER_ADDRESS": "group-0.group",
    }
    found: list[Options] = []
    for role in ("leaderTemplate", "workerTemplate"):
        [container] = template[role]["spec"]["containers"]
        words = " ".join(container["args"]).replace("$(POD_IP)", "10.0.0.5")
        for name, value in told.items():
            words = words.replace(f"$({name})", value)
        found.append(options_from(words.split()))
        [secret] = [each for each in template[role]["spec"]["volumes"] if "secret" in each]
        [mount] = [each for each in container["volumeMounts"] if each["name"] == secret["name"]]
        assert found[-1].group_key == f"{mount['mountPath']}/group"
    leader, worker = found
    assert (leader.model, leader.nnodes, leader.pipeline_parallel_size, leader.master_port) == (
        worker.model, worker.nnodes, worker.pipeline_parallel_size, worker.master_port,
    )  # fmt: skip
    assert leader.pipeline_parallel_size % leader.nnodes == 0
    assert (leader.headless, worker.headless, worker.node_rank) == (False, True, 1)
    pod = template["leaderTemplate"]["spec"]
    ports = {each["name"]: each["containerPort"] for each in pod["containers"][0]["ports"]}
    assert ports == {"http": leader.port, "hosts": leader.master_port}
    assert pod["terminationGracePeriodSeconds"] > leader.drain_timeout


def test_the_runtime_of_kserve_has_flags_of_serve() -> None:
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
def test_probes_ask_what_needs_no_key(path: Path) -> None:
    asked = re.findall(r"path: (/(?!metrics|var|etc).*)\n *port", path.read_text())
    assert len(asked) >= 3
    routes = {row.path for row in ROUTES}
    assert [where for where in asked if where not in routes or not is_open(where)] == []


def test_the_dashboards_panels_have_places_and_questions() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        assert panel["title"].endswith("?"), panel["title"]
        assert panel["type"] == "row" or panel["description"]


def test_the_units_words_are_those_of_serve(tmp_path: Path) -> None:
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


def test_the_image_is_built_from_every_folder_of_the_package() -> None:
    """Each is a symlink under src, which would lead nowhere."""
    let_in = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    folders = [path.name for path in (DEPLOY.parent / "src" / "quintet").iterdir() if path.is_symlink()]
    assert {f"!{name}" for name in folders} <= set(let_in)
