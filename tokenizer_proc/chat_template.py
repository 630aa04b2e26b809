"""Chat templates: renders messages to text like transformers' ``apply_chat_template``.

Owns the compiled templates. `chat_messages` normalizes the messages. A template is untrusted code: its exceptions
become errors of the request.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jinja2
import msgspec

from quintet.tokenizer_proc import template_fallbacks as fallbacks
from quintet.tokenizer_proc.chat_messages import name_of, normal_messages
from quintet.tokenizer_proc.continued_message import cut_at_tag, tag_final
from quintet.tokenizer_proc.template_environment import make_environment
from quintet.tokenizer_proc.template_syntax import TemplateTraits, traits_of
from quintet.tokenizer_proc.template_values import TracedMessage
from quintet.wire.chat import Message, decode_messages
from quintet.wire.codec import UNREADABLE
from quintet.wire.config import ChatContentFormat
from quintet.wire.errors import ConfigError, RequestError, invalid
from quintet.wire.messages import ChatPrompt
from quintet.wire.params import shown

MAX_COMPILED = 64
Decoded = TypeVar("Decoded")
JINJA_MARKS = ("{{", "{%", "{#")
"""Text without any of these marks is constant, not a template."""


@dataclass(frozen=True, slots=True)
class CompiledTemplate:
    """A compiled template and its traits."""

    source: str
    template: jinja2.Template
    traits: TemplateTraits


class _TemplateFailed(Exception):
    """A template failed on messages; see ``__cause__``."""


class ChatTemplates:
    """Templates of the model by name, its special tokens, and a cache of compiled templates."""

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        content_format: ChatContentFormat = "auto",
    ) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._content_format = None if content_format == "auto" else content_format
        self._environment = make_environment()
        self._template = functools.lru_cache(MAX_COMPILED)(self._compiled)

    @property
    def names(self) -> list[str]:
        return list(self._templates)

    def compile(self) -> None:
        """Compile the model's templates in advance. Raises `ConfigError` for invalid Jinja."""
        for name, source in self._templates.items():
            try:
                self._template(source)
            except jinja2.exceptions.TemplateSyntaxError as error:
                raise ConfigError(
                    f"the chat template {name!r} is not valid Jinja: {error.message} (line {error.lineno}); "
                    "correct it or set another with --chat-template FILE."
                ) from error

    def render(self, prompt: ChatPrompt) -> str:
        """Return the prompt's text.

        Raises `RequestError` for undecodable messages, a missing template, or an error of the template.
        """
        if prompt.continue_final_message and prompt.add_generation_prompt:
            raise invalid(
                "continue_final_message and add_generation_prompt are both true; set one of them to false.",
                "continue_final_message",
            )
        sent = _decode(prompt.messages, decode_messages, "messages")
        tools = _decode(prompt.tools or b"[]", _decode_tools, "tools")
        variables = _decode(prompt.template_kwargs or b"{}", _decode_variables, "chat_template_kwargs")
        compiled = self._compile(self._choose(prompt.chat_template, bool(tools)))
        messages = normal_messages(sent, compiled.traits, self._content_format, prompt.message_names)
        variables = {
            "documents": None,
            "add_generation_prompt": prompt.add_generation_prompt,
            **self._special_tokens,
            **variables,
            "tools": tools or None,
        }
        try:
            return _render(compiled, messages, variables, prompt)
        except RequestError:
            if (complete := fallbacks.with_optional_fields(tools)) != tools:
                with contextlib.suppress(RequestError):
                    return self.render(msgspec.structs.replace(prompt, tools=msgspec.json.encode(complete)))
            others = fallbacks.with_other_efforts(variables, compiled.source)
            if not others:
                raise
        text = _render(compiled, messages, others.pop(), prompt)  # raises if the effort is not the cause
        for accepted in others:
            with contextlib.suppress(RequestError):
                return _render(compiled, messages, accepted, prompt)
        return text

    def _choose(self, requested: str | None, has_tools: bool) -> str:
        if requested in self._templates:
            return self._templates[requested]
        if requested is not None:
            return self._request_template(requested)
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if self._templates:
            raise invalid(
                f"this model has the chat templates {', '.join(self._templates)} but no default; "
                "set chat_template to one of them.",
                "chat_template",
            )
        raise invalid(
            "this model has no chat template to convert messages to a prompt; start the server with "
            "--chat-template FILE, or use /v1/completions.",
            "messages",
        )

    def _request_template(self, requested: str) -> str:
        """Return a template sent with the request. Raises `RequestError` for an unknown template name."""
        if any(mark in requested for mark in JINJA_MARKS):
            return requested
        names = ", ".join(self._templates)
        allowed = f"the name of one of this model's templates ({names}) or a" if names else "a"
        raise invalid(
            f"chat_template is {shown(requested)}; it must be {allowed} Jinja template.", "chat_template"
        )

    def _compile(self, source: str) -> CompiledTemplate:
        try:
            return self._template(source)
        except jinja2.exceptions.TemplateSyntaxError as error:
            raise invalid(
                f"the chat template is not valid Jinja: {error.message} (line {error.lineno}).",
                "chat_template",
            ) from error
        except Exception as error:
            raise invalid(
                f"the chat template cannot be compiled: {type(error).__name__}: {error}", "chat_template"
            ) from error

    def _compiled(self, source: str) -> CompiledTemplate:
        template = self._environment.from_string(source)
        return CompiledTemplate(source, template, traits_of(self._environment.parse(source)))


