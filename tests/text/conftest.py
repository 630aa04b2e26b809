"""Fixtures of the text tests: small tokenizers of every style, a configuration, and a harness for one process."""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from quintet.deploy.supervisor.run_dirs import make_run_dir
from quintet.process.runtime import SUPERVISOR, Stopping
from quintet.process.sockets import Bus, Inbox, Peers, address_of
from quintet.wire import messages as m
from quintet.wire import supervision
from quintet.wire.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    FrontendConfig,
    ModelConfig,
    ProcessesConfig,
    SchedulerConfig,
)
from quintet.wire.ids import Role, WorkerId
from quintet.wire.kv_spec import full_layers

DEADLINE_S = 30.0
CORPUS = [
    "def main(arguments: list[str]) -> int:\n    return len(arguments)\n",
    "the quick brown fox jumps over the lazy dog, don't you think? Hello world! Hello there.",
    "naïve café, smørrebrød, 日本語のテスト, 안녕하세요, 😀😃 👩‍👩‍👧 flags 🇩🇪",
    "user system assistant hello how are you today I am fine thank you " * 4,
]


def byte_level() -> Tokenizer:
    """Trained BPE in the style of GPT-2. Some tokens are special, one has a space, one added token is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|im_start|>", "<|im_end|>", "<with space>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 8, trainer)
    tokenizer.add_tokens(["<tool_call>", "é!"])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """BPE in the style of Llama 2: byte fallback, and a leading space that decoding strips."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for character in "▁abcdefghijklmnopqrstuvwxyzH.,!?'é世":
        vocab[character] = len(vocab)
    merges = [("▁", "h"), ("▁h", "e"), ("▁", "w"), ("o", "r"), ("▁w", "or"), ("▁wor", "l"), ("▁worl", "d")]
    merges += [("l", "l"), ("▁he", "ll"), ("▁hell", "o"), ("▁", "▁"), ("▁", "a")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """Unigram with the Metaspace decoder."""
    pieces = ["▁", "▁the", "▁▁x", "a▁b", "a", "b", "he", "llo", "▁he", "世", "▁▁"]
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((piece, -2.0) for piece in pieces)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<pad>"])
    return tokenizer


def wordpiece() -> Tokenizer:
    """WordPiece: only the tokenizers library can run its decoder."""
    words = [
        "[UNK]",
        "hello",
        "##ing",
        "##s",
        ".",
        ",",
        "do",
        "n't",
        "'s",
        "[SEP]",
        "'",
        "n",
        "wor",
        "##ld",
        "?",
    ]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[SEP]"])
    return tokenizer


BUILDERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
}


@pytest.fixture(scope="session")
def tokenizers_by_style() -> dict[str, Tokenizer]:
    """One tokenizer of each style."""
    return {name: build() for name, build in BUILDERS.items()}


@pytest.fixture(scope="session", params=list(BUILDERS))
def any_tokenizer(request: pytest.FixtureRequest, tokenizers_by_style: dict[str, Tokenizer]) -> Tokenizer:
    """Tokenizer of each style, as a parameter."""
    return tokenizers_by_style[request.param]


@pytest.fixture
def model_of(tmp_path: Path) -> Callable[..., ModelConfig]:
    """Write a tokenizer to a folder and return a model with it."""

    def make(tokenizer: Tokenizer, max_model_len: int = 4096, **changes: Any) -> ModelConfig:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        fields: dict[str, Any] = {
            "path": str(tmp_path),
            "tokenizer_path": str(tmp_path),
            "served_names": ["test"],
            "architecture": "LlamaForCausalLM",
            "dtype": "float32",
            "vocab_size": tokenizer.get_vocab_size(),
            "max_model_len": max_model_len,
            "eos_token_ids": [2],
            "kv": full_layers(1, 1, 8, 4, 16),
        }
        return ModelConfig(**(fields | changes))

    return make


