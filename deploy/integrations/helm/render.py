"""``python deploy/integrations/helm/render.py``: write deploy/integrations/kubernetes anew from the chart, by Helm's own code.

Needs the package ``helm-python-sdk`` (``make clients`` has it in ``.venv/clients/kubernetes``). The chart is the one source;
what is written is for those who apply manifests without Helm, into the namespace ``default``. ``--check`` writes nothing and
fails where a file is not what the chart says.
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
    "quintet-apart": "values-apart.yaml",
    "quintet-gpu": "values-gpu.yaml",
    "quintet-hosts": "values-hosts.yaml",
    "quintet-replicas": "values-replicas.yaml",
}
"""By manifest: the values beside the chart that it is made of."""
_OF_HELM = re.compile(r" *(helm\.sh/chart|app\.kubernetes\.io/managed-by): .*\n")


def render(values: dict[str, object], release: str = "quintet", namespace: str = "default") -> str:
    """Return the objects of a release as one YAML text. Raises what Helm says of values that cannot work."""
    with helm_python.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name=release, namespace=namespace)
    parts = [text.strip() for name, text in sorted(files.items()) if name.endswith(".yaml") and text.strip()]
    return "\n---\n".join(parts) + "\n"


def manifest(name: str) -> str:
    """Return the text of one file of deploy/integrations/kubernetes: without what only Helm may say of its objects."""
    file = VARIANTS[name]
    values = yaml.safe_load((HERE / file).read_text()) if file else {}
    made_of = "deploy/integrations/helm/quintet" + (f" with deploy/integrations/helm/{file}" if file else "")
    head = f"# Made of {made_of} by deploy/integrations/helm/render.py: change those.\n# kubectl apply -f {name}.yaml\n---\n"
    return head + _OF_HELM.sub("", render(values))


def main() -> int:
    """Write every file, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file differs")
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
