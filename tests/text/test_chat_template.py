"""Chat templates: equal to transformers' ``apply_chat_template``, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from quintet.tokenizer_proc.chat_template import ChatTemplates
from quintet.tokenizer_proc.template_files import load_templates
from quintet.wire.chat import encode_messages
from quintet.wire.config import ModelConfig
from quintet.wire.errors import ConfigError, ErrorCode, RequestError
from quintet.wire.messages import ChatPrompt

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """{% for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n" }}
{%- for t in tools or [] %}
    {{- t | tojson(indent=4) }}
    {{- "\\n\\n" }}
{%- endfor %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """{%- set loop_messages = messages %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and message == (messages | last) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
            {%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message["role"] == "assistant" %}
        {% generation %}{%- set ns.index = ns.index + 1 %}{{- " " + message["content"]|trim + eos_token}}{% endgeneration %}
    {%- endif %}
{%- endfor %}
{{- ns.index }}
"""
QWEN_3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
           and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set reasoning_content = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if loop.last or (not loop.last and reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
TEMPLATES = {"chatml": CHATML, "llama-2": LLAMA_2, "llama-3": LLAMA_3, "mistral": MISTRAL, "qwen-3": QWEN_3}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "How's the <weather> — today?",
            "parameters": {
                "type": "object",
                "properties": {"ort": {"type": "string", "description": "größer"}},
            },
        },
    }
]
EXTENSIONS = ((2, b"1"), (1, b"one"), (1, b""), (1, b"9" * 5000))
"""Unknown type, and texts that are no integer."""
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"ort": "Köln & <b>"}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi <there> & you 😀 "}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Why? "}],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\n"},
        {"role": "user", "content": "c"},
    ],
    "reasoning": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "hmm"},
        {"role": "user", "content": "c"},
    ],
}
TOOL_CHAT = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
]


@pytest.fixture(scope="session")
def theirs(tokenizers_by_style: dict[str, Tokenizer]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers_by_style["sentencepiece"], **SPECIAL)


def prompt(
    messages: Any, tools: Any = None, kwargs: Mapping[str, Any] | None = None, **changes: Any
) -> ChatPrompt:
    return ChatPrompt(
        encode_messages(messages),
        json.dumps(tools).encode() if tools else b"",
        json.dumps(kwargs).encode() if kwargs else b"",
        **changes,
    )


def ours(template: str, *args: Any, **kwargs: Any) -> str:
    return ChatTemplates({"default": template}, SPECIAL).render(prompt(*args, **kwargs))


def refused(template: str, *args: Any, **kwargs: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        ours(template, *args, **kwargs)
    assert caught.value.code is ErrorCode.INVALID
    return caught.value


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("generate", [True, False])
def test_rendering_equals_transformers(
    theirs: PreTrainedTokenizerFast, name: str, chat: str, generate: bool
) -> None:
    expected = theirs.apply_chat_template(
        CHATS[chat], chat_template=TEMPLATES[name], add_generation_prompt=generate, tokenize=False
    )
    assert ours(TEMPLATES[name], CHATS[chat], add_generation_prompt=generate) == expected


@pytest.mark.parametrize("name", ["llama-3", "mistral", "qwen-3"])
def test_tools_and_variables_equal_transformers(theirs: PreTrainedTokenizerFast, name: str) -> None:
    for chat in (TOOL_CHAT, CHATS["one"]):
        variables = {"enable_thinking": False, "date_string": "1 Jan 2030"}
        expected = theirs.apply_chat_template(
            chat,
            tools=TOOLS,
            chat_template=TEMPLATES[name],
            add_generation_prompt=True,
            tokenize=False,
            **variables,
        )
        assert ours(TEMPLATES[name], chat, TOOLS, variables) == expected


def test_a_function_needs_no_description_and_no_parameters() -> None:
    """In OpenAI's API both are optional; gpt-oss's template, and others, join and iterate them."""
    template = (
        "{% for tool in tools %}{% set f = tool.function %}// {{ f.description + ' ' + f.name }}("
        "{% for name, schema in f.parameters.properties.items() %}{{ name }}{% endfor %}){% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "now", "description": None}}, *TOOLS]
    assert ours(template, CHATS["one"], tools) == "//  now()// How's the <weather> — today? weather(ort)"
    assert "no attribute 'description'" in refused(template, CHATS["one"], [{"function": {}}]).message


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("final", ["The answer is", "trailing space ", "line\n"])
def test_continuing_the_final_message_equals_transformers(
    theirs: PreTrainedTokenizerFast, name: str, final: str
) -> None:
    chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": final}]
    expected = theirs.apply_chat_template(
        chat, chat_template=TEMPLATES[name], continue_final_message=True, tokenize=False
    )
    text = ours(TEMPLATES[name], chat, continue_final_message=True, add_generation_prompt=False)
    assert text == expected


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([], "messages", "empty"),
        ({"role": "user"}, "messages", "array"),
        ([1], "messages", "$[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]", "'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "string"),
    ],
)
def test_errors_name_malformed_messages(messages: Any, param: str, words: str) -> None:
    error = refused(CHATML, messages)
    assert error.param == param
    assert words in error.message


def test_undecodable_prompts_are_refused() -> None:
    templates = ChatTemplates({"default": CHATML}, SPECIAL)
    extensions = [
        msgspec.msgpack.encode([{"role": "u", "a": msgspec.msgpack.Ext(*each)}]) for each in EXTENSIONS
    ]
    for encoded in (b"", b"\x91" * 100_000, b"\x91\x81", b"\xff", b"[{}]", *extensions):
        with pytest.raises(RequestError) as caught:
            templates.render(ChatPrompt(encoded))
        assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "messages")
    messages = encode_messages([{"role": "user"}])
    with pytest.raises(RequestError, match="chat_template_kwargs cannot be decoded"):
        templates.render(ChatPrompt(messages, template_kwargs=b"[]"))
    with pytest.raises(RequestError, match="tools cannot be decoded"):
        templates.render(ChatPrompt(messages, tools=b"{}"))


