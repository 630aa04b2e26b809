"""Pending tokens of this frontend's live requests: prompts not yet prefilled, and outputs still allowed.

Admission compares their sum with --max-queued-tokens.
"""

from __future__ import annotations

from quintet.frontend.prompt_size import embeds_bytes, num_prompt_tokens
from quintet.frontend.streams import Stream
from quintet.wire.messages import Prompt
from quintet.wire.params import SamplingParams


class QueuedTokens:
    """Counter of pending tokens; O(1) per request event."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._prompts: dict[int, int] = {}
        """Prompt tokens of requests before prefill."""
        self._outputs: dict[int, tuple[int, int]] = {}
        """Expected output tokens of each live request, and its output tokens on arrival."""
        self._num_expected = 0
        """Sum of both."""
        self._num_released = 0
        """Output tokens of ended requests."""
        self._num_endings = 0
        self.num_added = 0
        """Sum of all tokens added: less those pending, the tokens that left."""
        self.embeds_bytes = 0
        """Bytes of prompt embeddings of live requests."""

    def num_pending(self, num_received: int) -> int:
        """Return the pending tokens, given the total of received output tokens."""
        return max(0, self._num_expected - (num_received - self._num_released))

    def cost(self, prompt: Prompt, params: SamplingParams) -> int:
        """Return the pending tokens that a request would add."""
        return num_prompt_tokens(prompt) + self._num_output_tokens(params)

    def _num_output_tokens(self, params: SamplingParams) -> int:
        """Return the expected output tokens: max_tokens, or else the mean output so far."""
        if params.max_tokens is not None:
            return params.n * min(params.max_tokens, self._max_model_len)
        return params.n * self._num_released // max(1, self._num_endings)

    def add(self, stream: Stream) -> None:
        """Add a request that was just submitted."""
        submit = stream.submit
        prompt = stream.num_prompt if stream.started is None else 0
        outputs = self._num_output_tokens(submit.spec.params)
        self._prompts[stream.request_id] = prompt
        self._outputs[stream.request_id] = outputs, stream.num_output_tokens
        self._num_expected += prompt + outputs
        self.embeds_bytes += embeds_bytes(submit.prompt)
        self.num_added += prompt + outputs

    def begin(self, stream: Stream) -> None:
        """Remove a request's prompt after prefill."""
        self._num_expected -= self._prompts.pop(stream.request_id, 0)

    def release(self, stream: Stream) -> None:
        """Remove a request that ended."""
        self.begin(stream)
        if self.embeds_bytes:
            self.embeds_bytes -= embeds_bytes(stream.submit.prompt)
        num_expected, num_prior = self._outputs.pop(stream.request_id)
        self._num_expected -= num_expected
        self._num_released += stream.num_output_tokens - num_prior
        self._num_endings += len(stream.choices)
