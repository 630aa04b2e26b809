"""Automatic choice of a model's parsers by the marks in its chat template.

A template renders past calls and reasoning in the model's format, so its marks identify the format. The first matching
row wins; later rows have more common marks.
"""

from __future__ import annotations

from collections.abc import Sequence

Signs = tuple[str, ...]

_TOOLS: Sequence[tuple[str, Signs]] = (
    ("muse_glimmer", ("<atem:function_calls>",)),
    ("openai", ("<|start|>", "<|channel|>")),
    ("inkling", ("<|content_invoke_tool_json|>",)),
    ("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>")),
    ("k2_horizon", ("<ifm|tool_call>",)),
    ("minimax_m3", ("]<]minimax[>[",)),
    ("hy_v3", ("<tool_sep",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("step3", ("<steptml:invoke name=",)),
    ("apertus", ("<|tools_prefix|>",)),
    ("cohere_command3", ("<|START_ACTION|>",)),
    ("nemotron_json", ("<TOOLCALL>",)),
    ("minicpm5", ('<function name="', '<param name="')),
    ("dots", ("<dots_function_call>",)),
    ("solar_open2", ("<|tool_call:start|>",)),
    ("gigachat35", ("｜GCML｜",)),
    ("gigachat3", ("<|role_sep|>", "function call")),
    ("gigachat3", ("<|function_call|>",)),
    ("deepseek_v32", ("｜DSML｜", "invoke name=")),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("gemma", ("<start_function_call>",)),
    ("gemma", ("<|tool_call>",)),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>", "<function=")),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("internlm", ("<|action_start|>", "<|plugin|>")),
    ("lfm2", ("<|tool_call_start|>",)),
    ("phi4_mini_json", ("<|tool|>", "<|/tool|>")),
    ("granite", ("<|tool_call|>", "<|start_of_role|>")),
    ("granite", ("<tool_call>", "<|start_of_role|>")),
    ("hunyuan_a13b", ("<tool_calls>", "<answer>")),
    ("jamba", ("<tool_calls>",)),
    ("olmo3", ("<function_calls>", "</function_calls>")),
    ("hermes", ("<tool_call>", "arguments")),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('{"name": function name, "parameters":',)),
)

_REASONING: Sequence[tuple[str, Signs]] = (
    ("muse_glimmer", ("<atem:function_calls>",)),
    ("openai_gptoss", ("<|start|>", "<|channel|>")),
    ("inkling", ("<|content_thinking|>",)),
    ("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>")),
    ("k2_horizon", ("<ifm|think",)),
    ("minimax_m3", ("<mm:think>",)),
    ("hy_v3", ("<tool_sep",)),
    ("apertus", ("<|inner_prefix|>",)),
    ("cohere_command3", ("<|START_THINKING|>",)),
    ("solar_open2", ("<|think:start|>",)),
    ("gemma", ("<|channel>", "<channel|>")),
    ("seed_oss", ("<seed:think>",)),
    ("mistral", ("[THINK]",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>", "</think>")),
    ("glm45", ("<arg_key>", "</think>")),
    ("granite", ("Here is my thought process:",)),
    ("granite", ("<|start_of_role|>", "</think>")),
    ("minimax_m2", ("<minimax:tool_call>", "</think>")),
    ("hunyuan_a13b", ("</think>", "<answer>")),
    ("deepseek_r1", ("</think>", "<｜Assistant｜>")),
    ("qwen3", ("</think>",)),
)


def tools_by(template: str) -> str:
    """Return the name of the tool call parser for a chat template; empty for none."""
    return _first(_TOOLS, template)


def reasoning_by(template: str) -> str:
    """Return the name of the reasoning parser for a chat template; empty for none."""
    return _first(_REASONING, template)


def _first(rows: Sequence[tuple[str, Signs]], template: str) -> str:
    return next((name for name, signs in rows if all(sign in template for sign in signs)), "")
