"""Attention function for transformers: records each layer's parameters in a first pass, then attends over paged KV memory.

transformers looks up the attention and the mask factory by name. Each model registers its own pair, by weak references. The
factory returns a `Mask` with the mask function instead of a tensor. Each layer passes it to its attention, which derives the
layer's window. Layers are identified by the order of their calls, because modules may be shared and their indices may have gaps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from quintet.executor.models.layers.attention import AttentionLayer, AttentionWindow

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``f(batch, head, query position, key position)``: whether the query attends to the key, for index tensors of one shape."""


class UnsupportedModel(Exception):
    """The model cannot run over paged KV memory; the message is the reason."""


def window_of(function: MaskFunction, length: int, device: torch.device) -> AttentionWindow:
    """Return the window of ``function`` for sequences of up to ``length`` tokens. Raises `UnsupportedModel`.

    The last position determines the candidates; the mask must match one of them at several positions, in every key.
    """
    visible = _visible(function, length - 1, length, device)
    if bool(visible.all()):
        candidates = [AttentionWindow()]
    else:
        first = int((~visible).sum())  # first visible position of a window or a chunk
        candidates = [AttentionWindow(window=length - first), *_chunks(function, length, first, device)]
    for candidate in candidates:
        if all(_matches(function, candidate, at, length, device) for at in _sample_positions(length)):
            return candidate
    for at in _sample_positions(length):
        if bool(_visible(function, at, length, device)[at + 1 :].any()):
            raise UnsupportedModel("its attention is not causal")
    raise UnsupportedModel("its attention mask is neither causal, nor a window, nor a chunk")


def _chunks(function: MaskFunction, length: int, first: int, device: torch.device) -> list[AttentionWindow]:
    """Return the chunk size derived from the first position that does not attend to position 0."""
    positions = torch.arange(length, device=device)
    zero = torch.zeros_like(positions)
    masked = (~function(zero, zero, positions, zero)).nonzero()
    if not len(masked):
        return []
    chunk = int(masked[0])
    return [AttentionWindow(chunk=chunk)] if chunk and first % chunk == 0 else []


def _sample_positions(length: int) -> list[int]:
    return sorted(
        {0, 1, 2, length // 7, length // 3, length // 2, 2 * length // 3, length - 2, length - 1}
        & set(range(length))
    )


def _visible(function: MaskFunction, at: int, length: int, device: torch.device) -> torch.Tensor:
    keys = torch.arange(length, device=device)
    zero = torch.zeros_like(keys)
    return function(zero, zero, torch.full_like(keys, at), keys).expand(length)


def _matches(
    function: MaskFunction, candidate: AttentionWindow, at: int, length: int, device: torch.device
) -> bool:
    keys = torch.arange(length, device=device)
    expected = keys <= at
    if candidate.window is not None:
        expected &= keys > at - candidate.window
    if candidate.chunk is not None:
        expected &= keys // candidate.chunk == at // candidate.chunk
    return bool((_visible(function, at, length, device) == expected).all())


IGNORED_ARGUMENTS = {
    "position_ids",
    "use_cache",
    "output_attentions",
    "cache_position",
    "is_causal",
    "sliding_window",
}
"""Attention arguments without effect here, or redundant with the mask."""


PREFIX = "quintet-paged"

NO_INTERFACE = "its attention does not use transformers' attention interface"


@dataclass(frozen=True, slots=True)
class Mask:
    """Replacement for a mask tensor of transformers."""

    function: MaskFunction


class AttendsTokens(Protocol):
    """Current step, as seen by a model of transformers."""

    @property
    def token_ids(self) -> torch.Tensor:
        """int32 ``[num_tokens]``."""

    @property
    def positions(self) -> torch.Tensor:
        """int64 ``[num_tokens]``."""

    def attention(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """See `quintet.executor.models.forward.ForwardPass`."""


class PagedAttention:
    """Attention of all layers of one model."""

    def __init__(self, max_model_len: int) -> None:
        """max_model_len: sequence length for detecting windows."""
        self.name = f"{PREFIX}-{id(self)}"
        """Name registered with transformers."""
        self.layers: list[AttentionLayer] = []
        """Layers of a forward pass in order of their calls, recorded by the first pass. transformers applies RoPE."""
        self._max_model_len = max_model_len
        self._ops: AttendsTokens | None = None
        self._next = 0
        self._windows: list[tuple[Mask, AttentionWindow]] = []
        AttentionInterface.register(self.name, _while_alive(self.attend))
        AttentionMaskInterface.register(self.name, _while_alive(self.make_mask))

    def record(self) -> None:
        """Make the next pass record the layers' parameters; it computes no attention."""
        self.layers, self._ops, self._next, self._windows = [], None, 0, []

    def serve(self, ops: AttendsTokens) -> None:
        """Make the next pass compute a step."""
        self._ops, self._next = ops, 0

    def make_mask(self, *_: Any, mask_function: MaskFunction, **__: Any) -> Mask:
        """Return the placeholder of a mask."""
        return Mask(mask_function)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return ``[1, num_tokens, num_heads, value_dim]`` and None for the weights.

        query, key, value: ``[1, heads, num_tokens, head_dim]``, with RoPE applied. transformers defines the parameter names.
        """
        index, self._next = self._next, self._next + 1
        shape = (1, query.shape[2], query.shape[1], value.shape[3])
        if self._ops is None:
            self.layers.append(self._layer_of(module, (query, key, value), attention_mask, scaling, more))
            return query.new_zeros(shape), None
        q, k, v = (x[0].transpose(0, 1).flatten(1) for x in (query, key, value))
        return self._ops.attention(self.layers[index], q, k, v).view(shape), None

    def _layer_of(
        self,
        module: torch.nn.Module,
        qkv: Sequence[torch.Tensor],
        mask: Any,
        scaling: float | None,
        more: dict[str, Any],
    ) -> AttentionLayer:
        query, key, value = qkv
        unknown = (
            {name for name, value in more.items() if value is not None}
            - IGNORED_ARGUMENTS
            - {"softcap", "s_aux"}
        )
        if unknown:
            raise UnsupportedModel(f"its attention has unsupported arguments: {', '.join(sorted(unknown))}")
        if query.shape[2] != key.shape[2]:
            raise UnsupportedModel("it uses cross-attention or a cache of its own")
        attention_window = self._window(module, mask, more.get("sliding_window"), query.device)
        sinks = more.get("s_aux")
        return AttentionLayer(
            index=len(self.layers),
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=key.shape[3],
            value_dim=value.shape[3],
            scale=key.shape[3] ** -0.5 if scaling is None else float(scaling),
            window=attention_window.window,
            chunk=attention_window.chunk,
            softcap=more.get("softcap"),
            sinks=None if sinks is None else sinks.detach().float().contiguous(),
        )

    def _window(
        self, module: torch.nn.Module, mask: Any, window: Any, device: torch.device
    ) -> AttentionWindow:
        if mask is None:
            if not getattr(module, "is_causal", True):
                raise UnsupportedModel("its attention is not causal")
            return AttentionWindow(window=window)
        if not isinstance(mask, Mask):
            raise UnsupportedModel("it builds its own attention mask")
        for other, known in self._windows:
            if other is mask:
                return known
        mask_device = torch.device("cpu") if device.type == "meta" else device
        detected = window_of(mask.function, self._max_model_len, mask_device)
        self._windows.append((mask, detected))
        return detected


def _while_alive(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the method through a weak reference."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any, **more: Any) -> Any:
        alive = reference()
        assert alive is not None, "a layer called the attention of a model that was deleted"
        return alive(*arguments, **more)

    return call
