"""The chart, rendered by Helm, against Kubernetes schemas, the plain manifests and invalid values.

Needs no server. ``--newest`` checks the newest release only, as in CI.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import yaml
from cloudcoil.models.keda import v1alpha1 as keda
from cloudcoil.models.prometheus_operator import v1 as prometheus

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "deploy" / "integrations" / "helm"))

import render  # noqa: E402 - a script in the folder of the chart, not a module of a package

RELEASES = ("1.27", "1.30", "1.34", "1.37")
"""Kubernetes releases: the oldest of Chart.yaml, the newest, and two between."""

ALL = {
    "model": "/cache/model",
    "flags": {"served-model-name": ["a", "b"], "max-model-len": 8192},
    "apiKey": {"secret": "quintet"},
    "hubToken": {"secret": "hub", "key": "token"},
    "imagePullSecrets": [{"name": "registry"}],
    "gpus": 2,
    "cache": {"create": True, "accessMode": "ReadWriteMany", "storageClass": "fast", "size": "200Gi"},
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True},
    "networkPolicy": {"enabled": True, "allowHub": False},
    "router": {
        "enabled": True, "replicas": 2, "nodeSelector": {"disk": "none"}, "affinity": {"nodeAffinity": {}},
        "tolerations": [{"operator": "Exists"}], "priorityClassName": "high",
    },
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "models"},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "runtimeClassName": "nvidia",
    "priorityClassName": "high",
}  # fmt: skip
PREFILL = {
    "replicas": 2,
    "secret": "kv",
    "key": "secret",
    "network": "10.0.0.0/8",
    "resources": {"limits": {"cpu": "4"}},
}
KEDA = {"kind": "keda", "prometheusAddress": "http://prometheus:9090"}
HOSTS = {"hosts": {"size": 3, "secret": "group"}, "flags": {"pipeline-parallel-size": 6}}
VARIANTS: dict[str, dict[str, object]] = {
    "defaults": {},
    "everything, HPA": {**ALL, "autoscaling": {"kind": "hpa"}},
    "everything, KEDA": {**ALL, "autoscaling": KEDA},
    "no delays, no disruption budget": {
        "drainSeconds": 0, "unlistSeconds": 0, "startSeconds": 5, "podDisruptionBudget": {"enabled": False},
        "strategy": {"type": "Recreate", "rollingUpdate": None},
    },
    "external endpoint picker": {"inferencePool": {"enabled": True, "pickerService": "picker"}},
    "endpoint picker of the router": {
        **ALL, "inferencePool": {"enabled": True, "pickerPort": 9009, "tlsSecret": "picker"},
    },
    "disaggregated prefill, HPA": {**ALL, "prefill": PREFILL, "autoscaling": {"kind": "hpa"}},
    "claim of one pod": {
        "cache": {"create": True}, "strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
    },
    "claim of one pod, created": {
        "cache": {"create": True}, "strategy": {"type": "Recreate", "rollingUpdate": None},
    },
    "token pace on GPUs": {"gpus": 1, "autoscaling": {"kind": "hpa", "secondsBetweenTokens": 0.05}},
    "token pace of short steps": {
        "flags": {"step_target_ms": 100}, "autoscaling": {"kind": "hpa", "secondsBetweenTokens": 0.2},
    },
    "existing claim": {"cache": {"existingClaim": "models"}, "replicas": 4},
    "hosts": {**HOSTS, "strategy": {"rollingUpdate": None}},
    "hosts, everything, HPA": {**ALL, "gpus": 0, **HOSTS, "autoscaling": {"kind": "hpa"}},
    "hosts of ranks, closed, KEDA": {
        "hosts": {"size": 2, "secret": "group"}, "flags": {"tensor_parallel_size": 2}, "autoscaling": KEDA,
        "networkPolicy": {"enabled": True, "allowHub": False},
    },
}  # fmt: skip

REJECTED = {
    "additional properties 'replics' not allowed": {"replics": 2},
    "up to 3 pods cannot share a claim with access mode ReadWriteOnce": {"cache": {"create": True}, "replicas": 3},
    "set one of the two": {"cache": {"create": True, "existingClaim": "models"}},
    "up to 3 pods cannot share a claim": {
        "cache": {"create": True}, "prefill": PREFILL, "router": {"enabled": True},
    },
    "requires the router": {"prefill": PREFILL},
    "set prefill.secret": {"prefill": {"replicas": 1}, "router": {"enabled": True}},
    "does not support disaggregated prefill": {
        "prefill": PREFILL, "router": {"enabled": True}, "inferencePool": {"enabled": True},
    },
    "flags.role is set by the chart": {"flags": {"role": "decode"}},
    "flags.drain-timeout is set by the chart": {"flags": {"drain_timeout": 3}},
    "requires autoscaling.prometheusAddress": {"autoscaling": {"kind": "keda"}},
    "is more than autoscaling.maxReplicas (2)": {"autoscaling": {"minReplicas": 3, "maxReplicas": 2}},
    "requires an endpoint picker": {"inferencePool": {"enabled": True}},
    "is for the router's endpoint picker": {
        "inferencePool": {"enabled": True, "pickerService": "picker", "tlsSecret": "picker"},
    },
    "an external endpoint picker sends no key": {
        "inferencePool": {"enabled": True, "pickerService": "picker"}, "apiKey": {"secret": "quintet"},
    },
    "set maxSurge to 0 and maxUnavailable to 1": {"cache": {"create": True}},
    "(strategy.rollingUpdate.maxSurge 25%)": {
        "cache": {"create": True, "accessMode": "ReadWriteOncePod"}, "strategy": {"rollingUpdate": None},
    },
    "(0.39) must be above 0.39: ": {"autoscaling": {"kind": "hpa", "secondsBetweenTokens": 0.39}},
    "takes 500 ms": {"flags": {"step-target-ms": 500}, "autoscaling": KEDA},
    "to a multiple of 3": {**HOSTS, "flags": {"pipeline-parallel-size": 2}},
    "or, without stages, flags.tensor-parallel-size": {**HOSTS, "flags": {}},
    "set hosts.secret": {**HOSTS, "hosts": {"size": 3}},
    "the chart derives it from startSeconds": {**HOSTS, "flags": {**HOSTS["flags"], "boot-timeout": 60}},
    "gpus (1) with hosts.size 3": {**HOSTS, "gpus": 1},
    "prefill.replicas (2) with hosts.size 3": {**HOSTS, "prefill": PREFILL, "router": {"enabled": True}},
    "groups support RollingUpdate only": {**HOSTS, "strategy": {"type": "Recreate", "rollingUpdate": None}},
    "up to 3 pods cannot share": {**HOSTS, "cache": {"create": True}, "strategy": {"rollingUpdate": {"maxSurge": 0}}},
    "flags.nnodes is set by the chart": {"flags": {"nnodes": 2}},
}  # fmt: skip

MODELS = {"PodMonitor": prometheus.PodMonitor, "ScaledObject": keda.ScaledObject}
"""Classes generated from the definitions of the Prometheus operator (0.80) and KEDA (2.16)."""

Shape = dict[str, object]
SHAPES: dict[str, Shape] = {
    "InferencePool": {
        "selector": {"matchLabels": dict}, "targetPorts": [{"number": int}],
        "endpointPickerRef": {"name": str, "port": {"number": int}, "failureMode": str},
    },
    "LeaderWorkerSet": {
        "replicas": int, "startupPolicy": str,
        "rolloutStrategy": {"type": str, "rollingUpdateConfiguration": dict},
        "leaderWorkerTemplate": {
            "size": int, "restartPolicy": str, "leaderTemplate": {"metadata": dict, "spec": dict},
            "workerTemplate": {"metadata": dict, "spec": dict},
        },
    },
}  # fmt: skip
"""Allowed fields of other custom resources, which no package defines. Compared by hand, docs/deploy.md."""


def read(thing: dict[str, Any]) -> None:
    """Fail if a custom resource has an unknown or invalid field."""
    model = MODELS[thing["kind"]].model_validate(thing)
    assert model.model_dump(by_alias=True, exclude_unset=True, mode="json") == thing, thing["kind"]


def fits(value: object, shape: object, where: str) -> None:
    """Fail if a value has a key that its shape lacks, or another type."""
    if isinstance(shape, dict):
        assert isinstance(value, dict), where
        for key, inner in value.items():
            assert key in shape, f"{where}.{key} is not in the definition"
            fits(inner, shape[key], f"{where}.{key}")
    elif isinstance(shape, list):
        assert isinstance(value, list), where
        for inner in value:
            fits(inner, shape[0], where)
    else:
        assert isinstance(shape, type)
        assert isinstance(value, shape), f"{where} is {value!r}"


def check(text: str, releases: Sequence[str]) -> set[str]:
    """Validate every object of a rendered release of the chart; return their kinds."""
    kinds = set()
    for thing in yaml.safe_load_all(text):
        kind = thing["kind"]
        kinds.add(kind)
        assert thing["metadata"]["labels"]["app.kubernetes.io/instance"], kind
        started: list[dict[str, Any]] = []
        if kind in MODELS:
            read(thing)
        elif kind in SHAPES:
            fits(thing["spec"], SHAPES[kind], kind)
            started = [
                {"apiVersion": "v1", "kind": "Pod", **template} for template in as_pods(thing).values()
            ]
        else:
            started = [thing]
        for each in started:
            for release in releases:
                kubernetes_validate.validate(each, release, strict=True)
    return kinds


def as_pods(thing: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the pod templates of an object by container name."""
    if thing["kind"] == "Deployment":
        templates = [thing["spec"]["template"]]
    elif thing["kind"] == "LeaderWorkerSet":
        group = thing["spec"]["leaderWorkerTemplate"]
        templates = [group["leaderTemplate"], group["workerTemplate"]]
    else:
        templates = []
    return {template["spec"]["containers"][0]["name"]: template for template in templates}


