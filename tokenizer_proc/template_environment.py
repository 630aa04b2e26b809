"""Sandboxed Jinja environment of chat templates: tags, globals and value types. A template is untrusted code."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from quintet.tokenizer_proc import template_values


class GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks assistant text for training; rendering ignores the tag."""

    tags = {"generation"}  # noqa: RUF012 - required by Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        """Render the body as a separate block with local variables, as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


class PlainNamespace(Namespace):
    """``namespace()`` without access to Python's internals."""

    def __setitem__(self, name: str, value: Any) -> None:
        """Set an attribute, which must not begin with an underscore."""
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot have an attribute {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Build a dict. A function, so that templates cannot access the type."""
    return dict(*args, **kwargs)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Build the sandboxed Jinja environment of chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    template_values.install(environment)
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _dict,
        "namespace": PlainNamespace,
    }
    return environment
