"""LiteLLM over the OpenAI and Anthropic APIs: chats and completions, streamed and concurrent; tools, schemas, errors."""

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it downloads prices
sys.path.pop(0)  # this folder has a file with the package's name
import litellm
from pydantic import BaseModel

url, model = sys.argv[1:]
common = {"api_key": "unused", "temperature": 0, "max_tokens": 24}
openai = common | {"model": f"hosted_vllm/{model}", "api_base": f"{url}/v1"}
anthropic = common | {"model": f"anthropic/{model}", "api_base": url}
messages = [{"role": "user", "content": "def add(a, b):"}]
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
tools = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
requires_calls = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100}


class Person(BaseModel):
    """Schema of a response."""

    age: int
    likes: list[bool]


async def check_concurrent(text: str) -> None:
    answers = await asyncio.gather(*(litellm.acompletion(messages=messages, **openai) for _ in range(8)))
    assert {answer.choices[0].message.content for answer in answers} == {text}


def streamed(**fields: object) -> litellm.ModelResponse:
    """Return the response of a stream."""
    return litellm.stream_chunk_builder(list(litellm.completion(messages=messages, stream=True, **fields)))


for fields in (openai, anthropic):
    whole = litellm.completion(messages=messages, **fields)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens == 24 and whole.choices[0].finish_reason == "length"
    stream = streamed(**fields, stream_options={"include_usage": True})
    assert stream.choices[0].message.content == text and stream.usage.completion_tokens == 24
    asyncio.run(check_concurrent(litellm.completion(messages=messages, **openai).choices[0].message.content))

    called = litellm.completion(messages=messages, **fields | requires_calls).choices[0]
    (call,) = called.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather" and arguments["city"] in {"Oslo", "Rome"}
    assert 1 <= arguments["days"] <= 9 and called.finish_reason == "tool_calls"
    (again,) = streamed(**fields | requires_calls).choices[0].message.tool_calls
    assert json.loads(again.function.arguments) == arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "7 degrees"}
    after = [*messages, called.message.model_dump(), result]
    assert (
        litellm.completion(messages=after, tools=tools, tool_choice="none", **fields)
        .choices[0]
        .message.content
    )

shaped = litellm.completion(messages=messages, response_format=Person, **openai | {"max_tokens": 300})
Person.model_validate_json(shaped.choices[0].message.content)
completed = litellm.text_completion(
    prompt="def add(a, b):", **openai | {"model": f"text-completion-openai/{model}"}
)
assert completed.choices[0].text and completed.usage.completion_tokens == 24
response = litellm.responses(
    model=f"openai/{model}",
    input="def add(a, b):",
    api_base=f"{url}/v1",
    api_key="unused",
    max_output_tokens=24,
)
assert 0 < response.usage.output_tokens <= 24  # sampled, so it may end earlier
for wrong, error in (
    ({"messages": [{"role": "user", "content": "a b c " * 5000}]}, litellm.ContextWindowExceededError),
    ({"temperature": -1}, litellm.BadRequestError),
    ({"model": "hosted_vllm/none"}, litellm.NotFoundError),
):
    try:
        litellm.completion(**{"messages": messages} | openai | wrong)
    except error:
        continue
    raise AssertionError(wrong)
