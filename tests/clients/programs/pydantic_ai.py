"""Pydantic AI: agents over chat, responses and messages: text, typed outputs by tool and by schema, whole and streamed."""

import asyncio
import sys
from typing import Literal

sys.path.pop(0)  # this folder has a file with the package's name
from anthropic import AsyncAnthropic
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

url, model = sys.argv[1:]
openai = OpenAIProvider(base_url=f"{url}/v1", api_key="unused")
anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=url, api_key="unused"))
claude = AnthropicModel(model, provider=anthropic)
settings = {"temperature": 0, "max_tokens": 200, "parallel_tool_calls": False}


class Place(BaseModel):
    """A place."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


async def main() -> None:
    for each in (
        OpenAIChatModel(model, provider=openai),
        OpenAIResponsesModel(model, provider=openai),
        claude,
    ):
        plain = Agent(each, model_settings=settings | {"max_tokens": 24})
        whole = await plain.run("def add(a, b):")
        assert whole.output and whole.usage.output_tokens == 24
        async with plain.run_stream("def add(a, b):") as stream:
            parts = [part async for part in stream.stream_text(delta=True, debounce_by=None)]
        assert "".join(parts) == whole.output
        # Pydantic AI enables schemas for Anthropic models by model name.
        outputs = [ToolOutput(Place)] if each is claude else [ToolOutput(Place), NativeOutput(Place)]
        for output in outputs:
            agent = Agent(each, output_type=output, model_settings=settings, retries=0)
            found = (await agent.run("Where?")).output
            assert isinstance(found, Place)
            async with agent.run_stream("Where?") as stream:
                assert await stream.get_output() == found


asyncio.run(main())