def _render(
    compiled: CompiledTemplate, messages: list[Message], variables: dict[str, Any], prompt: ChatPrompt
) -> str:
    """Render the first arrangement that the template accepts without hiding a system message. Raises `RequestError`."""
    rendered: str | None = None
    may_hide = messages[0]["role"] == "developer" or any(
        message["role"] in ("system", "developer") for message in messages[1:]
    )
    for arranged in _arrangements(messages):
        final = tag_final(arranged, compiled.source) if prompt.continue_final_message else None
        try:
            text = _run(compiled, arranged, variables)
        except _TemplateFailed:
            continue
        text = text if final is None else cut_at_tag(text, final)
        if not (may_hide and fallbacks.hides_system(arranged, text)):
            return text
        rendered = text if rendered is None else rendered
    if rendered is not None:
        return rendered
    raise _error_of(compiled, messages, variables, prompt)


def _arrangements(messages: list[Message]) -> Iterator[list[Message]]:
    yield messages.copy()
    yield from fallbacks.rearranged(messages)


def _run(compiled: CompiledTemplate, messages: Sequence[Message], variables: dict[str, Any]) -> str:
    try:
        return compiled.template.render({**variables, "messages": messages})
    except Exception as error:
        raise _TemplateFailed from error


def _error_of(
    compiled: CompiledTemplate, messages: list[Message], variables: dict[str, Any], prompt: ChatPrompt
) -> RequestError:
    """Return the error for messages that the template rejects; it names the last message that the template read."""
    seen: list[int] = []
    watched = [TracedMessage(message, index, seen) for index, message in enumerate(messages)]
    error: BaseException | None = None
    try:
        _run(compiled, watched, variables)
    except _TemplateFailed as failure:
        error = failure.__cause__
    where, described = "messages", "the messages"
    if seen:
        where = name_of(seen[-1], prompt.message_names)
        described = f"{where}, of role {shown(messages[seen[-1]]['role'])}"
    if isinstance(error, jinja2.exceptions.TemplateError):
        return invalid(f"the chat template refused {described}: {error}", where)
    return invalid(f"the chat template failed on {described}: {type(error).__name__}: {error}", where)


_decode_tools = msgspec.json.Decoder(list[dict[str, Any]]).decode
_decode_variables = msgspec.json.Decoder(dict[str, Any]).decode


def _decode(encoded: bytes, decode: Callable[[bytes], Decoded], field: str) -> Decoded:
    """Decode a part of a prompt. Raises `RequestError`; the frontend has reported most errors before."""
    try:
        return decode(encoded)
    except UNREADABLE as error:
        raise invalid(f"{field} cannot be decoded: {error}.", field) from error
