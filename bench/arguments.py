"""Command lines of benchmarks."""

from __future__ import annotations

import argparse


def command_parser(docstring: str | None) -> argparse.ArgumentParser:
    """Return a parser; its help begins with the module's docstring, unchanged."""
    return argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )
