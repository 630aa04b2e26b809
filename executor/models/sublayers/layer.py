"""One layer of a decoder: a mixer, a feed-forward, and the norms around them.

sequential    x ── before ─ mixer ─ after ── + ─ of sum ── before ─ feed-forward ─ after ── + ─ of sum ── x
              └───────────────────────────────┘          └────────────────────────────────────┘

parallel      x ─┬─ before ─┬─ mixer ─ after ────────── + ── + ── x
                 │          └──or: before──┐             │    │
                 │                  feed-forward ─ after ────┘
                 └───────────────────────────────────────┘

`mixer` and `feed_forward` build the sublayers from their specs.
"""

from __future__ import annotations

from typing import Protocol

from quintet.executor.model_config.experts import ExpertsSpec
from quintet.executor.model_config.spec import (
    AttentionSpec,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    MixerSpec,
    MlpSpec,
    Norms,
    ParallelMixerSpec,
)
from quintet.executor.model_config.state_specs import DeltaSpec, Mamba2Spec, MambaSpec, ShortConvSpec
from quintet.executor.models.forward import ForwardPass, ValueT
from quintet.executor.models.sublayers.attention import Attention
from quintet.executor.models.sublayers.experts import MixtureOfExperts
from quintet.executor.models.sublayers.feed_forward import FeedForward
from quintet.executor.models.sublayers.latent import Latent
from quintet.executor.models.sublayers.scope import Scope
from quintet.executor.models.sublayers.state_mixers import Delta, Mamba, Mamba2, ShortConv, scaled


class Sublayer(Protocol):
    """A mixer or feed-forward of a layer; its output is added to the residual."""

    def __call__(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """Return ``[rows, hidden]`` for x ``[rows, hidden]``."""


class _Residual:
    """A sublayer with its norms and residual."""

    def __init__(
        self, scope: Scope, sublayer: Sublayer, norms: Norms, spec: LayerSpec, before: str, after: str
    ) -> None:
        self._sublayer = sublayer
        self._before = scope.norm(norms.before, before)
        self._after = scope.norm(norms.after, after)
        self._of_sum = scope.norm(norms.of_sum, before)
        self._multiplier = spec.residual_multiplier
        self._residual_of_norm = spec.residual_of_norm

    def read(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """Return the sublayer's input for ``x``."""
        return x if self._before is None else ops.norm(x, self._before)

    def added(self, ops: ForwardPass[ValueT], x: ValueT, read: ValueT) -> ValueT:
        """Return ``x`` plus the sublayer's output for the input ``read``."""
        made = self._sublayer(ops, read)
        if self._after is not None:
            made = ops.norm(made, self._after)
        if self._multiplier != 1.0:
            made = ops.scale(made, self._multiplier)
        whole = ops.add(read if self._residual_of_norm else x, made)
        return whole if self._of_sum is None else ops.norm(whole, self._of_sum)


class Layer:
    """A decoder layer, sequential or parallel, as in the module's diagram."""

    def __init__(self, scope: Scope, spec: LayerSpec) -> None:
        names = scope.names
        self._mixer = self._mlp = None
        if spec.mixer is not None:
            sublayer, places = mixer(scope, spec.mixer), (names.mixer_norm, names.mixer_out_norm)
            self._mixer = _Residual(scope, sublayer, spec.mixer_norms, spec, *places)
        if spec.mlp is not None:
            sublayer, places = feed_forward(scope, spec.mlp), (names.mlp_norm, names.mlp_out_norm)
            self._mlp = _Residual(scope, sublayer, spec.mlp_norms, spec, *places)
        self._parallel = spec.parallel
        self._shares_norm = spec.parallel and spec.mlp_norms.before is None

    def __call__(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """Return the next layer's input ``[rows, hidden]``."""
        if self._parallel and self._mixer is not None and self._mlp is not None:
            read = self._mixer.read(ops, x)
            mlp_input = read if self._shares_norm else self._mlp.read(ops, x)
            return self._mlp.added(ops, self._mixer.added(ops, x, read), mlp_input)
        for sublayer in (self._mixer, self._mlp):
            x = x if sublayer is None else sublayer.added(ops, x, sublayer.read(ops, x))
        return x


class ParallelMixer:
    """Attention and a Mamba 2 scan in parallel (Falcon-H1)."""

    def __init__(self, scope: Scope, spec: ParallelMixerSpec) -> None:
        self._spec = spec
        self._state = Mamba2(scope, spec.state)
        self._attention = Attention(scope, spec.attention)

    def __call__(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """See `Sublayer`."""
        state_in, state_out = self._spec.state_factors
        attention_in, attention_out = self._spec.attention_factors
        scanned = scaled(ops, self._state(ops, scaled(ops, x, state_in)), state_out)
        attended = scaled(ops, self._attention(ops, scaled(ops, x, attention_in)), attention_out)
        return ops.add(scanned, attended)


def mixer(scope: Scope, spec: MixerSpec) -> Sublayer:
    """Declare the token mixer of a spec."""
    match spec:
        case AttentionSpec():
            return Attention(scope, spec)
        case MambaSpec():
            return Mamba(scope, spec)
        case Mamba2Spec():
            return Mamba2(scope, spec)
        case ShortConvSpec():
            return ShortConv(scope, spec)
        case DeltaSpec():
            return Delta(scope, spec)
        case ParallelMixerSpec():
            return ParallelMixer(scope, spec)
        case LatentSpec():
            return Latent(scope, spec)


def feed_forward(scope: Scope, spec: FeedForwardSpec) -> Sublayer:
    """Declare the feed-forward of a spec."""
    match spec:
        case MlpSpec():
            return FeedForward(scope, spec)
        case ExpertsSpec():
            return MixtureOfExperts(scope, spec)
