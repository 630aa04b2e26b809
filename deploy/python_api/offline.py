"""``LLM``, ``AsyncLLM`` and ``LLMEngine``: Python API without HTTP.

They start the processes of ``quintet serve``; the calling program acts as the frontend. The processes stop when the program
ends, also after a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from types import TracebackType
from typing import Literal, Self, TypedDict, TypeVar, Unpack, cast, overload

import msgspec
from tqdm import tqdm

from quintet.deploy.python_api.async_llm import AsyncLLM
from quintet.deploy.python_api.beams import (
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
    beam_search,
)
from quintet.deploy.python_api.embed import EmbeddingRequestOutput, embed
from quintet.deploy.python_api.engine import WAS_SHUT_DOWN, EngineError, LocalServer, options_of_call
from quintet.deploy.python_api.gather import LOOK_S, CheckedPrompt, Gather, refused, run_loop, shut_down
from quintet.deploy.python_api.inputs import (
    ChatOptions,
    Conversation,
    LoRARequest,
    PromptInput,
    ReadPrompt,
    default_params,
    is_one_prompt,
    read_params,
    read_priority,
    read_prompt,
    read_text,
    read_token_ids,
    with_adapter,
)
from quintet.deploy.python_api.llm_engine import LLMEngine
from quintet.deploy.python_api.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from quintet.wire.codec import unpack_i32
from quintet.wire.errors import RequestError
from quintet.wire.messages import TextPrompt
from quintet.wire.params import OutputKind, SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineError",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
]

_WINDOW = 512
"""Minimum number of prompts read from an iterator ahead of the oldest unfinished one."""

ResultT = TypeVar("ResultT")
InputT = TypeVar("InputT")
Params = SamplingParams | Iterable[SamplingParams] | None
OnError = Literal["raise", "return"]


class _Options(TypedDict, total=False):
    """Keyword arguments of `LLM.generate`."""

    use_tqdm: bool
    priority: int | Iterable[int]
    lora_request: LoRARequest | str | None
    errors: OnError


class _ChatOptions(_Options, total=False):
    """Keyword arguments of `LLM.chat`."""

    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, object]] | None
    chat_template_kwargs: Mapping[str, object] | None


class LLM:
    """Engine for synchronous programs.

    ``model`` is a local folder or hub name (default: the toy model that ships with Quintet). ``flags`` are those of
    ``quintet serve``, with underscores: ``LLM("Qwen/Qwen3-0.6B", max_model_len=4096)``. Raises `ConfigError` for invalid flags,
    and `EngineError` if the processes cannot start.

    Thread-safe. Close it with `shutdown` or as a context manager; otherwise it closes at exit.
    """

    def __init__(self, model: str | None = None, **flags: object) -> None:
        # Batch mode: optimize the completion time of the batch, not inter-token latency.
        batch = {"step_target_ms": 0, "scheduling_policy": "longest"}
        self._engine = LocalServer(options_of_call(model, batch | flags, "LLM(...)"))
        self._request_ids = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=run_loop, args=(self._loop,), name="quintet-llm", daemon=True)
        self._thread.start()
        self._loop.call_soon_threadsafe(self._engine.attach, self._loop)
        self._shutdown = weakref.finalize(self, shut_down, self._engine, self._loop, self._thread)

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the model."""
        return self._engine.config.model.vocab_size

    @overload
    def generate(  # type: ignore[overload-overlap]  # a list is an iterable, and returns a list
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: Params = None,
        **options: Unpack[_Options],
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self, prompts: Iterable[PromptInput], sampling_params: Params = None, **options: Unpack[_Options]
    ) -> Iterator[RequestOutput]: ...

    def generate(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: int | Iterable[int] = 0,
        lora_request: LoRARequest | str | None = None,
        errors: OnError = "raise",
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Complete prompts: text, token ids, or ``{"prompt": …}`` / ``{"prompt_token_ids": …}``.

        One prompt or a list returns a list of outputs, in order. Any other iterable (a generator, an open file) returns an
        iterator, which reads prompts only as far ahead as the engine needs; the iterable may be endless.

        ``sampling_params`` and ``priority`` are one for all, or one per prompt. Without parameters, the model's defaults apply,
        with at most 16 tokens. ``lora_request``: an adapter of ``lora_modules``.

        A failed prompt raises `RequestError` and cancels the others; with ``errors="return"``, its
        output has ``error`` set instead.
        """
        model = self._engine.config.model

        def read(prompt: PromptInput) -> ReadPrompt:
            return with_adapter(read_prompt(prompt, model.vocab_size), lora_request, model)

        inputs = cast(Iterable[PromptInput], [prompts] if is_one_prompt(prompts) else prompts)
        return self._run(inputs, read, sampling_params, priority, use_tqdm, errors)

    @overload
    def chat(  # type: ignore[overload-overlap]
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        **options: Unpack[_ChatOptions],
    ) -> list[RequestOutput]: ...

    @overload
    def chat(
        self,
        messages: Iterable[Conversation],
        sampling_params: Params = None,
        **options: Unpack[_ChatOptions],
    ) -> Iterator[RequestOutput]: ...

    def chat(
        self,
        messages: object,
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        priority: int | Iterable[int] = 0,
        lora_request: LoRARequest | str | None = None,
        errors: OnError = "raise",
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Complete one conversation (a list of messages) or several (a list or iterator of them); see `generate`."""
        options = ChatOptions(
            chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        )
        is_one = isinstance(messages, Sequence) and (not messages or isinstance(messages[0], Mapping))
        conversations = cast(Iterable[Conversation], [messages] if is_one else messages)

        def read(conversation: Conversation) -> ReadPrompt:
            return with_adapter(options.read(conversation), lora_request, self._engine.config.model)

        return self._run(conversations, read, sampling_params, priority, use_tqdm, errors)

    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: BeamSearchParams,
        lora_request: LoRARequest | str | None = None,
    ) -> list[BeamSearchOutput]:
        """Run beam search, equivalent to ``generate(num_beams=…)`` of transformers; see `generate`."""
        return self._wait(beam_search(self._engine, self._read_all(prompts, lora_request), params))

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequest | str | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vectors of prompts (``docs/embeddings.md``), of an engine with ``runner="pooling"``; see `generate`."""
        read = self._read_all(prompts, lora_request)
        return self._wait(embed(self._engine, read, truncate_prompt_tokens, use_tqdm=use_tqdm))

    def _read_all(
        self, prompts: PromptInput | Sequence[PromptInput], lora_request: LoRARequest | str | None
    ) -> list[ReadPrompt]:
        inputs = cast(Sequence[PromptInput], [prompts] if is_one_prompt(prompts) else prompts)
        model = self._engine.config.model
        return [with_adapter(read_prompt(each, model.vocab_size), lora_request, model) for each in inputs]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        prompt = TextPrompt(read_text(text, "text"), add_special_tokens)
        answer = self._wait(self._engine.queries.tokenize(prompt))
        return list(unpack_i32(answer.token_ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        ids = read_token_ids(token_ids, self.vocab_size)
        return self._wait(self._engine.queries.detokenize(ids))

    def shutdown(self) -> None:
        """Stop the processes. Idempotent. Running calls in other threads raise `EngineError`."""
        self._shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _wait(self, coroutine: Coroutine[None, None, ResultT]) -> ResultT:
        try:
            self._engine.check()
            answer = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:  # an `EngineError`, or another thread has closed the loop
            coroutine.close()
            raise error if isinstance(error, EngineError) else EngineError(WAS_SHUT_DOWN) from None
        while not futures.wait([answer], LOOK_S).done and self._loop.is_running():
            pass
        if not answer.done() or answer.cancelled():
            coroutine.close()
            raise EngineError(WAS_SHUT_DOWN)
        return answer.result()

    def _run(
        self,
        inputs: Iterable[InputT],
        read: Callable[[InputT], ReadPrompt],
        params: Params,
        priority: int | Iterable[int],
        use_tqdm: bool,
        errors: OnError,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        self._engine.check()
        total = len(inputs) if isinstance(inputs, Sequence) else None
        if total is not None and isinstance(params, Sequence) and len(params) != total:
            raise ValueError(
                f"{len(params)} sampling_params for {total} prompts; pass one for all, or one per prompt"
            )
        clamp_max_tokens = params is None
        if params is None:
            params = default_params(self._engine.config.model.generation_defaults)
        jobs = self._jobs(inputs, read, params, priority, clamp_max_tokens)
        window = max(_WINDOW, 2 * self._engine.config.scheduler.max_num_seqs)
        gathered = Gather(self._engine, self._loop, jobs, window).outputs()
        outputs = _with_progress(gathered, total, use_tqdm)
        if errors == "raise":
            outputs = _without_errors(outputs, self._engine)
        return outputs if total is None else list(outputs)

    def _jobs(
        self,
        inputs: Iterable[InputT],
        read: Callable[[InputT], ReadPrompt],
        params: SamplingParams | Iterable[SamplingParams],
        priority: int | Iterable[int],
        clamp_max_tokens: bool,
    ) -> Iterator[CheckedPrompt | RequestOutput]:
        """Parse prompts and parameters lazily; an invalid one becomes an output with an error."""
        config = self._engine.config
        priorities = itertools.repeat(priority) if isinstance(priority, int) else iter(priority)
        each = itertools.repeat(params) if isinstance(params, SamplingParams) else iter(params)
        last_given: SamplingParams | None = None
        last_read = SamplingParams()
        for given in inputs:
            request_id = str(next(self._request_ids))
            try:
                chosen, rank = next(each), next(priorities)
            except StopIteration:
                raise ValueError("there are more prompts than sampling_params or priorities") from None
            try:
                if chosen != last_given:
                    last_given = None
                    checked = read_params(chosen).checked(
                        config.frontend.max_logprobs, config.model.vocab_size
                    )
                    last_read = msgspec.structs.replace(checked, output_kind=OutputKind.FINAL_ONLY)
                    last_given = copy.deepcopy(chosen)  # the caller may change and pass the same object again
                yield CheckedPrompt(request_id, read(given), last_read, read_priority(rank), clamp_max_tokens)
            except RequestError as error:
                yield refused(request_id, error)


def _with_progress(
    outputs: Generator[RequestOutput, None, None], total: int | None, use_tqdm: bool
) -> Generator[RequestOutput, None, None]:
    num_tokens = 0
    with contextlib.closing(outputs), tqdm(total=total, unit="prompt", disable=not use_tqdm) as bar:
        for output in outputs:
            num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
            elapsed_s = bar.format_dict["elapsed"] if use_tqdm else 0.0
            if elapsed_s > 0:
                bar.set_postfix_str(f"{num_tokens / elapsed_s:,.0f} tok/s", refresh=False)
            bar.update()
            yield output


def _without_errors(
    outputs: Generator[RequestOutput, None, None], engine: LocalServer
) -> Generator[RequestOutput, None, None]:
    """Yield outputs up to the first error, and raise it; `EngineError` if the engine has stopped or was shut down."""
    with contextlib.closing(outputs):
        for output in outputs:
            if output.error is not None:
                engine.check()
                raise output.error
            yield output
