"""``prompt_embeds`` of completions: prompts as base64-encoded safetensors files.

The header is read and all sizes are checked before the rest is decoded. The tokenizer checks for non-finite numbers, in a
thread.
"""

from __future__ import annotations

import asyncio
import binascii

import msgspec

from quintet.frontend.api.openai.types import CompletionBody
from quintet.wire.config import EngineConfig, ModelConfig
from quintet.wire.embeds import FLOAT_BYTES, WIDEST_BYTES, EmbedsPrompt
from quintet.wire.errors import RequestError, invalid
from quintet.wire.params import shown
from quintet.wire.request import check_length

FIELD = "prompt_embeds"
EXAMPLE = "base64.b64encode(safetensors.torch.save({'prompt_embeds': tensor}))"
MAX_HEADER_BYTES = 1 << 14
CHUNK_CHARS = 4 << 20
"""Characters decoded at once: a few milliseconds, so that other requests run in between."""

_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""Magic bytes of torch.save files, zipped and older."""


class TensorHeader(msgspec.Struct):
    """Header entry of a tensor."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])
_tensor = msgspec.json.Decoder(TensorHeader)


async def embeds_prompts(body: CompletionBody, config: EngineConfig) -> list[EmbedsPrompt]:
    """Return the prompts given as embeddings. Raises `RequestError`."""
    given = body.prompt_embeds
    if given is None or given == []:
        return []
    if not config.frontend.prompt_embeds:
        raise invalid(
            f"{FIELD} is disabled; send `prompt`, or start the server with --enable-prompt-embeds.",
            FIELD,
        )
    rejected = ("suffix", "echo", "use_beam_search")
    for name in rejected:
        if getattr(body, name):
            raise invalid(
                f"{name} cannot be combined with {FIELD}, because it needs the prompt's text or tokens; leave one of "
                "them out.",
                name,
            )
    return [await _decoded(text, config.model) for text in ([given] if isinstance(given, str) else given)]


async def _decoded(text: str, model: ModelConfig) -> EmbedsPrompt:
    num_least = (3 * (len(text) // 4) - MAX_HEADER_BYTES - 8) // (model.embedding_width * WIDEST_BYTES)
    check_length(num_least, model.max_model_len, FIELD, is_least=True)
    head = _base64(text[: 4 * (8 // 3 + 1)])
    if head.startswith(_PICKLES):
        raise _bad("is a torch.save file, which may run code when it is loaded; only safetensors is allowed")
    header_bytes = int.from_bytes(head[:8], "little")
    if len(head) < 8 or not 2 <= header_bytes <= MAX_HEADER_BYTES:
        raise _bad("is not a safetensors file")
    begin = 8 + header_bytes
    header = _base64(text[: 4 * -(-begin // 3)])[8:begin]
    tensor = _tensor_of(header)
    _check_shape(tensor, model)
    size = FLOAT_BYTES[tensor.dtype]
    for count in tensor.shape:
        size *= count
    num_bytes = 3 * (len(text) // 4) - text[-2:].count("=")
    if tensor.data_offsets != (0, size) or num_bytes != begin + size:
        raise _bad(
            f"has {num_bytes} bytes; its header requires {begin + size}, with {size} of numbers at {list(tensor.data_offsets)}"
        )
    decoded = bytearray()
    for at in range(0, len(text), CHUNK_CHARS):
        decoded += _base64(text[at : at + CHUNK_CHARS])
        await asyncio.sleep(0)
    return EmbedsPrompt(tensor.dtype, model.embedding_width, bytes(memoryview(decoded)[begin:]))


def _tensor_of(header: bytes) -> TensorHeader:
    try:
        named = _header.decode(header)
        named.pop("__metadata__", None)
        tensors = [_tensor.decode(raw) for raw in named.values()]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(f"is not a safetensors file: invalid header ({error})") from None
    if len(tensors) != 1:
        raise _bad(f"has {len(tensors)} tensors; it must have one")
    return tensors[0]


def _check_shape(tensor: TensorHeader, model: ModelConfig) -> None:
    if tensor.dtype not in FLOAT_BYTES:
        raise _bad(f"has the dtype {shown(tensor.dtype)}; it must be one of {', '.join(FLOAT_BYTES)}")
    shape = tensor.shape[1:] if len(tensor.shape) == 3 and tensor.shape[0] == 1 else tensor.shape
    if len(shape) != 2 or shape[0] < 1 or shape[1] != model.embedding_width:
        raise _bad(
            f"has the shape {shown(tensor.shape)}; it must be [tokens, {model.embedding_width}], one embedding of the model "
            "per token"
        )
    check_length(shape[0], model.max_model_len, FIELD)


def _base64(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
    except (ValueError, UnicodeEncodeError) as error:
        raise _bad(f"is not base64 ({error})") from None


def _bad(what: str) -> RequestError:
    return invalid(f"{FIELD} {what}. Send {EXAMPLE}.", FIELD)
