"""Chats with a served model as token ids: prompts from templates and topics or from the model itself, and the model's answers.

A draft head is trained on its target model's own answers. Prompts and answers depend on seed and model only, since the engine's
outputs do not depend on batches. An interrupted run continues after its last saved part.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from bench.embedded.corpus import percentile
from quintet import LLM, SamplingParams

Ids = NDArray[np.int32]

HELD_OUT_PERCENT = 4
TEMPERATURE = 0.7
"""Temperature of every second answer; the others are greedy."""
PART = 512
"""Number of answers between two saves."""
PROMPT_TOKENS = 64
"""Maximum tokens of a prompt that the model writes."""

CONTEXT, BATCH_TOKENS = 256, 4096
"""Tokens of a training window, and of a batch."""


def split(text: str, separator: str) -> tuple[str, ...]:
    """Split a text at line ends and the separator."""
    return tuple(phrase.strip() for line in text.strip().splitlines() for phrase in line.split(separator))


THINGS = split("""
the water cycle, photosynthesis, gravity, black holes, the moon, volcanoes, earthquakes, the ozone layer, climate change, glaciers
antibiotics, vaccines, the immune system, sleep, memory, the human heart, vitamins, stress, meditation, regular exercise
the Roman Empire, the French Revolution, the printing press, the steam engine, the Silk Road, the Renaissance, the Cold War
inflation, interest rates, supply and demand, taxes, insurance, stock markets, cryptocurrencies, credit cards, pensions
democracy, human rights, the United Nations, constitutions, free speech, privacy, trade unions, public libraries, recycling
machine learning, neural networks, databases, operating systems, compilers, web browsers, encryption, passwords, cloud computing
search engines, version control, unit tests, load balancing, message queues, hash tables, garbage collection, virtual machines
email, social media, video games, podcasts, online courses, remote work, open source software, programming languages, robots
coffee, bread, olive oil, chocolate, cheese, green tea, honey, rice, tomatoes, spices, vegetarian food, breakfast, street food
bicycles, trains, electric cars, airplanes, bridges, lighthouses, tunnels, harbours, elevators, solar panels, wind turbines
cats, dogs, bees, whales, penguins, elephants, owls, spiders, ants, sharks, horses, butterflies, forests, deserts, coral reefs
chess, football, swimming, yoga, hiking, marathon running, dance, jazz, opera, the piano, the violin, photography, painting
poetry, novels, fairy tales, Shakespeare, science fiction, theatre, films, museums, architecture, gardens, pottery, fashion
teachers, nurses, firefighters, engineers, farmers, lawyers, librarians, journalists, small businesses, volunteers, friendship
time management, public speaking, job interviews, learning a language, saving money, teamwork, leadership, creativity, kindness
""", ",")  # fmt: skip
QUESTIONS = split("""
What is the purpose of {}?|What are {} and why do they matter?|How would you describe {} to a beginner?|Why is {} important?
Explain {} in simple terms.|Explain {} in a few paragraphs.|Explain in a few sentences what {} is good for.|Tell me about {}.
What are the advantages and disadvantages of {}?|What is the history of {}?|What is a common misconception about {}?
How has {} changed over the last hundred years?|What should everyone know about {}?|Give me three interesting facts about {}.
List five important points about {}.|Write a bulleted list of ten ideas about {}.|Give me some tips about {}.|Describe {}.
Write a short essay about {}.|Write an introduction to {} for a textbook.|Write a short blog post about {}.|Define {}.
Write a short story about {}.|Tell a story about a child discovering {}.|Write a poem about {}.|Write a dialogue about {}.
Write an email to a colleague about {}.|Write a letter to the editor about {}.|Write a product description related to {}.
What questions should I ask an expert on {}?|Write a quiz with five questions and answers about {}.|How do I learn about {}?
Compare {} with something similar.|Explain step by step how a beginner could get started with {}.|What is the future of {}?
Argue that {} deserve more attention.|Summarize what is known about {}.|Write a speech about {}.|Explain {} to a ten-year-old.
""", "|")  # fmt: skip
TASKS = split("""
reverses a string, computes a factorial, computes Fibonacci numbers, checks whether a number is prime, sorts a list of numbers
counts the words of a text, finds the largest number of a list, removes duplicates from a list, merges two dictionaries
checks whether a word is a palindrome, converts Celsius to Fahrenheit, reads a file line by line, writes a list to a CSV file
computes the average of a list, finds the greatest common divisor, validates an email address, flattens a nested list
counts the vowels of a string, rotates a list, searches a sorted list by bisection, generates a random password, parses JSON
counts the frequency of each character, computes compound interest, finds common elements of two lists
sums the digits of a number
converts a number to binary, splits a list into chunks, capitalizes each word, computes the area of a circle, downloads a web page
groups records by a key, implements a stack, implements a queue, implements a linked list, implements a binary search tree
""", ",")  # fmt: skip
LANGUAGES = ("Python", "JavaScript", "Java", "C", "Python", "SQL and Python")
CODE = (
    "Write a {language} function that {task}.",
    "Write a {language} program that {task}, and explain it.",
    "How do I write {language} code that {task}?",
    "Show me a short example in {language} that {task}. Add comments.",
    "Write unit tests for a {language} function that {task}.",
    "What is the time complexity of a function that {task}? Explain with {language} code.",
)
PEOPLE = ("Maria", "Tom", "Aisha", "Kenji", "Olga", "Samuel", "Ines", "Ravi")
SENTENCES = (
    "{name} works in a small office near the river and walks to work every morning.",
    "Last year, {name} read four books about {topic}.",
    "A meeting about {topic} takes place on Tuesday at ten o'clock.",
    "Many visitors asked questions about {topic}, and {name} answered all of them.",
    "The report about {topic} was late because two people were ill.",
    "{name} believes that {topic} will matter even more in the future.",
    "In the evening, the group discussed {topic} over dinner.",
    "The budget for {topic} was increased by ten percent.",
)
REWRITES = (
    "Summarize this text in one sentence:\n\n{text}",
    "Rewrite this text in a formal style:\n\n{text}",
    "Rewrite this text as a friendly email:\n\n{text}",
    "Make this text longer and more vivid:\n\n{text}",
    "Correct the grammar of this text and explain your changes:\n\n{text}",
    "List the key points of this text:\n\n{text}",
    "Write a title and a short summary for this text:\n\n{text}",
    "{text}\n\nWhat are the names and facts in this text? Answer as a list.",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A user's message. Topics of held-out messages from templates are in no other message from templates."""

    text: str
    is_held_out: bool


