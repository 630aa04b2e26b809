"""LangChain: ChatOpenAI over chat and over responses, ChatAnthropic, OpenAI: invoke, stream, batch, tools, structured output."""

import asyncio
import sys
from typing import Any, Literal

sys.path.pop(0)  # this folder has a file with the package's name
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

url, model = sys.argv[1:]
loop = asyncio.new_event_loop()
common = {"model": model, "api_key": "unused", "temperature": 0, "max_tokens": 300}
chat = ChatOpenAI(base_url=f"{url}/v1", **common)
responses = ChatOpenAI(base_url=f"{url}/v1", use_responses_api=True, **common)
claude = ChatAnthropic(base_url=url, **common)
completions = OpenAI(base_url=f"{url}/v1", **common)


class Place(BaseModel):
    """A place."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


@tool
def weather(city: Literal["Oslo", "Rome"], days: Literal[1, 2, 3]) -> str:
    """Tell the weather of a city."""
    return f"{days} fine days in {city}"


def text_of(answer: Any) -> str:
    return answer if isinstance(answer, str) else answer.text


def summed(parts: Any) -> Any:
    first, *others = parts
    for part in others:
        first += part
    return first


for each in (chat, responses, claude, completions):
    text = text_of(each.invoke("def add(a, b):"))
    parts = [text_of(part) for part in each.stream("def add(a, b):")]
    assert text and len(parts) > 2 and "".join(parts) == text, (text, parts)
    batch = loop.run_until_complete(each.abatch(["def add(a, b):"] * 4))
    assert {text_of(one) for one in batch} == {text}

for each in (chat, responses, claude):
    requires_calls: Any = "any" if each is claude else "required"
    bound = each.bind_tools([weather], tool_choice=requires_calls, parallel_tool_calls=False)
    ask = [HumanMessage("Weather?")]
    answer = bound.invoke(ask)
    (call,) = answer.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in {"Oslo", "Rome"}
    assert [one["args"] for one in summed(bound.stream(ask)).tool_calls] == [call["args"]]
    no_calls: Any = {"type": "none"} if each is claude else "none"
    after = [*ask, answer, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
    final = each.bind_tools([weather], tool_choice=no_calls).invoke(after)
    assert final.text and not final.tool_calls
    for method in ("json_schema", "function_calling"):
        assert isinstance(each.with_structured_output(Place, method=method).invoke("Where?"), Place)

whole = chat.invoke("x")
assert summed(chat.stream("x", stream_usage=True)).usage_metadata == whole.usage_metadata
counts = [each.usage_metadata["input_tokens"] for each in (claude.invoke("x"), summed(claude.stream("x")))]
assert counts[0] == counts[1] > 0
logged = chat.bind(logprobs=True, top_logprobs=2).invoke("x").response_metadata["logprobs"]["content"]
assert len(logged) == whole.usage_metadata["output_tokens"] and len(logged[0]["top_logprobs"]) == 2