class ProcessHarness:
    """A supervisor, a core and a frontend that only receive, around one process under test."""

    def __init__(self, model: ModelConfig, worker: WorkerId) -> None:
        self.worker = worker
        self.config = EngineConfig(
            run_dir=str(make_run_dir()),
            model=model,
            cache=CacheConfig(memory_bytes=1 << 20),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
            executor=ExecutorConfig(),
            frontend=FrontendConfig(),
            processes=ProcessesConfig(heartbeat_s=0.05),
        )
        self.bus = Bus(self.config.run_dir)
        self.frontend_id = WorkerId(Role.FRONTEND, 0, 1)
        self.core_id = WorkerId(Role.CORE, 0, 1)
        self.supervisor = self.inbox(SUPERVISOR, supervision.Ready | supervision.Heartbeat)
        self.frontend = self.inbox(
            self.frontend_id, m.Text | m.Detokenized | m.Tokenized | m.Failed | m.Unknown
        )
        self.core = self.inbox(self.core_id, m.Admit | m.Cancel | m.InFlightReport | m.StopHit)
        self.peers = Peers(self.bus)
        self.thread: threading.Thread | None = None
        self.backlogs: dict[str, deque[Any]] = {}
        self.crash: list[BaseException] = []

    def inbox(self, worker: WorkerId, accepts: Any) -> Inbox[Any]:
        """Bind another inbox."""
        return Inbox(self.bus, address_of(self.config.run_dir, worker), accepts)

    def start(
        self, run: Callable[[WorkerId, EngineConfig, Any], None], prepare: Callable[[EngineConfig], Any]
    ) -> None:
        """Run the process in a thread, wait until it is ready, and publish the topology."""

        def body() -> None:
            try:
                run(self.worker, self.config, prepare(self.config))
            except Stopping:
                pass
            except BaseException as error:  # noqa: BLE001 - raised when the test ends
                self.crash.append(error)

        self.thread = threading.Thread(target=body)
        self.thread.start()
        self.wait_until_ready()

    def wait_until_ready(self) -> supervision.Ready:
        """Wait for `Ready`, then publish the topology."""
        ready = self.wait(self.supervisor, supervision.Ready)
        self.publish(1, self.frontend_id, self.core_id)
        return ready

    def publish(self, version: int, *workers: WorkerId) -> None:
        """Send a topology of these workers to the process."""
        self.peers.connect(self.worker, address_of(self.config.run_dir, self.worker))
        slots = [
            supervision.ProcessSlot(
                worker, address_of(self.config.run_dir, worker), 1, supervision.SlotState.READY
            )
            for worker in workers
        ]
        self.send(supervision.Topology(version, slots))

    def send(self, message: Any) -> None:
        """Send to the process under test."""
        assert self.peers.send(self.worker.role, self.worker.index, message)

    def wait(self, inbox: Inbox[Any], kind: Any, accept: Callable[[Any], bool] = lambda _: True) -> Any:
        """Return the next message of a kind and drop others before it. Fail at the deadline."""
        backlog = self.backlogs.setdefault(inbox.address, deque())
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            assert not self.crash, self.crash
            while backlog:
                message = backlog.popleft()
                if isinstance(message, kind) and accept(message):
                    return message
            backlog.extend(inbox.wait(0.1))
        raise AssertionError(f"no {kind} within {DEADLINE_S} s")

    def close(self) -> None:
        """Stop the process and close every socket. An exception of the process fails the test."""
        if self.thread is not None:
            if self.thread.is_alive():
                self.send(supervision.Stop())
            self.thread.join(DEADLINE_S)
            assert not self.thread.is_alive()
        for inbox in (self.supervisor, self.frontend, self.core):
            inbox.close()
        self.peers.close()
        self.bus.context.destroy(linger=0)
        shutil.rmtree(self.config.run_dir)
        assert not self.crash, self.crash


@pytest.fixture
def make_harness() -> Iterator[Callable[[ModelConfig, Role], ProcessHarness]]:
    """Build harnesses and close them at the end."""
    harnesses: list[ProcessHarness] = []

    def make(model: ModelConfig, role: Role) -> ProcessHarness:
        harnesses.append(ProcessHarness(model, WorkerId(role, 0, 1)))
        return harnesses[-1]

    yield make
    for harness in harnesses:
        harness.close()
