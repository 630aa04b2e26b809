"""Pre-tokenizers of GGUF files, by name (``tokenizer.ggml.pre``).

Each is a list of regular expressions. They are applied in order, each to the pieces left unsplit by the previous ones, as in the
``tokenizer.json`` of the model of that name. Source of the names: llama-vocab.cpp of ggml-org/llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

_SHORT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
"""English contractions."""
_END = r"\s+(?!\S)|\s+"
_COUNTED = (
    "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s{1}"
)
"""Runs of spaces, split into powers of two."""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _END
_MARKED = r"[\p{L}\p{M}]"


def _words(
    digits: str, letter: str = r"\p{L}", contractions: str = _SHORT + "|", lines: str = r"\s*[\r\n]+"
) -> str:
    """Return the expression of Llama 3 and derived models, which differ in the number of digits per word."""
    other = r"\p{L}\p{M}" if letter == _MARKED else r"\p{L}"
    return rf"{contractions}[^\r\n\p{{L}}\p{{N}}]?{letter}+|{digits}| ?[^\s{other}\p{{N}}]+[\r\n]*|{lines}|{_END}"


def _cased(digits: str, ending: str, letters: str = "", lines: str = r"[\r\n/]*") -> str:
    """Return the expression of GPT-4o and Tekken: upper-case letters start a word; ``letters`` restricts the letters."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{lines}|\s*[\r\n]+|{_END}"


_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|"
    + _END,
)
_WITH_CASE = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ"
    "ὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-"
    "ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""Cased letters, as listed by the tokenizers of the first DeepSeek models."""
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_WITH_CASE}]+",
    r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
)
_KIMI = (r"\p{Han}+|" + _cased(r"\p{N}{1,3}", _SHORT + "?", letters="&&[^\\p{Han}]", lines=r"[\r\n]*"),)
_YOUTU = (
    r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
    _cased(r"\p{N}", _SHORT + "?"),
)
_BAILING = _words(r"\p{N}", contractions=r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|", lines=r"\s*[\r\n]")
_SEED = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{_END}"
_EXAONE_MOE = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_END}"
)
_SPACED = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One pre-tokenizer."""

    cuts: tuple[str, ...]
    whole_words: bool = False
    """True if a word that is a token is used without merges (``ignore_merges``)."""
    adds_bos: bool = False
    """True if BOS is added by default."""


_BY_NAMES = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer(
        (_words(r"\p{N}{1,3}"),), whole_words=True, adds_bos=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": PreTokenizer((_words(r"\p{N}{1,3}"),)),
    "qwen2 deepseek-r1-qwen kormo stablelm2 megrez hunyuan grok-2 solar-open f2llmv2": PreTokenizer(
        (_words(r"\p{N}"),)
    ),
    "qwen35": PreTokenizer((_words(r"\p{N}", _MARKED),)),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((_BAILING,)),
    "tekken": PreTokenizer((_cased(r"\p{N}", ""),), whole_words=True, adds_bos=True),
    "gpt-4o llama4 kanana2 minimax-m2": PreTokenizer((_cased(r"\p{N}{1,3}", _SHORT + "?"),)),
    "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling": PreTokenizer(
        (_GPT2,)
    ),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": PreTokenizer((r"\p{N}", _GPT2)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "bloom poro-chat gpt3-finnish": PreTokenizer((_SPACED,)),
    "viking": PreTokenizer((_SPACED, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm": PreTokenizer(_DEEPSEEK3),
    "deepseek-llm": PreTokenizer(_DEEPSEEK),
    "kimi-k2": PreTokenizer(_KIMI),
    "youtu": PreTokenizer(_YOUTU, whole_words=True),
    "seed-coder": PreTokenizer((_SEED,)),
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "jais-2": PreTokenizer((_words(r"\p{N}{1,3}").removesuffix(_END) + _COUNTED,)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), whole_words=True),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
}
"""Pre-tokenizers, keyed by all of their names."""

PRE_TOKENIZERS = {name: each for names, each in _BY_NAMES.items() for name in names.split()}
"""Name -> pre-tokenizer."""