def check_groups(text: str) -> None:
    """Services and policies select a group's leader. Workers may connect to the leader only and accept no connection."""
    things = list(yaml.safe_load_all(text))
    assert not [
        t for t in things if t["kind"] == "Deployment" and not t["metadata"]["name"].endswith("-router")
    ]
    [group] = [t for t in things if t["kind"] == "LeaderWorkerSet"]
    assert not [
        t for t in things if t["kind"] == "Service" and t["metadata"]["name"] == group["metadata"]["name"]
    ], "the controller makes a headless Service of that name"
    leader, worker = as_pods(group).values()
    assert all(
        words <= set(pod["spec"]["containers"][0]["args"])
        for pod, words in (
            (leader, {"--node-rank=0", "--master-addr=$(POD_IP)"}),
            (
                worker,
                {"--headless", "--node-rank=$(LWS_WORKER_INDEX)", "--master-addr=$(LWS_LEADER_ADDRESS)"},
            ),
        )
    )
    for thing in things:
        if thing["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"):
            target = thing["spec"]["scaleTargetRef"]
            assert (target["apiVersion"], target["kind"]) == (group["apiVersion"], group["kind"])
            assert target["name"] == group["metadata"]["name"]
    policies = {t["metadata"]["name"]: t["spec"] for t in things if t["kind"] == "NetworkPolicy"}
    if policies:
        [hosts] = [
            each
            for each in policies["quintet"]["ingress"]
            if each["ports"] == [{"port": "hosts", "protocol": "TCP"}]
        ]
        assert [
            each["podSelector"]["matchLabels"].items() <= worker["metadata"]["labels"].items()
            for each in hosts["from"]
        ] == [True]
        closed = policies["quintet-worker"]
        assert closed["podSelector"]["matchLabels"].items() <= worker["metadata"]["labels"].items()
        assert closed["ingress"] == []
        to = [each for each in closed["egress"] if "to" in each]
        assert [
            (
                each["to"][0]["podSelector"]["matchLabels"].items() <= leader["metadata"]["labels"].items(),
                each["ports"][0]["port"],
            )
            for each in to
        ] == [(True, 29501)]


