"""Training corpus of the embedded model: this Python's standard library, as documents in a fixed order.

Selects files, marks held-out ones, and makes chats from docstrings. The same interpreter returns the same documents.
"""

import ast
import builtins
import hashlib
import importlib
import inspect
import random
import re
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

SKIPPED_PREFIXES = (
    "site-packages/",
    "dist-packages/",
    "encodings/",
    "lib2to3/tests/data/",
    "pydoc_data/",
    "config-",
)
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
MIN_PROSE_SHARE = 0.6
HELD_OUT_PERCENT = 2
KEPT_TEST_PERCENT = 60

NATIVE_MODULES = ("builtins", "itertools", "math", "operator", "sys", "time")
"""Modules in C, with docstrings that the source files lack."""

QUESTIONS_IN_BRIEF = (
    "What does {name} do?",
    "What is {name}?",
    "Write the docstring of {name}.",
    "In one sentence, what is {name} for?",
)
QUESTIONS_IN_FULL = ("Explain {name}.", "Tell me about {name}.", "How does {name} work?")
QUESTIONS_FOR_CODE = (
    "Write a Python function for this: {purpose}",
    "Write a function named {name}. {purpose}",
    "Show me the code of {name}.",
)
GREETINGS = ("Hello!", "Hi", "Hello, who are you?", "What can you do?", "Who are you?")
INTRODUCTION = (
    "Hello! I am a very small language model, trained on the Python standard library. "
    "Ask me what a function does, or give me some code to complete."
)
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a Python expert.", "Answer briefly.")


class Kind(Enum):
    """Kind of a document; it decides the repetitions in an epoch."""

    LIBRARY = "library"
    TEST = "test"
    PROSE = "prose"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class Document:
    """One text of the corpus, without end-of-text tokens."""

    name: str
    text: str
    kind: Kind
    held_out: bool


def build_corpus(seed: int) -> list[Document]:
    """Return all documents, with held-out ones. seed: of the questions of the chats."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = list(library_sources(root))
    documents = [
        Document(name, text, Kind.TEST if is_test(name) else Kind.LIBRARY, is_held_out(name))
        for name, text in sources
    ]
    topics = language_topics(root / "pydoc_data" / "topics.py")
    documents += [
        Document(f"topic/{name}", text, Kind.PROSE, is_held_out(name)) for name, text in topics.items()
    ]
    documents += chats(sources, topics, random.Random(seed))
    return documents


def library_sources(root: Path) -> Iterator[tuple[str, str]]:
    """Yield relative path and text of each distinct file with enough prose, in path order."""
    seen: set[bytes] = set()
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in root.rglob("*.py")):
        if name.startswith(SKIPPED_PREFIXES) or (
            is_test(name) and percentile(f"test:{name}") >= KEPT_TEST_PERCENT
        ):
            continue
        try:
            with tokenize.open(path) as file:
                text = file.read().strip()
        except (SyntaxError, UnicodeDecodeError):  # the test suite keeps broken files on purpose
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if len(text) < 100 or digest in seen or prose_share(text) < MIN_PROSE_SHARE:
            continue
        seen.add(digest)
        yield name, text + "\n"


def is_test(name: str) -> bool:
    """Return whether a path belongs to the library's test suite. It is larger than the library; a share of it is taken."""
    return not TEST_FOLDERS.isdisjoint(name.split("/")[:-1])


def percentile(name: str) -> int:
    """Return a hash of a name in 0..99, equal on all machines."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100


def is_held_out(name: str) -> bool:
    """Return whether a document is excluded from training of model and tokenizer."""
    return percentile(name) < HELD_OUT_PERCENT


def prose_share(text: str) -> float:
    """Return the share of lower-case letters and spaces. Tables of constants have few."""
    return len(re.findall(r"[a-z \n]", text)) / len(text)


def language_topics(path: Path) -> dict[str, str]:
    """Return the pages of ``help()`` about the language by title; empty if they are not installed."""
    if not path.exists():
        return {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    literals = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    topics: dict[str, str] = ast.literal_eval(literals[0])
    return {name: inspect.cleandoc(text).strip() + "\n" for name, text in sorted(topics.items())}


def chats(sources: list[tuple[str, str]], topics: dict[str, str], rng: random.Random) -> list[Document]:
    """Return chats of one to three turns about docstrings, short functions and language topics."""
    documents: list[Document] = []
    answers: set[str] = set()
    groups = [(name, exchanges_of_source(name, text, rng)) for name, text in sources if not is_test(name)]
    groups += [
        (f"{name}.py", exchanges_of_native_module(importlib.import_module(name), rng))
        for name in NATIVE_MODULES
    ]
    groups += [(f"topic/{name}", exchanges_of_topic(text, rng)) for name, text in topics.items()]
    groups += [
        (f"greeting/{index}", [(greeting, INTRODUCTION)]) for index, greeting in enumerate(GREETINGS * 8)
    ]
    for name, exchanges in groups:
        source = name.removeprefix("topic/")
        fresh = [
            exchange for exchange in exchanges if exchange[1] not in answers or exchange[1] is INTRODUCTION
        ]
        answers.update(answer for _, answer in fresh)
        while fresh:
            num_turns = rng.choice((1, 1, 1, 2, 3))
            turns, fresh = fresh[:num_turns], fresh[num_turns:]
            system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.15 else None
            documents.append(
                Document(
                    f"chat/{name}/{len(documents)}",
                    render_chat(turns, system),
                    Kind.CHAT,
                    is_held_out(source),
                )
            )
    return documents


def render_chat(turns: list[tuple[str, str]], system: str | None) -> str:
    """Render exchanges like the embedded model's chat template."""
    messages = [("system", system)] if system is not None else []
    for question, answer in turns:
        messages += [("user", question), ("assistant", answer)]
    return "".join(f"{IM_START}{role}\n{content}{IM_END}\n" for role, content in messages)


