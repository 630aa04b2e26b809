"""The function that records a trace span: of `quintet.process.trace`, or none. Imports no sockets."""

from __future__ import annotations

from typing import Protocol


class TraceSpan(Protocol):
    """Record one trace span. Default begin: the end of the previous span; default end: now; default number: that of the
    previous span.

    Times are `time.monotonic_ns`.
    """

    def __call__(
        self, name: str, number: int | None = None, begin_ns: int | None = None, end_ns: int | None = None, /
    ) -> None: ...


def no_span(
    name: str, number: int | None = None, begin_ns: int | None = None, end_ns: int | None = None, /
) -> None:
    """Record nothing: the `TraceSpan` of a process without tracing."""
