"""A GGUF file served as one file, with its tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

from quintet.deploy.cli.main import main
from tests.gguf.vocabularies import VOCABULARIES
from tests.models.random_checkpoints import of_transformers
from tests.processes.server import Server, serve

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    vocabulary = json.loads(VOCABULARIES.read_text())["bpe"]
    tokens = vocabulary["tokens"]
    of_transformers("LlamaConfig", vocab_size=len(tokens), max_position_embeddings=512).make(folder)
    named = {token: index for index, token in enumerate(tokens)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [{"id": at, "content": tokens[at], **flags} for at in range(len(tokens) - 3, len(tokens))]
    model = {"type": "BPE", "vocab": named, "merges": [each.split(" ") for each in vocabulary["merges"]]}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "model": model,
        "added_tokens": special,
        "pre_tokenizer": level,
        "decoder": level,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert main(["quantize", str(folder), str(folder / "model.gguf"), "--format", "q8_0"]) == 0
    for path in folder.iterdir():
        if path.suffix != ".gguf":
            path.unlink()
    with serve(
        str(folder / "model.gguf"), "--served-model-name", "tiny", "--kv-cache-memory", "16MiB"
    ) as server:
        yield server


def test_a_chat_is_rendered_and_answered(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused")
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "don't"}], max_tokens=7, temperature=0
    )
    status, tokenized = server.post("/tokenize", {"prompt": "<|im_start|>user\ndon't<|im_end|>\n"})
    assert status == 200 and answer.usage is not None
    assert answer.usage.prompt_tokens == tokenized["count"]


@pytest.mark.whole
def test_a_stream_resumes_after_the_executor_is_killed(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused")

    def text(kills: bool) -> str:
        stream = client.completions.create(
            model="tiny",
            prompt="the quick brown",
            max_tokens=300,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        found = ""
        for number, chunk in enumerate(stream):
            found += chunk.choices[0].text if chunk.choices else ""
            if kills and number == 20:
                server.children()["quintet-executor-0"].kill()
        return found

    assert text(kills=False) == text(kills=True) != ""
