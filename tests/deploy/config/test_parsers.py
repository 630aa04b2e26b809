"""Output parsers: by flag, or detected from the chat template."""

from __future__ import annotations

import pytest

from quintet.deploy.config.parsers import REASONING_ALIASES, TOOL_ALIASES, choose_parsers
from quintet.detokenizer_proc.parsers.formats import REASONING, TOOLS
from quintet.wire.config import ParsersConfig
from quintet.wire.errors import ConfigError

TEMPLATES = {
    "Qwen 2.5": ('<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args>}', "", "hermes"),
    "Qwen 3": ("<tool_call>{'name': n, 'arguments': a}</tool_call> <think>\\n\\n</think>", "qwen3", "hermes"),
    "Qwen 3 Coder": ("<tool_call>\\n<function=x>\\n<parameter=p>", "", "qwen3_coder"),
    "Llama 3.1": ("<|python_tag|> Respond in the format {...}", "", "llama3_json"),
    "DeepSeek R1": ("</think> <｜Assistant｜><｜tool▁calls▁begin｜> ```json", "deepseek_r1", "deepseek_v3"),
    "DeepSeek 3.1": ("</think> <｜Assistant｜><｜tool▁calls▁begin｜>", "deepseek_r1", "deepseek_v31"),
    "DeepSeek 3.2": ("<｜DSML｜function_calls>\\n<｜DSML｜invoke name=", "", "deepseek_v32"),
    "GLM 4.5": ("[gMASK] <think></think> <tool_call>x<arg_key>k</arg_key>", "glm45", "glm45"),
    "Kimi K2": ("<|tool_calls_section_begin|>", "", "kimi_k2"),
    "Magistral": ("[THINK][/THINK][TOOL_CALLS]", "mistral", "mistral"),
    "gpt-oss": ("<|start|>assistant<|channel|>analysis<|message|>", "openai_gptoss", "openai"),
    "Seed OSS": ("<seed:think> <seed:tool_call><function=x>", "seed_oss", "seed_oss"),
    "Step 3": ('<｜tool_calls_begin｜><steptml:invoke name="', "", "step3"),
    "GigaChat 3": ("<|message_sep|> function call<|role_sep|>", "", "gigachat3"),
    "GigaChat 3.1": ("<|function_call|>{", "", "gigachat3"),
    "Olmo 3": ("<function_calls>{{ calls }}</function_calls> <think>", "", "olmo3"),
    "Granite 3.2": ("<|start_of_role|> <|tool_call|> Here is my thought process:", "granite", "granite"),
    "Apertus": ("<|inner_prefix|> <|tools_prefix|>", "apertus", "apertus"),
    "Command A": ("<|START_THINKING|> <|START_ACTION|>[", "cohere_command3", "cohere_command3"),
    "Nemotron Nano 2": ("<TOOLCALL>[{{ call }}]</TOOLCALL> <think></think>", "qwen3", "nemotron_json"),
    "MiniCPM 5": ('<function name="f"><param name="a"> <think></think>', "qwen3", "minicpm5"),
    "Hy3": ("<think{{ s }}> <tool_calls{{ s }}> <tool_sep{{ s }}> <arg_key{{ s }}>", "hy_v3", "hy_v3"),
    "Inkling": (
        "<|content_thinking|> <|message_model|>f<|content_invoke_tool_json|>",
        "inkling",
        "inkling",
    ),
    "K2 Horizon": ("<ifm|think_fast> <ifm|tool_calls> <ifm|tool_call>", "k2_horizon", "k2_horizon"),
    "Kimi K3": ("<|open|>tools<|sep|> <|close|>tools<|sep|>", "kimi_k3", "kimi_k3"),
    "MiniMax M3": ("<mm:think> {%- set ns = ']<]minimax[>[' %}", "minimax_m3", "minimax_m3"),
    "Muse Glimmer": (
        "<|start|>assistant to=f<|message|><atem:function_calls>",
        "muse_glimmer",
        "muse_glimmer",
    ),
    "a plain one": ("{{ messages }}", "", ""),
}


