"""Instructor: validated models from chat by tools and by schemas, whole and partial."""

import sys
from typing import Literal

sys.path.pop(0)  # this folder has a file with the package's name
import instructor
import openai
from pydantic import BaseModel, Field

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused")
fields = {
    "model": model,
    "messages": [{"role": "user", "content": "Where?"}],
    "temperature": 0,
    "max_tokens": 400,
    "max_retries": 0,
}


class Place(BaseModel):
    """A place."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


class Trip(BaseModel):
    """Several places."""

    places: list[Place] = Field(min_length=1, max_length=2)
    by_train: bool


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    wrapped = instructor.from_openai(client, mode=mode).chat.completions
    for kind in (Place, Trip):
        made, raw = wrapped.create_with_completion(response_model=kind, **fields)
        assert isinstance(made, kind) and raw.usage.completion_tokens > 0
    *_, last = wrapped.create_partial(response_model=Trip, **fields)
    assert last.places and last.places[0].city in {"Oslo", "Rome"}
