"""``python deploy/integrations/helm/render.py``: renders deploy/integrations/kubernetes from the chart, with Helm's code.

Requires the package ``helm-python-sdk`` (``make clients`` installs it in ``.venv/clients/kubernetes``). The manifests are for use
without Helm, in the namespace ``default``. ``--check`` writes nothing, and fails if a file differs from the chart.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import helm_python
import yaml

HERE = Path(__file__).parent
CHART = HERE / "quintet"
MANIFESTS = HERE.parent / "kubernetes"
VARIANTS = {
    "quintet": None,
    "quintet-disaggregated": "values-disaggregated.yaml",
    "quintet-gpu": "values-gpu.yaml",
    "quintet-hosts": "values-hosts.yaml",
    "quintet-replicas": "values-replicas.yaml",
}
"""Manifest -> values file."""
_OF_HELM = re.compile(r" *(helm\.sh/chart|app\.kubernetes\.io/managed-by): .*\n")


def render(values: dict[str, object], release: str = "quintet", namespace: str = "default") -> str:
    """Render the objects of a release as YAML. Raises Helm's errors for invalid values."""
    with helm_python.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name=release, namespace=namespace)
    parts = [text.strip() for name, text in sorted(files.items()) if name.endswith(".yaml") and text.strip()]
    return "\n---\n".join(parts) + "\n"


def manifest(name: str) -> str:
    """Return one manifest of deploy/integrations/kubernetes, without Helm's own labels."""
    file = VARIANTS[name]
    values = yaml.safe_load((HERE / file).read_text()) if file else {}
    made_of = "deploy/integrations/helm/quintet" + (f" with deploy/integrations/helm/{file}" if file else "")
    head = f"# Generated from {made_of} by deploy/integrations/helm/render.py; edit those.\n# kubectl apply -f {name}.yaml\n---\n"
    return head + _OF_HELM.sub("", render(values))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs")
    arguments = parser.parse_args()
    old = []
    for name in VARIANTS:
        path, text = MANIFESTS / f"{name}.yaml", manifest(name)
        if not path.exists() or path.read_text() != text:
            old.append(str(path))
            if not arguments.check:
                path.write_text(text)
    if old:
        print(
            "differ from the chart:" if arguments.check else "written:",
            *old,
            sep="\n  ",
        )
    return 1 if old and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