def check_services(text: str) -> None:
    """Each Service selects pods of exactly one kind, never both routers and servers, and no worker.

    With disaggregated prefill, one name resolves to servers of both kinds for the router.
    """
    things = list(yaml.safe_load_all(text))
    pods = [pod["metadata"]["labels"] for thing in things for pod in as_pods(thing).values()]
    for thing in things:
        if thing["kind"] == "Service":
            selector = thing["spec"]["selector"].items()
            selected = [labels["app.kubernetes.io/name"] for labels in pods if selector <= labels.items()]
            name = thing["metadata"]["name"]
            is_disaggregated = (
                name.endswith("-pods") and "app.kubernetes.io/component" in thing["spec"]["selector"]
            )
            assert selected == ["quintet", "quintet-prefill"] if is_disaggregated else len(selected) == 1, (
                name
            )
            assert "quintet-worker" not in selected, name


def check_grace_periods(text: str) -> None:
    """The grace period exceeds preStop pause plus drain timeout."""
    pods = {name: pod["spec"] for t in yaml.safe_load_all(text) for name, pod in as_pods(t).items()}
    pods.pop("worker", None)
    assert pods
    for pod in pods.values():
        [container] = pod["containers"]
        [drain] = [int(a.partition("=")[2]) for a in container["args"] if a.startswith("--drain-timeout=")]
        pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] >= pause + drain + 10


