"""LlamaIndex's OpenAILike: complete and chat, whole, streamed, async; tools; structured output by tool and by schema."""

import asyncio
import sys
from typing import Literal

sys.path.pop(0)  # this folder has a file with the package's name
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

url, model = sys.argv[1:]
common = {
    "model": model,
    "api_base": f"{url}/v1",
    "api_key": "unused",
    "context_window": 2048,
    "max_tokens": 300,
    "temperature": 0,
}
chat = OpenAILike(is_chat_model=True, is_function_calling_model=True, **common)


class Place(BaseModel):
    """A place."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


def weather(city: Literal["Oslo", "Rome"], days: Literal[1, 2, 3]) -> str:
    """Tell the weather of a city."""
    return f"{days} fine days in {city}"


for is_chat in (False, True):
    llm = OpenAILike(is_chat_model=is_chat, **common)
    whole = llm.complete("def add(a, b):").text
    *_, last = llm.stream_complete("def add(a, b):")
    assert whole and last.text == whole
    assert asyncio.run(OpenAILike(is_chat_model=is_chat, **common).acomplete("def add(a, b):")).text == whole

messages = [ChatMessage(role="user", content="def add(a, b):")]
whole_chat = chat.chat(messages)
*_, last = chat.stream_chat(messages)
assert whole_chat.message.content == last.message.content and whole_chat.raw.usage.completion_tokens > 0

tool = FunctionTool.from_defaults(weather)
requires_calls = {"user_msg": "Weather?", "tool_required": True, "allow_parallel_tool_calls": False}
(call,) = chat.get_tool_calls_from_response(chat.chat_with_tools([tool], **requires_calls))
assert call.tool_name == "weather" and tool(**call.tool_kwargs).content.endswith(("Oslo", "Rome"))
*_, last = chat.stream_chat_with_tools([tool], **requires_calls)
assert [one.tool_kwargs for one in chat.get_tool_calls_from_response(last)] == [call.tool_kwargs]

where = PromptTemplate("Where?")
by_schema = OpenAILike(is_chat_model=True, should_use_structured_outputs=True, **common)
assert isinstance(chat.structured_predict(Place, where, llm_kwargs={"tool_choice": "required"}), Place)
assert isinstance(by_schema.structured_predict(Place, where), Place)
