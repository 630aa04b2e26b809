"""Conversations to text: the model's chat template, rendered as transformers' ``apply_chat_template`` renders it.

Owns the sandbox, the compiled templates and the normal form of messages that templates see. Knows no ids and no
requests. A template is foreign code: whatever it raises is the request's error, never this process's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from quintet.wire.config import ModelConfig
from quintet.wire.errors import ConfigError, ErrorCode, RequestError
from quintet.wire.messages import ChatPrompt
from quintet.wire.params import shown

SPECIAL_TOKEN_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
MAX_COMPILED = 64
JINJA_MARKS = ("{{", "{%", "{#")
"""Text without any of these is no template: it would say the same of every conversation."""
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Content parts that are text, and the field that holds it."""

Message = dict[str, Any]


class GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what the model wrote, for training; here it only renders."""

    tags = {"generation"}  # noqa: RUF012 - the attribute Jinja asks for

    def parse(self, parser: Parser) -> nodes.Node:
        """Render the body as a block of its own, so that what it sets stays inside, as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


class PlainNamespace(Namespace):
    """``namespace()`` whose attributes cannot reach Python's internals."""

    def __setitem__(self, name: str, value: Any) -> None:
        """Set an attribute, which must not begin with an underscore."""
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot have an attribute {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model has seen."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """``dict(…)`` as a function: templates need not hold the type."""
    return dict(*args, **kwargs)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return the sandbox chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _dict,
        "namespace": PlainNamespace,
    }
    return environment


class ChatTemplates:
    """The model's templates by name, its special tokens, and the compiled form of those in use."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._environment = make_environment()
        self._compiled: dict[str, jinja2.Template] = {}

    @property
    def names(self) -> list[str]:
        """Names of the model's templates; empty when it has none."""
        return list(self._templates)

    def compile(self) -> None:
        """Compile the model's templates now rather than with the first request.

        Raises `ConfigError` for one that is not valid Jinja.
        """
        for name, source in self._templates.items():
            try:
                self._template(source)
            except jinja2.exceptions.TemplateSyntaxError as error:
                raise ConfigError(
                    f"the chat template {name!r} is not valid Jinja: {error.message} (line {error.lineno}); "
                    "correct it or give another as --chat-template FILE."
                ) from error

    def render(self, prompt: ChatPrompt) -> str:
        """Return the prompt's text.

        Raises `RequestError` when messages are malformed, when there is no template, or with what the template says.
        """
        if prompt.continue_final_message and prompt.add_generation_prompt:
            raise _invalid(
                "continue_final_message and add_generation_prompt are both true; set one of them to false.",
                "continue_final_message",
            )
        messages = normal_messages(_decode(prompt.messages, "messages"))
        tools = _objects(_decode(prompt.tools, "tools"), "tools") if prompt.tools else None
        variables = _decode(prompt.template_kwargs, "chat_template_kwargs") if prompt.template_kwargs else {}
        if not isinstance(variables, dict):
            raise _invalid("chat_template_kwargs must be a JSON object.", "chat_template_kwargs")
        source = self._choose(prompt.chat_template, bool(tools))
        final = _tag_final(messages, source) if prompt.continue_final_message else None
        text = self._run(
            source,
            {
                "documents": None,
                "add_generation_prompt": prompt.add_generation_prompt,
                **self._special_tokens,
                **variables,
                "messages": messages,
                "tools": tools or None,
            },
        )
        return text if final is None else _cut_at_tag(text, final)

    def _choose(self, asked: str | None, has_tools: bool) -> str:
        if asked is not None:
            return self._templates[asked] if asked in self._templates else self._own(asked)
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if self._templates:
            raise _invalid(
                f"this model has chat templates named {', '.join(self._templates)} and no default; "
                "name one of them as chat_template.",
                "chat_template",
            )
        raise _invalid(
            "this model has no chat template, so messages cannot be turned into a prompt; start the server with "
            "--chat-template FILE, or use /v1/completions.",
            "messages",
        )

    def _own(self, asked: str) -> str:
        """Return a template that came with the request. Raises `RequestError` for what is none: a name that nobody has."""
        if any(mark in asked for mark in JINJA_MARKS):
            return asked
        names = ", ".join(self._templates)
        allowed = f"the name of one of this model's templates ({names}) or a" if names else "a"
        raise _invalid(
            f"chat_template is {shown(asked)}; it must be {allowed} Jinja template.", "chat_template"
        )

    def _run(self, source: str, variables: dict[str, Any]) -> str:
        try:
            return self._template(source).render(variables)
        except jinja2.exceptions.TemplateSyntaxError as error:
            raise _invalid(
                f"the chat template is not valid Jinja: {error.message} (line {error.lineno}).",
                "chat_template",
            ) from error
        except jinja2.exceptions.TemplateError as error:
            raise _invalid(f"the chat template refused the messages: {error}", "messages") from error
        except Exception as error:
            raise _invalid(
                f"the chat template failed on these messages: {type(error).__name__}: {error}", "messages"
            ) from error

    def _template(self, source: str) -> jinja2.Template:
        template = self._compiled.get(source)
        if template is None:
            template = self._environment.from_string(source)
            if len(self._compiled) >= MAX_COMPILED:
                self._compiled.clear()
            self._compiled[source] = template
        return template


def normal_messages(messages: Any) -> list[Message]:
    """Return messages in the form templates are written for.

    ``content`` becomes one string (parts are joined by newlines), the arguments of tool calls become objects, and
    reasoning is found under every name templates read it by. Raises `RequestError` naming the part that is wrong.
    """
    messages = _objects(messages, "messages")
    if not messages:
        raise _invalid("messages is an empty list; send at least one message.", "messages")
    return [_normal_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _normal_message(message: Message, where: str) -> Message:
    if not isinstance(message.get("role"), str):
        raise _invalid(f"{where}.role must be a string such as 'user'.", f"{where}.role")
    normal = {name: value for name, value in message.items() if value is not None}
    normal["content"] = _joined(message.get("content"), f"{where}.content")
    reasoning = next(
        (normal[name] for name in ("reasoning_content", "thinking", "reasoning") if name in normal), None
    )
    if reasoning is not None:
        normal = {"thinking": reasoning, "reasoning": reasoning, **normal, "reasoning_content": reasoning}
    if "tool_calls" in normal:
        calls = _objects(normal["tool_calls"], f"{where}.tool_calls")
        normal["tool_calls"] = [
            _normal_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return normal


def _joined(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(f"{where} must be a string or a list of content parts.", where)
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            raise _invalid(
                f"{where}[{i}] has type {shown(kind)}; this model reads text only. "
                f"Allowed types: {', '.join(TEXT_PARTS)}.",
                f"{where}[{i}]",
            )
        if not isinstance(part.get(field), str):
            raise _invalid(f"{where}[{i}].{field} must be a string.", f"{where}[{i}].{field}")
        texts.append(part[field])
    return "\n".join(texts)


def _normal_call(call: Message, where: str) -> Message:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        arguments = _decode(arguments, f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _tag_final(messages: list[Message], source: str) -> str:
    """Mark the end of the message to be continued; return its text."""
    final: str = messages[-1]["content"]
    if "content" not in source:
        raise _invalid(
            "continue_final_message is true but the chat template does not use the messages' content.",
            "continue_final_message",
        )
    messages[-1]["content"] = final + CONTINUE_TAG
    return final


def _cut_at_tag(text: str, final: str) -> str:
    """Cut the rendered text where the final message ends; a template that trims it trims the cut too."""
    at = text.rfind(CONTINUE_TAG.strip())
    if at < 0 or final.strip() not in text:
        raise _invalid(
            "continue_final_message is true but the chat template does not show the final message as it is.",
            "continue_final_message",
        )
    kept = text[:at]
    return kept if text.startswith(CONTINUE_TAG, at) else kept.rstrip()


def _decode(encoded: bytes | str, field: str) -> Any:
    try:
        return msgspec.json.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid(f"{field} is not valid JSON: {error}.", field) from error
    except RecursionError as error:
        raise _invalid(f"{field} is nested too deeply; flatten it.", field) from error


def _objects(value: Any, field: str) -> list[Message]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise _invalid(f"{field} must be a list of JSON objects.", field)
    return value


def _invalid(message: str, param: str) -> RequestError:
    return RequestError(ErrorCode.INVALID, message, param)


def load_templates(model: ModelConfig) -> ChatTemplates:
    """Compile the configured templates, for the special tokens of the tokenizer's folder.

    Raises `ConfigError` naming a file that cannot be read, or a template that is not valid Jinja.
    """
    folder = Path(model.tokenizer_path)
    config = _read_object(folder / "tokenizer_config.json")
    special = special_tokens([_read_object(folder / "special_tokens_map.json"), config])
    loaded = ChatTemplates(model.chat_templates, special)
    loaded.compile()
    return loaded


def special_tokens(sources: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the special tokens that templates may name; later sources go before earlier ones."""
    found: dict[str, str] = {}
    for source in sources:
        for name in SPECIAL_TOKEN_NAMES:
            token = source.get(name)
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str):
                found[name] = token
    return found


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not a JSON object: {error}") from error