def check_placement(text: str) -> None:
    """Routers have separate placement values, and the startup time of the servers."""
    servers, router = (t["spec"] for t in yaml.safe_load_all(text) if t["kind"] == "Deployment")
    assert router["progressDeadlineSeconds"] == servers["progressDeadlineSeconds"]
    pod = router["template"]["spec"]
    assert pod["nodeSelector"] == {"disk": "none"} and pod["tolerations"] == [{"operator": "Exists"}]
    assert pod["priorityClassName"] == "high" and pod["affinity"] == {"nodeAffinity": {}}
    protected = [
        t["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"]
        for t in yaml.safe_load_all(text)
        if t["kind"] == "PodDisruptionBudget"
    ]
    assert protected == ["quintet", "quintet-router"]


def check_disaggregation(text: str) -> None:
    """Prefill and decode servers share only a key. Only decode servers may connect to the KV port of prefill servers."""
    things = list(yaml.safe_load_all(text))
    pods = {t["metadata"]["name"]: t["spec"]["template"] for t in things if t["kind"] == "Deployment"}
    assert list(pods) == ["quintet", "quintet-prefill", "quintet-router"]
    answers, prompts = (pods[name]["spec"]["containers"][0] for name in ("quintet", "quintet-prefill"))
    assert {"--role=decode", "--kv-peers=10.0.0.0/8", "--kv-peer-key=/etc/quintet-kv/key"} <= set(
        answers["args"]
    )
    assert {"--role=prefill", "--kv-peer-listen=$(POD_IP):5600", "--kv-peer-key=/etc/quintet-kv/key"} <= set(
        prompts["args"]
    )
    assert prompts["resources"] == {"limits": {"cpu": "4", "nvidia.com/gpu": 2}} != answers["resources"]
    policies = {t["metadata"]["name"]: t["spec"] for t in things if t["kind"] == "NetworkPolicy"}
    [_, kv] = policies["quintet-prefill"]["ingress"]
    assert [
        each["podSelector"]["matchLabels"].items() <= pods["quintet"]["metadata"]["labels"].items()
        for each in kv["from"]
    ] == [True]
    assert (
        kv["ports"]
        == [{"port": 5600, "endPort": 5663, "protocol": "TCP"}]
        == policies["quintet"]["egress"][0]["ports"]
    )
    [scaled] = [t["spec"]["scaleTargetRef"]["name"] for t in things if t["kind"] == "HorizontalPodAutoscaler"]
    assert scaled == "quintet"


