"""The attention that transformers calls: it learns what each layer wants, then computes it over paged memory.

transformers looks both up by name, the attention and whoever makes its mask; each model registers its own pair, which keeps no
model alive. No mask is made: its maker returns a `Mask` that remembers how one would be, and every layer hands it on to its
attention, which so learns the layer's window. Layers are told apart by the order of their calls: modules may be shared, and their
own numbers may have gaps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from quintet.executor.backends.torch.fallback.masks import MaskFunction, UnknownSight, sight_of
from quintet.executor.models.layers.attention import AttentionLayer, AttentionWindow

HARMLESS = {"position_ids", "use_cache", "output_attentions", "cache_position", "is_causal", "sliding_window"}
"""Arguments of an attention that change nothing here, or that its mask tells as well."""


PREFIX = "quintet-paged"

NO_INTERFACE = "its attention does not go through transformers' attention interface"


class NotServed(Exception):
    """The model cannot run over paged KV memory; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionCall:
    """What a layer asks of its attention, but for the numbers."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    sight: AttentionWindow
    softcap: float | None
    sinks: torch.Tensor | None

    def layer(self, index: int) -> AttentionLayer:
        """Return it as our passes know it; queries and keys come rotated."""
        return AttentionLayer(
            index=index,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.key_dim,
            value_dim=self.value_dim,
            scale=self.scale,
            window=self.sight.window,
            chunk=self.sight.chunk,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks.detach().float().contiguous(),
        )


@dataclass(frozen=True, slots=True)
class Mask:
    """Stands where transformers' mask would."""

    function: MaskFunction


class AttendsTokens(Protocol):
    """The step that is being computed, as far as a model of transformers needs it."""

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
    """One model's attention, for all of its layers."""

    def __init__(self, max_model_len: int) -> None:
        """max_model_len: up to where windows are looked for."""
        self.name = f"{PREFIX}-{id(self)}"
        """Under which transformers knows it."""
        self.calls: list[AttentionCall] = []
        """Those of a forward pass, in order; learnt by the first one."""
        self._max_model_len = max_model_len
        self._layers: Sequence[AttentionLayer] = ()
        self._ops: AttendsTokens | None = None
        self._next = 0
        self._sights: list[tuple[Mask, AttentionWindow]] = []
        AttentionInterface.register(self.name, _while_alive(self.attend))
        AttentionMaskInterface.register(self.name, _while_alive(self.make_mask))

    def learn(self) -> None:
        """Have the next pass be a first one: it computes nothing, and only says what its layers want."""
        self.calls, self._ops, self._next, self._sights = [], None, 0, []

    def serve(self, ops: AttendsTokens, layers: Sequence[AttentionLayer]) -> None:
        """Have the next pass compute a step. layers: of each call."""
        self._ops, self._layers, self._next = ops, layers, 0

    def make_mask(self, *_: Any, mask_function: MaskFunction, **__: Any) -> Mask:
        """Return the place holder of a mask."""
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
        """Return ``[1, num_tokens, num_heads, value_dim]`` and no weights.

        query, key, value: ``[1, heads, num_tokens, head_dim]``, rotated already. The names are transformers'.
        """
        index, self._next = self._next, self._next + 1
        shape = (1, query.shape[2], query.shape[1], value.shape[3])
        if self._ops is None:
            self.calls.append(self._learn(module, (query, key, value), attention_mask, scaling, more))
            return query.new_zeros(shape), None
        q, k, v = (x[0].transpose(0, 1).flatten(1) for x in (query, key, value))
        return self._ops.attention(self._layers[index], q, k, v).view(shape), None

    def _learn(
        self,
        module: torch.nn.Module,
        qkv: Sequence[torch.Tensor],
        mask: Any,
        scaling: float | None,
        more: dict[str, Any],
    ) -> AttentionCall:
        query, key, value = qkv
        unknown = (
            {name for name, given in more.items() if given is not None} - HARMLESS - {"softcap", "s_aux"}
        )
        if unknown:
            raise NotServed(
                f"its attention is given {', '.join(sorted(unknown))}, whose meaning is not known"
            )
        if query.shape[2] != key.shape[2]:
            raise NotServed("it attends to other tokens than its own")
        return AttentionCall(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            scale=key.shape[3] ** -0.5 if scaling is None else float(scaling),
            sight=self._sight(module, mask, more.get("sliding_window"), query.device),
            softcap=more.get("softcap"),
            sinks=more.get("s_aux"),
        )

    def _sight(
        self, module: torch.nn.Module, mask: Any, window: Any, device: torch.device
    ) -> AttentionWindow:
        if mask is None:
            if not getattr(module, "is_causal", True):
                raise NotServed("a token sees later ones")
            return AttentionWindow(window=window)
        if not isinstance(mask, Mask):
            raise NotServed("it makes a mask of its own")
        for other, known in self._sights:
            if other is mask:
                return known
        try:
            there = torch.device("cpu") if device.type == "meta" else device
            sight = sight_of(mask.function, self._max_model_len, there)
        except UnknownSight as why:
            raise NotServed(str(why)) from None
        self._sights.append((mask, sight))
        return sight


def _while_alive(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method, and keeps nobody whose method it is."""
    found = weakref.WeakMethod(method)

    def call(*given: Any, **more: Any) -> Any:
        alive = found()
        assert alive is not None, "who calls is a layer of the model that was registered"
        return alive(*given, **more)

    return call