def prompts(seed: int) -> list[Prompt]:
    """Return all prompts, several thousand, in random order."""
    found = [Prompt(template.format(topic), is_held_out(topic)) for template in QUESTIONS for topic in THINGS]
    found += [
        Prompt(template.format(language=language, task=task), is_held_out(task))
        for template in CODE
        for language in LANGUAGES
        for task in TASKS
    ]
    rng = random.Random(seed)
    for template in REWRITES:
        for topic in THINGS:
            name, sentences = rng.choice(PEOPLE), rng.sample(SENTENCES, 4)
            text = " ".join(sentence.format(name=name, topic=topic) for sentence in sentences)
            found.append(Prompt(template.format(text=text), is_held_out(topic)))
    found = list(dict.fromkeys(found))
    rng.shuffle(found)
    return found


def is_held_out(topic: str) -> bool:
    """Return whether prompts with this topic are excluded from training."""
    return percentile(f"topic:{topic}") < HELD_OUT_PERCENT


@dataclass(frozen=True, slots=True)
class Chat:
    """Tokens of a prompt and its answer."""

    token_ids: Ids
    num_prompt: int
    """Tokens of the prompt."""
    is_held_out: bool
    is_greedy: bool


def answered(model: str, file: Path, count: int, own: int, max_tokens: int, seed: int) -> list[Chat]:
    """Return chats with the model. Load saved ones from ``file``, and save new ones there.

    count: of chats with prompts from templates. own: of further chats, with prompts that the model writes.
    """
    asked = prompts(seed)[:count]
    chats, total = load(file) if file.exists() else [], len(asked) + own
    if len(chats) >= total:
        return chats[:total]
    with (
        LLM(model, max_num_seqs=128, kv_cache_memory="2GB", max_model_len=2048) as llm,
        tqdm(total=total, initial=len(chats), unit="answer", mininterval=1) as bar,
    ):
        while (first := len(chats)) < total:
            new = asked[first : first + PART] or own_prompts(llm, first)[: total - first]
            assert new, f"none of {PART} prompts that the model wrote has ended"
            chats += answers(llm, new, first, max_tokens)
            save(file, chats)
            bar.update(len(new))
    return chats


