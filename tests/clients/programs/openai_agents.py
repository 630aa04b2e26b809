"""OpenAI's agents: a loop with a tool, whole and streamed, and an output of a type; over chat and over responses."""

import asyncio
import sys
from typing import Literal

sys.path.pop(0)  # this folder
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

url, model = sys.argv[1:]
set_tracing_disabled(True)
calls: list[str] = []


class Place(BaseModel):
    """A place."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


@function_tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Tell the weather of a city."""
    calls.append(city)
    return f"Fine in {city}"


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused")
    settings = ModelSettings(temperature=0, max_tokens=300, parallel_tool_calls=False, tool_choice="required")
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        engine = kind(model, client)
        agent = Agent(
            name="guide", instructions="Help.", model=engine, tools=[weather], model_settings=settings
        )
        result = await Runner.run(agent, "Weather?", max_turns=4)
        items = [type(item).__name__ for item in result.new_items]
        assert items == ["ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"], items
        assert len(calls) == 1 and result.final_output
        streamed = Runner.run_streamed(agent, "Weather?", max_turns=4)
        kinds = {event.type async for event in streamed.stream_events()}
        assert "raw_response_event" in kinds and streamed.final_output == result.final_output
        assert calls.pop() == calls.pop()
        plain = ModelSettings(temperature=0, max_tokens=300)
        shaped = Agent(name="where", model=engine, output_type=Place, model_settings=plain)
        assert isinstance((await Runner.run(shaped, "Where?")).final_output, Place)


asyncio.run(main())
