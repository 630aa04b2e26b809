"""The KServe manifests, key by key against the model classes of its package. Needs no server."""

from __future__ import annotations

import re
from pathlib import Path

import kserve
import kubernetes.client
import yaml

FOLDER = Path(__file__).parents[3] / "deploy" / "integrations" / "kserve"
CLASSES = {
    "ClusterServingRuntime": kserve.V1alpha1ClusterServingRuntime,
    "InferenceService": kserve.V1beta1InferenceService,
}
PLAIN = {"str": str, "int": int, "bool": bool, "ResourceQuantity": (str, int), "object": object}


def fits(value: object, kind: str, where: str) -> None:
    """Fail if a value has an unknown key, a missing key or another type than its kind."""
    if many := re.fullmatch(r"[Ll]ist\[(.+)\]", kind):
        assert isinstance(value, list), where
        for inner in value:
            fits(inner, many[1], where)
    elif named := re.fullmatch(r"[Dd]ict[(\[]str, (.+)[)\]]", kind):
        assert isinstance(value, dict), where
        for key, inner in value.items():
            fits(inner, named[1], f"{where}.{key}")
    elif kind in PLAIN:
        assert isinstance(value, PLAIN[kind]), f"{where} is {value!r}, no {kind}"
    else:
        model = getattr(kserve, kind, None) or getattr(kubernetes.client, kind)
        attributes = {key: name for name, key in model.attribute_map.items()}
        assert isinstance(value, dict), where
        for key, inner in value.items():
            assert key in attributes, f"{where}.{key} is not in the definition"
            fits(inner, model.openapi_types[attributes[key]], f"{where}.{key}")
        # Raises if a required field is missing.
        model(**{attributes[key]: inner for key, inner in value.items()})


kinds = []
for path in sorted(FOLDER.glob("*.yaml")):
    for thing in yaml.safe_load_all(path.read_text()):
        kinds.append(thing["kind"])
        fits(thing, CLASSES[thing["kind"]].__name__, thing["kind"])
assert kinds == ["ClusterServingRuntime", "InferenceService"], kinds
print("ok:", *kinds)