def check_picker(text: str) -> None:
    """The pool refers to a Service of the chart and to the picker port of the routers."""
    things = list(yaml.safe_load_all(text))
    [pool] = [t["spec"]["endpointPickerRef"] for t in things if t["kind"] == "InferencePool"]
    [service] = [t for t in things if t["kind"] == "Service" and t["metadata"]["name"] == pool["name"]]
    assert [port["port"] for port in service["spec"]["ports"]] == [pool["port"]["number"]] == [9009]
    [router] = [
        t["spec"]["template"]["spec"]["containers"][0]
        for t in things
        if t["kind"] == "Deployment"
        and service["spec"]["selector"].items() <= t["spec"]["template"]["metadata"]["labels"].items()
    ]
    assert {"--endpoint-picker=9009", "--endpoint-picker-tls=/tls"} <= set(router["args"])
    assert {"name": "grpc", "containerPort": 9009} in router["ports"]


OTHERS = (
    "quintet-router-5d8f9b-x2x7q", "quintet-large-5d8f9b-x2x7q", "my-quintet-5d8f9b-x2x7q",
    "quintet-hosts-0-1", "quintet-large-hosts-0", "my-quintet-hosts-0",
)  # fmt: skip


def check_keda_queries(text: str, own: str, others: Sequence[str]) -> None:
    """KEDA sums the metrics of this release's servers only."""
    [scaled] = [t for t in yaml.safe_load_all(text) if t["kind"] == "ScaledObject"]
    for trigger in scaled["spec"]["triggers"]:
        pods = re.compile(re.search('pod=~"([^"]+)"', trigger["metadata"]["query"])[1])
        assert pods.fullmatch(own)
        for other in others:
            assert not pods.fullmatch(other), other


def main() -> None:
    releases = RELEASES[-1:] if sys.argv[1:] == ["--newest"] else RELEASES
    sys.argv[1:] = ["--check"]
    assert render.main() == 0, (
        "run deploy/integrations/helm/render.py: the manifests of deploy/integrations/kubernetes are not the chart's"
    )
    kinds = set()
    for name, values in VARIANTS.items():
        text = render.render(values)
        kinds |= check(text, releases)
        check_grace_periods(text)
        check_services(text)
        print(f"ok: {name}")
    check_placement(render.render(VARIANTS["everything, HPA"]))
    check_disaggregation(render.render(VARIANTS["disaggregated prefill, HPA"]))
    check_picker(render.render(VARIANTS["endpoint picker of the router"]))
    check_keda_queries(
        render.render({"autoscaling": KEDA}), "quintet-5d8f9b-x2x7q", [*OTHERS, "quintet-hosts-0"]
    )
    for name in ("hosts", "hosts, everything, HPA", "hosts of ranks, closed, KEDA"):
        check_groups(render.render(VARIANTS[name]))
    check_keda_queries(
        render.render({**HOSTS, "autoscaling": KEDA}), "quintet-hosts-0", [*OTHERS, "quintet-5d8f9b-x2x7q"]
    )
    expected = {
        "ConfigMap", "Deployment", "Service", "PersistentVolumeClaim", "PodDisruptionBudget", "NetworkPolicy",
        "HorizontalPodAutoscaler", *MODELS, *SHAPES,
    }  # fmt: skip
    assert kinds == expected, kinds ^ expected
    for name in render.VARIANTS:
        check(render.manifest(name), releases)
    long_name = "a-release-with-a-name-of-nearly-the-maximum-length-x"
    check(render.render({"autoscaling": KEDA, "dashboard": {"enabled": True}}, release=long_name), releases)
    for words, values in REJECTED.items():
        try:
            render.render(values)
        except helm_python.HelmError as error:
            assert words in str(error), f"{json.dumps(values)} was rejected with: {error}"
        else:
            raise AssertionError(f"{json.dumps(values)} was not rejected")


main()
