"""How many tokens the live requests of this frontend still owe: what the token bound of admission counts.

A request owes its prompt until it is begun, and the outputs that it may still get. Knows nothing of rates or refusals.
"""

from __future__ import annotations

from quintet.frontend.prompt_size import embeds_bytes, num_prompt_tokens
from quintet.frontend.streams import Stream
from quintet.wire.messages import Prompt
from quintet.wire.params import SamplingParams


class QueuedTokens:
    """The ledger. Three entries in a request's life, and each is a few additions."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._prompts: dict[int, int] = {}
        """Prompt tokens of the requests that have not begun."""
        self._outputs: dict[int, tuple[int, int]] = {}
        """Outputs that each live request was expected to get when it came, and those that it came with."""
        self._num_expected = 0
        """All of these together, begun prompts left out."""
        self._num_released = 0
        """Outputs that requests got which are not live any more."""
        self._num_endings = 0
        self.num_ever = 0
        """Tokens that requests have owed so far: less those owed now, what has left."""
        self.embeds_bytes = 0
        """What prompts of live requests hold as vectors."""

    def num_owed(self, num_received: int) -> int:
        """Return the tokens owed, given how many outputs the frontend has received in all."""
        return max(0, self._num_expected - (num_received - self._num_released))

    def cost(self, prompt: Prompt, params: SamplingParams) -> int:
        """Return what a request would owe."""
        return num_prompt_tokens(prompt) + self._num_output_tokens(params)

    def _num_output_tokens(self, params: SamplingParams) -> int:
        """Return the outputs that may come: as many as allowed, or where nothing is said, the mean of all answers so far."""
        if params.max_tokens is not None:
            return params.n * min(params.max_tokens, self._max_model_len)
        return params.n * self._num_released // max(1, self._num_endings)

    def add(self, stream: Stream) -> None:
        """Count a request that was just submitted."""
        submit = stream.submit
        prompt = stream.num_prompt if stream.started is None else 0
        outputs = self._num_output_tokens(submit.spec.params)
        self._prompts[stream.request_id] = prompt
        self._outputs[stream.request_id] = outputs, stream.num_output_tokens
        self._num_expected += prompt + outputs
        self.embeds_bytes += embeds_bytes(submit.prompt)
        self.num_ever += prompt + outputs

    def begin(self, stream: Stream) -> None:
        """The prompt was computed."""
        self._num_expected -= self._prompts.pop(stream.request_id, 0)

    def release(self, stream: Stream) -> None:
        """The request has ended, with whatever it got."""
        self.begin(stream)
        if self.embeds_bytes:
            self.embeds_bytes -= embeds_bytes(stream.submit.prompt)
        num_expected, num_before = self._outputs.pop(stream.request_id)
        self._num_expected -= num_expected
        self._num_released += stream.num_output_tokens - num_before
        self._num_endings += len(stream.choices)
