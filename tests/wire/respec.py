"""Modified copies of requests."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from quintet.wire.messages import Admit, Submit
from quintet.wire.request import RequestSpec

Request = TypeVar("Request", Submit, Admit)


def changed(request: Request, **changes: Any) -> Request:
    """Return a copy that shares no struct with the request, with changed fields of the request or of its spec."""
    own = {name: changes.pop(name) for name in tuple(changes) if name not in RequestSpec.__struct_fields__}
    spec = msgspec.structs.replace(request.spec, **changes)
    return msgspec.structs.replace(request, spec=spec, **own)