@pytest.mark.parametrize("model", TEMPLATES)
def test_parsers_are_detected_from_the_template(model: str) -> None:
    template, reasoning, tools = TEMPLATES[model]
    config, note = choose_parsers("auto", "auto", {"default": template})
    assert (config.reasoning, config.tools) == (reasoning, tools)
    assert (note is None) == (not reasoning and not tools)
    assert note is None or all(name in note for name in (reasoning, tools))
    assert reasoning in {"", *REASONING} and tools in {"", *TOOLS}


def test_flags_override_detection() -> None:
    templates = {"default": TEMPLATES["Qwen 3"][0]}
    assert choose_parsers("none", "none", templates) == (ParsersConfig(), None)
    config, note = choose_parsers("none", "mistral", templates)
    assert (config.reasoning, config.tools, config.call_ids, note) == ("", "mistral", "short", None)
    config, note = choose_parsers("auto", "qwen3_xml", templates)
    assert (config.reasoning, config.tools, config.needs_schemas) == ("qwen3", "qwen3_xml", True)
    assert note is not None and "qwen3_xml" not in note


@pytest.mark.parametrize(
    ("reasoning", "tools", "expected"),
    [
        ("glm47", "glm47", ("glm45", "glm45")),
        ("gemma4", "functiongemma", ("gemma", "gemma")),
        ("deepseek-r1", "deepseekv31", ("deepseek_r1", "deepseek_v31")),
        ("deepseek_v4", "deepseek_v4", ("deepseek_v3", "deepseek_v32")),
        ("GptOss", "gpt-oss", ("openai_gptoss", "openai")),
        ("holo2", "minimax", ("deepseek_r1", "jamba")),
        ("identity", "none", ("", "")),
        ("poolside_v1", "cohere_command4", ("qwen3", "cohere_command3")),
        ("nemotron_3", "interns1", ("nemotron_v3", "internlm")),
        ("none", "granite-20b-fc", ("", "granite_20b_fc")),
        ("minimax-m3", "hunyuan", ("minimax_m3", "hy_v3")),
        ("minimax-append-think", "minimax-m2", ("minimax_m2_append_think", "minimax_m2")),
        ("minimax_m2_append_think", "minimax_m2", ("minimax_m2_append_think", "minimax_m2")),
        ("deepseek_v41", "deepseekv4", ("deepseek_v3", "deepseek_v32")),
        ("ling3", "ling3", ("glm45", "glm45")),
        ("hy_v4", "hy_v4", ("hy_v3", "hy_v3")),
    ],
)
def test_names_of_other_servers_are_accepted(reasoning: str, tools: str, expected: tuple[str, str]) -> None:
    config, _ = choose_parsers(reasoning, tools, {})
    assert (config.reasoning, config.tools) == expected


def test_aliases_name_parsers_and_hide_none() -> None:
    for aliases, known in ((TOOL_ALIASES, TOOLS), (REASONING_ALIASES, REASONING)):
        assert set(aliases.values()) <= {*known, "none"}
        assert not aliases.keys() & known.keys()


def test_tool_parser_is_detected_from_the_tool_template() -> None:
    config, _ = choose_parsers("auto", "auto", {"default": "<think></think>", "tool_use": "[TOOL_CALLS]"})
    assert (config.reasoning, config.tools) == ("qwen3", "mistral")
    config, _ = choose_parsers(
        "auto", "auto", {"default": "{{ messages }}", "tool_use": "<|START_THINKING|>"}
    )
    assert config.reasoning == "cohere_command3"


@pytest.mark.parametrize(
    ("reasoning", "tools", "words"),
    [
        ("auto", "hermez", ["--tool-call-parser is 'hermez'", "hermes", "qwen3_coder"]),
        ("qwen", "auto", ["--reasoning-parser is 'qwen'", "deepseek_r1"]),
        ("qwen3", "openai", ["openai_gptoss"]),
    ],
)
def test_unknown_parser_is_rejected(reasoning: str, tools: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        choose_parsers(reasoning, tools, {})
    assert all(word in str(refused.value) for word in words)
