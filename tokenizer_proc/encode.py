"""Prompts to ids: encoding, truncation, limits, bad words.

Every function here may run in a lane's thread: nothing is mutated after construction. Knows no sockets.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE

from quintet.tokenizer_proc.chat_template import ChatTemplates, load_templates
from quintet.tokenizer_proc.infill import no_infill, open_infill
from quintet.tokenizer_proc.text_pieces import PIECE_CHARS, cutter_of
from quintet.wire.codec import unpack_i32
from quintet.wire.config import ModelConfig
from quintet.wire.embeds import EmbedsPrompt, first_not_finite
from quintet.wire.errors import ConfigError, ErrorCode, RequestError
from quintet.wire.messages import PROMPT_TAIL, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from quintet.wire.params import SamplingParams, first_unknown
from quintet.wire.request import room_for_output

LENGTH_KEEPING = frozenset({"NFD", "NFKD", "Prepend", "Lowercase", "ByteLevel"})
"""Normalizers that never make a text shorter."""

COMPOSING = frozenset({"NFC", "NFKC"})
"""Normalizers that make at most `MOST_COMPOSED` characters one."""

MOST_COMPOSED = 4


class Encoder:
    """The tokenizer, the chat templates and the limits of one model."""

    def __init__(self, tokenizer: Tokenizer, templates: ChatTemplates, model: ModelConfig) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._templates = templates
        self._max_model_len = model.max_model_len
        self._vocab_size = model.vocab_size
        self._infill = open_infill(tokenizer, model.vocab_size, model.eos_token_ids)
        self._max_characters = _most_characters(tokenizer, model.max_model_len)
        self._cutter = cutter_of(tokenizer)

    @property
    def template_names(self) -> list[str]:
        """Names of the model's chat templates."""
        return self._templates.names

    def prompt_ids(
        self, prompt: Prompt, params: SamplingParams, *, limit_gives_way: bool = False
    ) -> Sequence[int]:
        """Return a request's prompt as ids, truncated as asked.

        Raises `RequestError` when it is empty, malformed, out of vocabulary or leaves no room for the output: for all of
        ``max_tokens``, or for one token if that ``limit_gives_way``.
        """
        if isinstance(prompt, EmbedsPrompt):
            return self._ids_in_place_of(prompt, None if limit_gives_way else params.max_tokens)
        field = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        room = room_for_output(params.max_tokens, limit_gives_way, self._max_model_len)
        keep = self._tokens_to_keep(params.truncate_prompt_tokens, room)
        if isinstance(prompt, TokenPrompt):
            ids = _ids_of(prompt)
            if keep is not None:
                ids = ids[max(0, len(ids) - keep) :] if params.truncation_side == "left" else ids[:keep]
        else:
            text = self.text_of(prompt)
            if isinstance(prompt, TextPrompt) and prompt.suffix:
                self._refuse_hopeless(text + prompt.suffix, field)
                ids = self._filled(text, prompt)
            elif keep is None:
                self._refuse_hopeless(text, field)
                ids = self.encode_long(text, prompt.add_special_tokens)
            else:
                ids = self._encode_truncated(text, prompt.add_special_tokens, keep, params.truncation_side)
        if not ids:
            raise RequestError(
                ErrorCode.INVALID, f"{field} is empty: it has no tokens; send at least one token.", field
            )
        self._check_known(ids, field)
        self._check_length(len(ids), None if limit_gives_way else params.max_tokens, field)
        return ids

    def _ids_in_place_of(self, prompt: EmbedsPrompt, max_tokens: int | None) -> Sequence[int]:
        """Return as many ids as a prompt has vectors, which say nothing. Raises `RequestError`."""
        wrong = first_not_finite(prompt)
        if wrong is not None:
            row, column = divmod(wrong, prompt.width)
            raise RequestError(
                ErrorCode.INVALID,
                f"prompt_embeds holds a number that is infinite or none, the first one at [{row}, {column}]; all must be finite.",
                "prompt_embeds",
            )
        self._check_length(prompt.num_tokens, max_tokens, "prompt_embeds")
        return [0] * prompt.num_tokens

    def text_of(self, prompt: TextPrompt | ChatPrompt) -> str:
        """Return the prompt's text, a conversation rendered by its template."""
        return prompt.text if isinstance(prompt, TextPrompt) else self._templates.render(prompt)

    def whole(self, prompt: TextPrompt | ChatPrompt) -> Sequence[int]:
        """Return all ids of a prompt. Raises `RequestError`."""
        text = self.text_of(prompt)
        if isinstance(prompt, TextPrompt) and prompt.suffix:
            return self._filled(text, prompt)
        return self.encode_long(text, prompt.add_special_tokens)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a short text."""
        ids: list[int] = self._encoding(text, add_special_tokens).ids
        return ids

    def encode_long(self, text: str, add_special_tokens: bool) -> Sequence[int]:
        """Return the ids of a text of any length. One in pieces takes the memory of a piece, and 4 bytes for each id."""
        if len(text) <= PIECE_CHARS or self._cutter is None:
            return self.encode(text, add_special_tokens)
        before, behind = self._special_around() if add_special_tokens else ([], [])
        try:
            return array("i", before) + self._cutter.ids_of(text) + array("i", behind)
        except (UnicodeEncodeError, TypeError) as error:
            raise _not_unicode(error) from error

    def _special_around(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that are put before a text and behind it."""
        bare, whole = (self._encoding("a", with_special).ids for with_special in (False, True))
        begin = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
        return whole[:begin], whole[begin + len(bare) :]

    def ends_of(self, prompt: Prompt) -> list[int]:
        """Return the tokens that end the output behind a prompt, besides those that end any."""
        is_filled = isinstance(prompt, TextPrompt) and prompt.suffix and self._infill is not None
        return self._infill.end_ids if is_filled and self._infill is not None else []

    def _filled(self, text: str, prompt: TextPrompt) -> list[int]:
        if self._infill is None:
            raise no_infill()
        try:
            return self._infill.ids(text, prompt.suffix, add_special_tokens=prompt.add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise _not_unicode(error) from error

    def end_of(self, ids: Sequence[int]) -> str:
        """Return the text of a prompt's last tokens, special ones too."""
        text: str = self._tokenizer.decode(list(ids[-PROMPT_TAIL:]), skip_special_tokens=False)
        return text

    def token_strs(self, ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's own spelling of each id."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in ids]

    def bad_word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token sequences that would write each word, at the start of a text and after a space.

        The second spelling counts only where it is as long as the first and begins differently, as in vLLM: otherwise
        it would ban the bare space.
        """
        sequences: list[list[int]] = []
        for word in words:
            bare = self.encode(word.lstrip(), add_special_tokens=False)
            spaced = self.encode(" " + word.lstrip(), add_special_tokens=False)
            found = [bare] if bare else []
            if bare and len(spaced) == len(bare) and spaced[0] != bare[0]:
                found.append(spaced)
            if not found:
                raise RequestError(
                    ErrorCode.INVALID, f"bad_words has {word!r}, which has no tokens.", "bad_words"
                )
            for ids in found:
                self._check_known(ids, "bad_words")
            sequences += found
        return sequences

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        # The batch call releases the interpreter lock while it works, the single one does not.
        try:
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except (UnicodeEncodeError, TypeError) as error:
            raise _not_unicode(error) from error

    def _encode_truncated(self, text: str, add_special_tokens: bool, keep: int, side: str) -> list[int]:
        """Encode and shorten the text proper, so that the special tokens around it stay."""
        before, behind = self._special_around() if add_special_tokens else ([], [])
        ids = self.encode_long(text, False)
        num_kept = min(len(ids), max(0, keep - len(before) - len(behind)))
        kept = ids[len(ids) - num_kept :] if side == "left" else ids[:num_kept]
        return [*before, *kept, *behind]

    def _tokens_to_keep(self, keep: int | None, room: int) -> int | None:
        """Return how much of a prompt to keep; ``room`` is left for the output where everything that fits is."""
        if keep is None:
            return None
        if keep == -1:
            return max(1, self._max_model_len - room)
        if keep > self._max_model_len:
            raise RequestError(
                ErrorCode.INVALID,
                f"truncate_prompt_tokens is {keep}; it must be at most {self._max_model_len}, the model's maximum "
                "context length, or -1 for what fits.",
                "truncate_prompt_tokens",
            )
        return keep

    def _check_known(self, ids: Sequence[int], field: str) -> None:
        """Refuse ids that the model has no embedding for: tokenizers may have added tokens beyond its vocabulary."""
        size = self._vocab_size
        wrong = first_unknown(ids, size)
        if wrong is None:
            return
        token = self._tokenizer.id_to_token(wrong) if wrong >= 0 else None
        spelling = "no token of the tokenizer" if token is None else repr(token)
        raise RequestError(
            ErrorCode.INVALID,
            f"{field} holds the token id {wrong} ({spelling}), and the model's vocabulary has {size} tokens: ids must be "
            f"between 0 and {size - 1}. Leave the token out.",
            field,
        )

    def _refuse_hopeless(self, text: str, field: str) -> None:
        """Refuse a text that is too long however it is split, before spending seconds on encoding it."""
        if self._max_characters is not None and len(text) > self._max_characters:
            raise RequestError(
                ErrorCode.TOO_LONG,
                f"This model's maximum context length is {self._max_model_len} tokens. However, your {field} has "
                f"{len(text)} characters, which cannot be fewer tokens than that. Please reduce the length of the "
                f"{field}.",
                field,
            )

    def _check_length(self, num_prompt: int, max_tokens: int | None, field: str) -> None:
        limit = self._max_model_len
        if max_tokens is not None and num_prompt + max_tokens > limit:
            raise RequestError(
                ErrorCode.TOO_LONG,
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{num_prompt + max_tokens} tokens ({num_prompt} in the {field}, {max_tokens} in the completion). "
                f"Please reduce the length of the {field} or completion.",
                field if num_prompt >= limit else "max_tokens",
            )
        if num_prompt >= limit:
            raise RequestError(
                ErrorCode.TOO_LONG,
                f"This model's maximum context length is {limit} tokens. However, your {field} resulted in "
                f"{num_prompt} tokens. Please reduce the length of the {field}.",
                field,
            )


def _not_unicode(error: Exception) -> RequestError:
    return RequestError(ErrorCode.INVALID, f"the prompt is not valid Unicode text: {error}.")


def _ids_of(prompt: TokenPrompt) -> Sequence[int]:
    if len(prompt.token_ids) % 4:
        raise RequestError(ErrorCode.INVALID, "the prompt's ids are not whole 32-bit integers.", "prompt")
    return unpack_i32(prompt.token_ids)


def _most_characters(tokenizer: Tokenizer, max_tokens: int) -> int | None:
    """Return an upper bound on the characters of ``max_tokens`` tokens, or None when there is none.

    There is none when a normalizer drops characters, or when characters outside the vocabulary are dropped or share
    one unknown token.
    """
    model, splitter, normalizer = tokenizer.model, tokenizer.pre_tokenizer, tokenizer.normalizer
    every_byte = isinstance(model, BPE) and (
        model.byte_fallback or (splitter is not None and b'"ByteLevel"' in splitter.__getstate__())
    )
    shrink = 1 if normalizer is None else _most_shrunk(msgspec.json.decode(normalizer.__getstate__()))
    if not every_byte or shrink is None:
        return None
    longest = max((len(token) for token in tokenizer.get_vocab(with_added_tokens=True)), default=0)
    return max_tokens * max(1, longest) * shrink


def _most_shrunk(normalizer: dict[str, object]) -> int | None:
    """Return how many characters a normalizer may turn into one; None when there is no limit."""
    match normalizer:
        case {"type": "Sequence", "normalizers": list(inner)}:
            shrinks = [_most_shrunk(child) for child in inner]
            known = [shrink for shrink in shrinks if shrink is not None]
            return max(known, default=1) if len(known) == len(shrinks) else None
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return 1 if len(new) >= len(old) else None
        case {"type": str(kind)} if kind in COMPOSING:
            return MOST_COMPOSED
        case {"type": str(kind)} if kind in LENGTH_KEEPING:
            return 1
        case _:
            return None


def load_encoder(model: ModelConfig) -> Encoder:
    """Read the tokenizer's folder. Raises `ConfigError` naming the file that is missing or unreadable."""
    path = Path(model.tokenizer_path) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give a folder with a tokenizer.json as --tokenizer.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path} is not a tokenizer the tokenizers library can read: {error}") from error
    encoder = Encoder(tokenizer, load_templates(model), model)
    encoder.encode("The first text builds the tokenizer's caches.", add_special_tokens=True)
    return encoder


def size_of(prompt: Prompt, bad_words: Sequence[str] = ()) -> int:
    """Return roughly how many bytes must be encoded: what decides between inline and a lane."""
    return _size_of_prompt(prompt) + 2 * sum(map(len, bad_words))  # each in two spellings


def _size_of_prompt(prompt: Prompt) -> int:
    match prompt:
        case TextPrompt():
            return len(prompt.text) + len(prompt.suffix)
        case ChatPrompt():
            return len(prompt.messages) + len(prompt.tools) + len(prompt.template_kwargs)
        case TokenPrompt():
            return len(prompt.token_ids) // 16  # only checked
        case EmbedsPrompt():
            return len(prompt.values) // 16  # likewise