def exchanges_of_source(name: str, text: str, rng: random.Random) -> list[tuple[str, str]]:
    """Return exchanges about each public definition of a file, and requests for the code of its short functions."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    lines = text.split("\n")
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    exchanges = question_and_answer(f"the {module} module", ast.get_docstring(tree), rng)
    for qualified_name, node in definitions(tree, module):
        docstring = ast.get_docstring(node)
        exchanges += question_and_answer(qualified_name, docstring, rng)
        if isinstance(node, ast.FunctionDef):
            exchanges += request_for_code(node, docstring, lines, rng)
    return exchanges


def definitions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Yield the public functions and classes of a tree with their dotted names, in source order."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            qualified_name = f"{prefix}.{node.name}"
            yield qualified_name, node
            if isinstance(node, ast.ClassDef):
                yield from definitions(node, qualified_name)


def exchanges_of_native_module(module: ModuleType, rng: random.Random) -> list[tuple[str, str]]:
    """Return exchanges about each public name of a module without Python source."""
    exchanges = question_and_answer(f"the {module.__name__} module", module.__doc__, rng)
    prefix = "" if module is builtins else f"{module.__name__}."
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or not callable(value):
            continue
        exchanges += question_and_answer(prefix + name, value.__doc__, rng)
        if isinstance(value, type):
            for attribute, member in sorted(vars(value).items()):
                if not attribute.startswith("_") and callable(member):
                    exchanges += question_and_answer(f"{prefix}{name}.{attribute}", member.__doc__, rng)
    return exchanges


def exchanges_of_topic(text: str, rng: random.Random) -> list[tuple[str, str]]:
    """Return an exchange about one page of the language reference."""
    title, _, body = text.partition("\n")
    return question_and_answer(title.strip().strip('"').lower(), body.lstrip("*=-~\n "), rng)


def question_and_answer(name: str, docstring: str | None, rng: random.Random) -> list[tuple[str, str]]:
    """Return one exchange about a name, or none if its docstring does not begin with prose."""
    paragraphs = prose_paragraphs(docstring)
    if not paragraphs:
        return []
    in_full = rng.random() < 0.4
    question = rng.choice(QUESTIONS_IN_FULL if in_full else QUESTIONS_IN_BRIEF).format(name=name)
    answer = paragraphs[0]
    for paragraph in paragraphs[1:4] if in_full else []:
        if len(answer) + len(paragraph) > 600:
            break
        answer += "\n\n" + paragraph
    return [(question, answer)]


def prose_paragraphs(docstring: str | None) -> list[str]:
    """Return the unwrapped paragraphs of a docstring up to the first that is not prose."""
    paragraphs: list[str] = []
    for block in inspect.cleandoc(docstring or "").split("\n\n"):
        is_signature = re.match(r"[\w.]+\(.*\)( *->.*)?$", block.strip()) is not None
        if is_signature and not paragraphs:
            continue
        is_prose = re.search(r"^\s|>>>|^[-*=|+]|\t|  ", block, re.MULTILINE) is None and block.isascii()
        paragraph = " ".join(block.split())
        if is_signature or not is_prose or not 20 <= len(paragraph) <= 600 or " " not in paragraph:
            break
        paragraphs.append(paragraph)
    return paragraphs


def request_for_code(
    node: ast.FunctionDef, docstring: str | None, lines: list[str], rng: random.Random
) -> list[tuple[str, str]]:
    """Return one request for a short function with a docstring, answered by its source; none for other functions."""
    paragraphs = prose_paragraphs(docstring)
    definition = lines[node.lineno - 1 : node.end_lineno]
    if not paragraphs or node.col_offset or not 4 <= len(definition) <= 25:
        return []
    source = "\n".join(definition)
    question = rng.choice(QUESTIONS_FOR_CODE).format(name=node.name, purpose=paragraphs[0])
    return [(question, f"```python\n{source}\n```")]
