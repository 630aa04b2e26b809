"""The fake model: its configuration, and its draws as functions of a request alone."""

from __future__ import annotations

from hashlib import blake2b

from quintet.wire import codec
from quintet.wire.config import ModelConfig
from quintet.wire.kv_spec import KvSpec
from quintet.wire.pooling import PoolingConfig, PoolingType

EOS = 2
VOCAB = 200


def draw(seed: int, tokens: list[int]) -> int:
    """Return the token after ``tokens``: a function of the seed, the position and everything before."""
    digest = blake2b(codec.pack_i32(tokens), key=(seed & (1 << 64) - 1).to_bytes(8, "little"), digest_size=4)
    return int.from_bytes(digest.digest(), "little") % VOCAB


def vector_of(prompt: list[int]) -> bytes:
    """Return the result of a pooling request."""
    return blake2b(codec.pack_i32(prompt), digest_size=16).digest()


def make_model(max_model_len: int, kv: KvSpec) -> ModelConfig:
    """Return a model configuration with numbers only."""
    return ModelConfig(
        path="",
        tokenizer_path="",
        served_names=["m"],
        architecture="",
        dtype="float32",
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        eos_token_ids=[EOS],
        kv=kv,
        pooling=PoolingConfig(kind=PoolingType.LAST, width=4),
    )


def expected(
    prompt: list[int], seed: int, max_tokens: int, stops: tuple[int, ...] = (EOS,), min_tokens: int = 0
) -> list[int]:
    """Return the outputs of a request that runs alone."""
    outputs: list[int] = []
    while len(outputs) < max_tokens:
        outputs.append(draw(seed, prompt + outputs))
        if outputs[-1] in stops and len(outputs) > min_tokens:
            break
    return outputs
