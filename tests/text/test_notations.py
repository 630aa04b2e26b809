"""Notations of regular expressions and grammars of other languages and servers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.text.test_structured import accepts, grammar_of
from tokenizers import Tokenizer

from quintet.process.grammars import open_vocabulary
from quintet.tokenizer_proc.notations.gbnf import is_gbnf, plain_gbnf
from quintet.tokenizer_proc.notations.regexes import as_rust
from quintet.tokenizer_proc.structured import Forms
from quintet.wire.config import ModelConfig
from quintet.wire.errors import RequestError
from quintet.wire.structured import MAX_FORM_CHARS

Checks = Callable[[str, str], bool]


@pytest.fixture
def forms(
    model_of: Callable[..., ModelConfig], tokenizers_by_style: dict[str, Tokenizer]
) -> tuple[Forms, Checks]:
    model = model_of(tokenizers_by_style["byte_level"], eos_token_ids=[1])
    vocabulary = open_vocabulary(model)
    return Forms(model, is_mock=False), lambda grammar, text: accepts(vocabulary, grammar, text)


REGEXES: dict[str, tuple[str, list[str], list[str]]] = {
    "a bracket in a class": (r"^[^[\]]+$", ["ab"], ["a[", "a]"]),
    "characters of a password": (
        "^[A-Za-z0-9!@#$%^&*()_+\\-=[\\]{};':\"|,.<>/?`~]+$", ["aB1[]{}~", "a-b\"c"], ["é", " "],
    ),
    "characters of Rust's set operations": (r"^[a&&b~~c]+$", ["a&b~c"], ["d"]),
    "a range to the hyphen": (r"^[+--]+$", ["+,-"], [".", "*"]),
    "a range from the hyphen": (r"^[--/]+$", ["-./"], ["+", ","]),
    "nested classes": (r"^[a-z&&[^b]]+$", ["ac"], ["b", "&"]),
    "a class of POSIX": (r"^[[:digit:]_]+$", ["1_"], ["d", ":"]),
    "braces that repeat nothing": (r"^{{[a-z]+}}$", ["{{ab}}"], ["ab"]),
    "repetitions": (r"^a{2}b{1,}c{0,1}$", ["aab", "aabbc"], ["ab", "aabcc"]),
    "ends of Python": (r"\Aab\Z", ["ab"], ["abc", "xab"]),
    "escapes without need": (r"^\<[^\<\>]+\>\/\-\'$", ["<a>/-'"], ["<<>/-'"]),
    "the zero byte": (r"^[^\0]+$", ["a"], ["\0"]),
    "a property in braces": (r"^\p{Lu}\p{L}{2}$", ["Äbc"], ["abc", "Ab"]),
}  # fmt: skip
"""An expression, matching texts, and other texts."""


@pytest.mark.parametrize("name", REGEXES)
def test_expressions_of_javascript_and_python_are_enforced(name: str, forms: tuple[Forms, Checks]) -> None:
    pattern, matching, others = REGEXES[name]
    made, is_answer = forms
    grammar = grammar_of(made, regex=pattern)
    assert [text for text in matching if not is_answer(grammar, text)] == []
    assert [text for text in others if is_answer(grammar, text)] == []


def test_any_character_of_javascript_is_refused(forms: tuple[Forms, Checks]) -> None:
    with pytest.raises(RequestError, match="character class"):
        grammar_of(forms[0], regex=r"^[^]*[a]$")


def test_patterns_of_schemas_are_translated(forms: tuple[Forms, Checks]) -> None:
    pattern = r"^[^[\]]+$"
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "pattern": pattern}},
        "required": ["name"],
        "patternProperties": {"^x[[]$": {"type": "integer"}},
        "additionalProperties": False,
    }
    grammar = grammar_of(forms[0], json=schema)
    assert forms[1](grammar, '{"name":"a","x[":1}')
    assert not forms[1](grammar, '{"name":"["}')


GRAMMARS: dict[str, tuple[str, list[str], list[str]]] = {
    "alternatives on several lines": (
        'root ::= "a" # first\n  # second\n  | "b"\n  | other\nother ::=\n "c"\n "d"\n', ["a", "b", "cd"], ["c", "ab"],
    ),
    "rules with indentation": ('\n  root ::= x\r\n  x ::= "y"\r\n', ["y"], ["x"]),
    "escapes": (
        'root ::= "\\u00e9\\x41\\[\\n#" [\\]\\-\\\\^"\\u00e0-\\u00ff]+ [^\\n]', ["éA[\n#]-\\^\"ü!"], ["éA[\n#a!"],
    ),
    "escapes of surrogates": ('root ::= "\\ud83d\\ude00" [\\ud83d\\ude00-\\ud83d\\ude4f]', ["😀🙏"], ["😀a"]),
    "classes with characters of regular expressions": ('root ::= [a&&b~~c]+ [+--] [-x] [y-]', ["a&b~c,--"], ["ad,--"]),
    "repetitions of a repeated part": (
        'root ::= ([0-9]+)? "-" ([a-z]{3} ){1,2} ("+)?" "*")*', ["12-abcdef", "-abc+)?*"], ["-ab", "1"],
    ),
    "a rule named start": ('root ::= start start-0\nstart ::= "x"\nstart-0 ::= "y"', ["xy"], ["xx"]),
    "a rule named start, and no other": ('root ::= start\nstart ::= "x" | start "x"', ["xx"], [""]),
    "Lark with an inlined start": ('?start: a\n?a: "x" | b\nb: "y"', ["x", "y"], ["z"]),
    "Lark with a kept start": ('!start: "x" "::=" "y"', ["x::=y"], ["xy"]),
}  # fmt: skip
"""A grammar, its texts, and other texts."""


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars_of_other_servers_are_enforced(name: str, forms: tuple[Forms, Checks]) -> None:
    text, whole, others = GRAMMARS[name]
    made, is_answer = forms
    grammar = grammar_of(made, grammar=text)
    assert [each for each in whole if not is_answer(grammar, each)] == []
    assert [each for each in others if is_answer(grammar, each)] == []


@pytest.mark.parametrize(
    "form",
    [
        {"grammar": 'start: /a+/ "a"'},
        {"grammar": 'start: "a" " " "b"\n%ignore / +/'},
        {"grammar": 'root ::= x "a"\nx ::= "a"+'},
        {"structural_tag": {"format": {"type": "sequence", "elements": [
            {"type": "regex", "pattern": "a+"}, {"type": "const_string", "value": "a"}]}}},
    ],
    ids=str,
)  # fmt: skip
def test_an_expression_that_takes_the_text_after_it_takes_no_endless_time(
    form: dict[str, Any], forms: tuple[Forms, Checks]
) -> None:
    assert not forms[1](grammar_of(forms[0], **form), "b")


@pytest.mark.parametrize("text", ['root ::= "a\\"', "root ::= [a\\]", 'root ::= "\\ud83d"', 'root ::= "\\q'])
def test_invalid_grammars_are_refused(text: str, forms: tuple[Forms, Any]) -> None:
    with pytest.raises(RequestError, match="cannot be enforced"):
        grammar_of(forms[0], grammar=text)


@pytest.mark.parametrize(
    "part", ["[", "[[:a", "[\\]", "\\p{", "{1", "\\", '"', '"\\', "#", " \n", "a\n", "a ", "start "]
)
def test_translation_takes_linear_time(part: str) -> None:
    text = part * (MAX_FORM_CHARS // len(part))
    began_s = time.process_time()
    as_rust(text)
    assert not is_gbnf(text)
    plain_gbnf(text)
    assert time.process_time() - began_s < 2.0  # takes a tenth of this
