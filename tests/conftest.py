"""How the suite runs; tests/README.md says what belongs where and what it costs."""

pytest_plugins = (
    "tests.suite.draw",
    "tests.suite.order",
    "tests.suite.costs",
    "tests.suite.collecting",
    "tests.suite.logs",
    "pytester",
)
