"""Encoding of prompts to token ids, with truncation, limits and bad words.

All functions may run in a worker thread: nothing is mutated after construction.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from quintet.tokenizer_proc.chat_template import ChatTemplates
from quintet.tokenizer_proc.infill import no_infill, open_infill
from quintet.tokenizer_proc.long_texts import (
    CHUNK_CHARS,
    cutter_of,
    most_chars_per_token,
    special_tokens_around,
)
from quintet.tokenizer_proc.template_files import load_templates
from quintet.wire.codec import unpack_i32
from quintet.wire.config import ModelConfig
from quintet.wire.embeds import EmbedsPrompt, first_not_finite
from quintet.wire.errors import ConfigError, RequestError, invalid
from quintet.wire.messages import PROMPT_TAIL, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from quintet.wire.params import SamplingParams, first_unknown
from quintet.wire.request import check_length, reserved_output_tokens


class Encoder:
    """Tokenizer, chat templates and limits of one model."""

    def __init__(self, tokenizer: Tokenizer, templates: ChatTemplates, model: ModelConfig) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.templates = templates
        self._max_model_len = model.max_model_len
        self._vocab_size = model.vocab_size
        self._infill = open_infill(tokenizer, model.vocab_size, model.eos_token_ids)
        self._most_chars = most_chars_per_token(tokenizer)
        self._cutter = cutter_of(tokenizer)

    def prompt_ids(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        clamp_max_tokens: bool = False,
        is_pooled: bool = False,
    ) -> Sequence[int]:
        """Return a request's prompt ids, truncated as requested.

        Raises `RequestError` if the prompt is empty, malformed, out of vocabulary or too long. The context must also hold
        ``max_tokens`` output tokens, one token with ``clamp_max_tokens``, or none if ``is_pooled``.
        """
        max_tokens, least = (0, 0) if is_pooled else (params.max_tokens, None)
        if isinstance(prompt, EmbedsPrompt):
            return self._placeholder_ids(prompt, None if clamp_max_tokens else max_tokens)
        field = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        num_reserved = reserved_output_tokens(max_tokens, clamp_max_tokens, self._max_model_len)
        keep = self._tokens_to_keep(params.truncate_prompt_tokens, num_reserved)
        if isinstance(prompt, TokenPrompt):
            ids = _ids_of(prompt)
            if keep is not None:
                ids = ids[max(0, len(ids) - keep) :] if params.truncation_side == "left" else ids[:keep]
        else:
            text = self.text_of(prompt)
            if isinstance(prompt, TextPrompt) and prompt.suffix:
                self._check_characters(text + prompt.suffix, field, least)
                ids = self._infill_ids(text, prompt)
            elif keep is None:
                self._check_characters(text, field, least)
                ids = self.encode_long(text, prompt.add_special_tokens, self._max_model_len)
                if len(ids) > self._max_model_len:
                    check_length(len(ids), self._max_model_len, field, least, is_least=True)
            else:
                ids = self._encode_truncated(text, prompt.add_special_tokens, keep, params.truncation_side)
        if not ids:
            raise invalid(f"{field} is empty: it has no tokens; send at least one token.", field)
        self._check_known(ids, field)
        check_length(len(ids), self._max_model_len, field, None if clamp_max_tokens else max_tokens)
        return ids

    def _placeholder_ids(self, prompt: EmbedsPrompt, max_tokens: int | None) -> Sequence[int]:
        """Return one placeholder id per prompt embedding. Raises `RequestError`."""
        wrong = first_not_finite(prompt.span)
        if wrong is not None:
            row, column = divmod(wrong, prompt.width)
            raise invalid(
                f"prompt_embeds has a number that is not finite at [{row}, {column}]; all numbers must be finite.",
                "prompt_embeds",
            )
        num_tokens = prompt.span.num_tokens
        check_length(num_tokens, self._max_model_len, "prompt_embeds", max_tokens)
        return [0] * num_tokens

    def text_of(self, prompt: TextPrompt | ChatPrompt) -> str:
        """Return the prompt's text. Chat messages are rendered by the chat template."""
        return prompt.text if isinstance(prompt, TextPrompt) else self.templates.render(prompt)

    def whole(self, prompt: TextPrompt | ChatPrompt) -> Sequence[int]:
        """Return the prompt's ids without truncation and length limits. Raises `RequestError`."""
        text = self.text_of(prompt)
        if isinstance(prompt, TextPrompt) and prompt.suffix:
            return self._infill_ids(text, prompt)
        return self.encode_long(text, prompt.add_special_tokens)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a short text."""
        # encode_batch_fast releases the GIL; encode does not.
        try:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise _not_unicode(error) from error
        ids: list[int] = encoding.ids
        return ids

    def encode_long(self, text: str, add_special_tokens: bool, most: int | None = None) -> Sequence[int]:
        """Return the ids of a text, or more than ``most`` leading ones. Long texts are encoded in chunks, to bound the memory."""
        if len(text) <= CHUNK_CHARS or self._cutter is None:
            return self.encode(text, add_special_tokens)
        before, after = special_tokens_around(self._tokenizer) if add_special_tokens else ([], [])
        try:
            return array("i", before) + self._cutter.ids_of(text, most) + array("i", after)
        except (UnicodeEncodeError, TypeError) as error:
            raise _not_unicode(error) from error

    def ends_of(self, prompt: Prompt) -> list[int]:
        """Return the extra stop tokens for a prompt, besides the model's end-of-sequence tokens."""
        is_filled = isinstance(prompt, TextPrompt) and prompt.suffix and self._infill is not None
        return self._infill.end_ids if is_filled and self._infill is not None else []

    def _infill_ids(self, text: str, prompt: TextPrompt) -> list[int]:
        if self._infill is None:
            raise no_infill()
        try:
            return self._infill.ids(text, prompt.suffix, add_special_tokens=prompt.add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise _not_unicode(error) from error

    def end_of(self, ids: Sequence[int]) -> str:
        """Return the text of a prompt's last tokens, special tokens included."""
        text: str = self._tokenizer.decode(list(ids[-PROMPT_TAIL:]), skip_special_tokens=False)
        return text

    def token_strs(self, ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's token of each id."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in ids]

    def bad_word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token sequences of each word, at the start of a text and after a space.

        As in vLLM, the second spelling is used only if it has as many tokens and a different first token. Otherwise it
        would ban the single space.
        """
        sequences: list[list[int]] = []
        for word in words:
            bare = self.encode(word.lstrip(), add_special_tokens=False)
            spaced = self.encode(" " + word.lstrip(), add_special_tokens=False)
            found = [bare] if bare else []
            if bare and len(spaced) == len(bare) and spaced[0] != bare[0]:
                found.append(spaced)
            if not found:
                raise invalid(f"bad_words has {word!r}, which has no tokens.", "bad_words")
            for ids in found:
                self._check_known(ids, "bad_words")
            sequences += found
        return sequences

    def _encode_truncated(self, text: str, add_special_tokens: bool, keep: int, side: str) -> list[int]:
        """Encode and truncate the text, but keep the special tokens around it."""
        before, after = special_tokens_around(self._tokenizer) if add_special_tokens else ([], [])
        ids = self.encode_long(text, False, None if side == "left" else keep)
        num_kept = min(len(ids), max(0, keep - len(before) - len(after)))
        kept = ids[len(ids) - num_kept :] if side == "left" else ids[:num_kept]
        return [*before, *kept, *after]

    def _tokens_to_keep(self, keep: int | None, num_reserved: int) -> int | None:
        """Return the number of prompt tokens to keep; -1 keeps all that fit with ``num_reserved`` output tokens."""
        if keep is None:
            return None
        if keep == -1:
            return max(1, self._max_model_len - num_reserved)
        if keep > self._max_model_len:
            raise invalid(
                f"truncate_prompt_tokens is {keep}; it must be at most {self._max_model_len}, the model's maximum "
                "context length, or -1 to keep as many tokens as fit.",
                "truncate_prompt_tokens",
            )
        return keep

    def _check_known(self, ids: Sequence[int], field: str) -> None:
        """Reject ids without an embedding: tokenizers may have added tokens beyond the model's vocabulary."""
        size = self._vocab_size
        wrong = first_unknown(ids, size)
        if wrong is None:
            return
        token = self._tokenizer.id_to_token(wrong) if wrong >= 0 else None
        spelling = "no token of the tokenizer" if token is None else repr(token)
        raise invalid(
            f"{field} holds the token id {wrong} ({spelling}), but the model's vocabulary has {size} tokens: ids must be "
            f"between 0 and {size - 1}. Remove the token.",
            field,
        )

    def _check_characters(self, text: str, field: str, max_tokens: int | None) -> None:
        """Reject a text that is too long for any tokenization, before seconds are spent on encoding it."""
        if self._most_chars is not None:
            num_least = -(-len(text) // self._most_chars)
            check_length(num_least, self._max_model_len, field, max_tokens, is_least=True)


def _not_unicode(error: Exception) -> RequestError:
    return invalid(f"the prompt is not valid Unicode text: {error}.")


def _ids_of(prompt: TokenPrompt) -> Sequence[int]:
    if len(prompt.token_ids) % 4:
        raise invalid("the prompt's ids are not whole 32-bit integers.", "prompt")
    return unpack_i32(prompt.token_ids)


def load_encoder(model: ModelConfig) -> Encoder:
    """Load the tokenizer and the chat templates. Raises `ConfigError` with the path of a missing or invalid file."""
    path = Path(model.tokenizer_path) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; set --tokenizer to a folder with a tokenizer.json.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: the tokenizers library cannot read it: {error}") from error
    encoder = Encoder(tokenizer, load_templates(model), model)
    encoder.encode("The first text builds the tokenizer's caches.", add_special_tokens=True)
    return encoder


def size_of(prompt: Prompt, bad_words: Sequence[str] = ()) -> int:
    """Estimate the bytes to encode; decides between inline encoding and a worker thread."""
    num_bytes = 2 * sum(map(len, bad_words))  # each word is encoded twice
    match prompt:
        case TextPrompt():
            return num_bytes + len(prompt.text) + len(prompt.suffix)
        case ChatPrompt():
            return num_bytes + len(prompt.messages) + len(prompt.tools) + len(prompt.template_kwargs)
        case TokenPrompt():
            return num_bytes + len(prompt.token_ids) // 16  # validated, not encoded
        case EmbedsPrompt():
            return num_bytes + len(prompt.values) // 16  # validated, not encoded