def own_prompts(llm: LLM, first: int) -> list[Prompt]:
    """Return up to `PART` messages that the model writes as if it were the user (Xu et al., "Magpie", 2024).

    It continues the chat template before a user's text. ``first`` is the number of the first chat.
    """
    texts = [[{"role": "user", "content": text}] for text in ("a", "b")]
    rendered = llm.chat(texts, SamplingParams(max_tokens=1), use_tqdm=False)
    pairs = zip(*(output.prompt_token_ids for output in rendered), strict=False)
    start = [token for token, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    params = [
        SamplingParams(temperature=1.0, top_p=0.95, seed=first + number, max_tokens=PROMPT_TOKENS)
        for number in range(PART)
    ]
    written = llm.generate([{"prompt_token_ids": start}] * PART, params, use_tqdm=False)
    ended = [
        output.outputs[0].text.strip() for output in written if output.outputs[0].finish_reason == "stop"
    ]
    return [Prompt(text, is_held_out(text)) for text in dict.fromkeys(ended) if text]


def answers(llm: LLM, asked: list[Prompt], first: int, max_tokens: int) -> Iterator[Chat]:
    """Yield the chats of these prompts; ``first`` is the number of the first."""
    numbers = range(first, first + len(asked))
    outputs = llm.chat(
        [[{"role": "user", "content": prompt.text}] for prompt in asked],
        [
            SamplingParams(temperature=TEMPERATURE * (number % 2), seed=number, max_tokens=max_tokens)
            for number in numbers
        ],
        use_tqdm=False,
    )
    for number, prompt, output in zip(numbers, asked, outputs, strict=True):
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        yield Chat(np.array(ids, np.int32), len(output.prompt_token_ids), prompt.is_held_out, number % 2 == 0)


def save(file: Path, chats: list[Chat]) -> None:
    """Replace the file atomically."""
    columns: dict[str, Any] = {
        "token_ids": np.concatenate([chat.token_ids for chat in chats]),
        "ends": np.cumsum([len(chat.token_ids) for chat in chats]),
        "num_prompt": np.array([chat.num_prompt for chat in chats]),
        "is_held_out": np.array([chat.is_held_out for chat in chats]),
        "is_greedy": np.array([chat.is_greedy for chat in chats]),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".new.npz")
    np.savez(partial, **columns)
    os.replace(partial, file)


def load(file: Path) -> list[Chat]:
    """Load saved chats."""
    with np.load(file) as columns:
        texts = np.split(columns["token_ids"], columns["ends"][:-1])
        rest = (columns[name].tolist() for name in ("num_prompt", "is_held_out", "is_greedy"))
        return [Chat(*row) for row in zip(texts, *rest, strict=True)]


@dataclass(frozen=True, slots=True)
class Texts:
    """Concatenated chats with the model's hidden states; one entry per token."""

    ids: torch.Tensor
    is_answer: torch.Tensor
    """True for tokens of answers."""
    states: torch.Tensor
    """Hidden states that the head reads, joined: bfloat16 ``[tokens, layers * hidden]``."""
    last: torch.Tensor
    """Hidden states before the output layer: bfloat16 ``[tokens, hidden]``."""

    def window(self, tokens: slice | torch.Tensor) -> Texts:
        """Return a selection of the tokens."""
        return Texts(self.ids[tokens], self.is_answer[tokens], self.states[tokens], self.last[tokens])


@torch.no_grad()
def observe(model: Any, chats: list[Chat], aux_layers: tuple[int, ...]) -> Texts:
    """Compute the model's hidden states of all chats, in batches of similar lengths.

    aux_layers: the head reads hidden states after these layers; if there are none, those before the output layer.
    """
    num_tokens, hidden = sum(len(chat.token_ids) for chat in chats), model.config.hidden_size
    starts = np.cumsum([0, *(len(chat.token_ids) for chat in chats)])
    states = torch.empty(num_tokens, len(aux_layers) * hidden, dtype=torch.bfloat16)
    last = torch.empty(num_tokens, hidden, dtype=torch.bfloat16)
    by_length = sorted(range(len(chats)), key=lambda number: len(chats[number].token_ids))
    for first in tqdm(range(0, len(chats), 16), unit="batch", mininterval=1, desc="hidden states"):
        batch = by_length[first : first + 16]
        rows = [torch.from_numpy(chats[number].token_ids).long() for number in batch]
        ids = nn.utils.rnn.pad_sequence(
            rows, batch_first=True
        )  # padding at the end, so attention is causal without a mask
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = model.model(ids, output_hidden_states=True, use_cache=False)
        for row, (number, own) in enumerate(zip(batch, rows, strict=True)):
            place = slice(starts[number], starts[number] + len(own))
            for part, at in zip(states[place].split(hidden, -1), aux_layers, strict=False):
                part.copy_(found.hidden_states[at][row, : len(own)])
            last[place] = found.last_hidden_state[row, : len(own)]
    is_answer = torch.cat([torch.arange(len(chat.token_ids)) >= chat.num_prompt for chat in chats])
    ids = torch.from_numpy(np.concatenate([chat.token_ids for chat in chats])).long()
    return Texts(ids, is_answer, states if aux_layers else last, last)


def batches(texts: Texts, seed: int) -> Iterator[Texts]:
    """Yield batches ``[windows, tokens, …]`` without end. Each pass has another random offset of the windows."""
    rng = np.random.default_rng(seed)
    size = BATCH_TOKENS // CONTEXT
    while True:
        starts = np.arange(int(rng.integers(CONTEXT)), len(texts.ids) - CONTEXT, CONTEXT)
        rng.shuffle(starts)
        for chosen in starts[: len(starts) // size * size].reshape(-1, size):
            yield texts.window(torch.from_numpy(chosen)[:, None] + torch.arange(CONTEXT + 1))
