"""Plugins of the test suite; tests/README.md describes folders and costs."""

pytest_plugins = (
    "tests.suite.checkout",
    "tests.suite.draw",
    "tests.suite.order",
    "tests.suite.costs",
    "tests.suite.collecting",
    "tests.suite.logs",
    "pytester",
)
