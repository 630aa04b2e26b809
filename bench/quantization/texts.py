"""Texts from the standard library's docstrings: one for evaluation, another for calibration of GPTQ and AWQ.

They depend on the Python version.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import concurrent.futures
import csv
import datetime
import decimal
import functools
import http.client
import itertools
import json
import logging
import pathlib
import pydoc
import socket
import statistics
import subprocess
import threading
import unittest
from collections.abc import Sequence
from types import ModuleType

HELD_OUT = (argparse, collections, functools, itertools, json, logging, asyncio, socket)
CALIBRATION = (
    concurrent.futures,
    csv,
    datetime,
    decimal,
    http.client,
    pathlib,
    statistics,
    subprocess,
    threading,
    unittest,
)
MEMBERS = 12
"""Number of members of each module in the held-out text, the first by name."""


def held_text() -> str:
    """Return the text for evaluation."""
    return _documentation(HELD_OUT, MEMBERS)


def calibration_text() -> str:
    """Return the text for calibration, from other modules."""
    return _documentation(CALIBRATION, None)


def _documentation(modules: Sequence[ModuleType], members: int | None) -> str:
    parts = []
    for module in modules:
        names = [name for name in sorted(dir(module)) if not name.startswith("_")]
        parts += [pydoc.getdoc(module), *(pydoc.getdoc(getattr(module, name)) for name in names[:members])]
    return "\n\n".join(filter(None, dict.fromkeys(parts)))