def test_templates_get_every_field_in_its_order_and_integers_of_any_size() -> None:
    message = {"b": [1 << 64, {"a": -(1 << 63) - 1}], "role": "user", "x": None, "content": "é", "a": 1.5}
    rendered = ours("{{ messages[0] | tojson }}", [message])
    assert rendered == json.dumps({k: v for k, v in message.items() if v is not None}, ensure_ascii=False)


def test_errors_raised_by_the_template_are_returned() -> None:
    chat = [{"role": "assistant", "content": "x"}]
    assert "roles must alternate user/assistant" in refused(LLAMA_2, chat).message


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if %}", "not valid Jinja"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages.__class__.__mro__ }}", "refused"),
        ("{{ messages.append(1) }}", "refused"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "refused"),
        ("{{ range(10000000)|list }}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_template_errors_and_sandbox_violations_are_refused(template: str, words: str) -> None:
    assert words in refused(template, CHATS["one"]).message


def test_continue_and_generate_exclude_each_other() -> None:
    assert refused(CHATML, CHATS["one"], continue_final_message=True).param == "continue_final_message"


def test_a_template_that_hides_the_final_message_cannot_continue_it() -> None:
    arguments = {"continue_final_message": True, "add_generation_prompt": False}
    assert "does not render" in refused("{{ messages[0].content|length }}", CHATS["one"], **arguments).message
    assert "does not use" in refused("fixed", CHATS["one"], **arguments).message


def test_the_error_without_a_template_names_the_option() -> None:
    with pytest.raises(RequestError, match="--chat-template"):
        ChatTemplates({}, {}).render(prompt(CHATS["one"]))


def test_strftime_now_is_available() -> None:
    assert len(ours("{{ strftime_now('%Y-%m-%d') }}", CHATS["one"])) == 10


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"bos_token": {"content": "<bos>"}}, "<old>plain<e>"),
        ({"bos_token": {"content": "<bos>"}, "added_tokens_decoder": {}}, "<bos>plain<e>"),
        ({"image_token": "<image>"}, "<old>plain<e><image>"),
        ({"extra_special_tokens": {"image_token": "<image>"}}, "<old>plain<e><image>"),
        ({"extra_special_tokens": ["<image>"], "image_token": None}, "<old>plain<e>"),
    ],
)
def test_templates_are_rendered_with_the_models_special_tokens(
    config: dict[str, Any],
    expected: str,
    model_of: Callable[..., ModelConfig],
    tmp_path: Path,
    tokenizers_by_style: dict[str, Tokenizer],
) -> None:
    """transformers reads ``special_tokens_map.json`` last, but not beside ``added_tokens_decoder``."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<old>", "eos_token": "<e>"}))
    named = {"default": "{{ bos_token }}plain{{ eos_token }}{{ image_token }}"}
    templates = load_templates(model_of(tokenizers_by_style["sentencepiece"], chat_templates=named))
    assert templates.render(prompt(CHATS["one"])) == expected


def test_an_unknown_template_name_is_refused() -> None:
    named = ChatTemplates({"default": "plain", "rag": "rag"}, SPECIAL)
    assert named.render(prompt(CHATS["one"], chat_template="rag")) == "rag"
    assert named.render(prompt(CHATS["one"], chat_template="own {{ eos_token }}")) == "own </s>"
    for odd in ("typo", "", "{oops}", "t" * 1000):
        with pytest.raises(RequestError, match=r"\(default, rag\)") as caught:
            named.render(prompt(CHATS["one"], chat_template=odd))
        assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "chat_template")
        assert len(caught.value.message) < 300
    with pytest.raises(RequestError, match="it must be a Jinja template"):
        ChatTemplates({}, {}).render(prompt(CHATS["one"], chat_template="default"))


def test_an_invalid_template_is_a_startup_error(
    model_of: Callable[..., ModelConfig], tokenizers_by_style: dict[str, Tokenizer]
) -> None:
    model = model_of(tokenizers_by_style["sentencepiece"], chat_templates={"default": "{% for %}"})
    with pytest.raises(ConfigError, match="'default' is not valid Jinja"):
        load_templates(model)
