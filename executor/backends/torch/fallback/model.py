"""Adapter of a transformers model: hidden states of a step's tokens, then logits of some of them."""

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
    PagedAttention,
    UnsupportedModel,
)
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.layers.rope import Rope


@dataclass
class _Hidden(BaseModelOutputWithPast):
    """Replacement output of a decoder: hidden states only; other attributes are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class TransformersModel:
    """Runs the rows of a step as one sequence ``[1, num_tokens]`` with positions; only attention separates the rows."""

    ropes: Sequence[Rope] = ()
    """None: transformers applies RoPE."""

    def __init__(self, model: PreTrainedModel, attention: PagedAttention) -> None:
        """Record the layers' attention parameters with a pass of two tokens. Raises `UnsupportedModel`."""
        self._model = model
        self._decoder = decoder_of(model)
        self._attention = attention
        attention.record()
        tokens = torch.arange(2, device=model.device)
        try:
            with torch.inference_mode():
                self._run(tokens, tokens)
        except UnsupportedModel:
            raise
        except Exception as error:
            raise UnsupportedModel(_reason(error)) from error
        self.attentions: Sequence[AttentionLayer] = attention.layers
        """Layers in the order of their attention calls."""

    @property
    def num_bytes(self) -> int:
        """Size of the weights."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._model.parameters())

    @property
    def read_bytes(self) -> int:
        """Size of the weights that a pass reads: without the embedding table, unless the output layer is tied to it."""
        embeddings: torch.nn.Module = self._model.get_input_embeddings()
        logits = self._model.get_output_embeddings()
        untied = [
            tensor
            for tensor in embeddings.parameters()
            if all(tensor is not other for other in logits.parameters())
        ]
        return self.num_bytes - sum(tensor.numel() * tensor.element_size() for tensor in untied)

    def forward(self, ops: AttendsTokens) -> torch.Tensor:
        """Return the last hidden states ``[num_tokens, hidden]``."""
        self._attention.serve(ops)
        return self._run(ops.token_ids.long(), ops.positions)

    def logits(self, _: AttendsTokens, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[num_rows, vocab_size]`` of ``hidden [num_rows, hidden]``.

        Runs the whole model with its decoder replaced, so that scaling and softcap of the logits are applied. The dtype is that
        of the output layer (`quintet.executor.backends.torch.fallback.host_runner`).
        """
        output = _Hidden(last_hidden_state=hidden.unsqueeze(0))
        self._decoder.forward = lambda *_, **__: output
        try:
            ids = torch.zeros((1, len(hidden)), dtype=torch.long, device=hidden.device)
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False, return_dict=True).logits
        finally:
            del self._decoder.forward
        return logits[0]

    def whole_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of one sequence by transformers' attention, ``[num_tokens, vocab_size]``.

        Raises `UnsupportedModel` if transformers cannot compute them.
        """
        try:
            try:
                return self._whole_logits(token_ids, "eager")
            except KeyError as error:
                if "eager" not in str(error):
                    raise
            # a model without an eager implementation looks up every implementation by name
            return self._whole_logits(token_ids, "sdpa")
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise UnsupportedModel(_reason(error)) from error

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


def _reason(error: Exception) -> str:
    """Return the reason for an error in the model's code."""
    text = " ".join(str(error).split())
    if PREFIX in text:
        return NO_INTERFACE
    if "Mask" in text:
        return "its own code uses the attention mask"
    return f"a test pass failed: {type(error).__name__}: {text[:200]}"


def decoder_of(model: PreTrainedModel) -> torch.nn.Module:
    """Return the model without its output layer. Raises `UnsupportedModel`."""
    decoder = model.get_decoder()
    if decoder is model:
        decoder = getattr(model, "model", model.base_model)
    if decoder is model or not isinstance(decoder, torch.nn.Module):
        raise UnsupportedModel("it has no decoder separate from its output layer")
    return decoder
