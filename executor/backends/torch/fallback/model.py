"""A decoder of transformers as our runners see a model: hidden states of a step's tokens, then logits of some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from quintet.executor.backends.torch.fallback.attention import (
    NO_INTERFACE,
    PREFIX,
    AttendsTokens,
    AttentionCall,
    NotServed,
    PagedAttention,
)
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.layers.rope import Rope


@dataclass
class _Hidden(BaseModelOutputWithPast):
    """What a decoder would have returned: hidden states, and nothing of what some models return besides."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class TransformersModel:
    """Rows of a step go through as one sequence ``[1, num_tokens]``, with their positions: only attention tells them apart."""

    ropes: Sequence[Rope] = ()
    """Queries and keys come rotated."""

    def __init__(self, model: PreTrainedModel, attention: PagedAttention) -> None:
        """Learn what the layers want; computes with two tokens. Raises `NotServed`."""
        self._model = model
        self._decoder = decoder_of(model)
        self._attention = attention
        attention.learn()
        pair = torch.arange(2, device=model.device)
        try:
            with torch.inference_mode():
                self._run(pair, pair)
        except NotServed:
            raise
        except Exception as error:
            raise NotServed(_said(error)) from error
        self.attentions: Sequence[AttentionLayer] = ()
        """Of each call, once the model has weights."""
        if model.device.type != "meta":
            self.attentions = [call.layer(index) for index, call in enumerate(attention.calls)]

    @property
    def calls(self) -> Sequence[AttentionCall]:
        """Every attention of a pass, in order."""
        return self._attention.calls

    @property
    def num_bytes(self) -> int:
        """Size of the weights."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._model.parameters())

    @property
    def read_bytes(self) -> int:
        """Size of the weights that a pass reads whole: all but the words', unless logits are computed with them."""
        words: torch.nn.Module = self._model.get_input_embeddings()
        logits = self._model.get_output_embeddings()
        own = [
            tensor
            for tensor in words.parameters()
            if all(tensor is not other for other in logits.parameters())
        ]
        return self.num_bytes - sum(tensor.numel() * tensor.element_size() for tensor in own)

    def forward(self, ops: AttendsTokens) -> torch.Tensor:
        """Return the last hidden states ``[num_tokens, hidden]``."""
        self._attention.serve(ops, self.attentions)
        return self._run(ops.token_ids.long(), ops.positions)

    def logits(self, _: AttendsTokens, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[num_rows, vocab_size]`` of ``hidden [num_rows, hidden]``.

        The model itself computes them, its decoder standing aside: so factors, caps and whatever else is behind it are there.
        They are in the dtype that the output layer gives (`quintet.executor.backends.torch.fallback.linears`).
        """
        stand_in = _Hidden(last_hidden_state=hidden.unsqueeze(0))
        self._decoder.forward = lambda *_, **__: stand_in
        try:
            ids = torch.zeros((1, len(hidden)), dtype=torch.long, device=hidden.device)
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False, return_dict=True).logits
        finally:
            del self._decoder.forward
        return logits[0]

    def whole_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of one sequence by transformers' own attention, ``[num_tokens, vocab_size]``.

        Raises `NotServed` where transformers cannot compute them.
        """
        try:
            try:
                return self._whole_logits(token_ids, "eager")
            except KeyError as error:
                if "eager" not in str(error):
                    raise
            # whoever has no attention of its own looks all up
            return self._whole_logits(token_ids, "sdpa")
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise NotServed(_said(error)) from error

    def _whole_logits(self, token_ids: torch.Tensor, attention: str) -> torch.Tensor:
        self._model.set_attn_implementation(attention)
        try:
            logits: torch.Tensor = self._model(input_ids=token_ids.unsqueeze(0), use_cache=False).logits
        finally:
            self._model.set_attn_implementation(self._attention.name)
        return logits[0]

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self._decoder(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            attention_mask=torch.ones_like(positions).unsqueeze(0),
            use_cache=False,
            return_dict=True,
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden[0]


def _said(error: Exception) -> str:
    """Return what an error of the model's own code means."""
    text = " ".join(str(error).split())
    if PREFIX in text:
        return NO_INTERFACE
    if "Mask" in text:
        return "it computes with its attention's mask itself"
    return f"trying it failed: {type(error).__name__}: {text[:200]}"


def decoder_of(model: PreTrainedModel) -> torch.nn.Module:
    """Return the part of the model that ends before the output layer. Raises `NotServed`."""
    decoder = model.get_decoder()
    if decoder is model:
        decoder = getattr(model, "model", model.base_model)
    if decoder is model or not isinstance(decoder, torch.nn.Module):
        raise NotServed("it has no decoder apart from its output layer")
    return decoder
