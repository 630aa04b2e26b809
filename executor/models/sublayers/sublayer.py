"""Build a layer's mixer and feed-forward from their specs.

`ParallelMixer` is attention and a Mamba 2 scan in parallel (Falcon-H1).
"""

from __future__ import annotations

from typing import Protocol

from quintet.executor.model_config.experts import ExpertsSpec
from quintet.executor.model_config.spec import (
    AttentionSpec,
    FeedForwardSpec,
    LatentSpec,
    MixerSpec,
    MlpSpec,
    ParallelMixerSpec,
)
from quintet.executor.model_config.state_specs import DeltaSpec, Mamba2Spec, MambaSpec, ShortConvSpec
from quintet.executor.models.forward import ForwardPass, ValueT
from quintet.executor.models.sublayers.attention import Attention
from quintet.executor.models.sublayers.delta import Delta
from quintet.executor.models.sublayers.experts import MixtureOfExperts
from quintet.executor.models.sublayers.feed_forward import FeedForward
from quintet.executor.models.sublayers.latent import Latent
from quintet.executor.models.sublayers.mamba import Mamba
from quintet.executor.models.sublayers.mamba2 import Mamba2, scaled
from quintet.executor.models.sublayers.scope import Scope
from quintet.executor.models.sublayers.short_conv import ShortConv


class ParallelMixer:
    """A `quintet.executor.models.sublayers.sublayer.Sublayer`."""

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


class Sublayer(Protocol):
    """A mixer or feed-forward of a layer; its output is added to the residual."""

    def __call__(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """Return ``[rows, hidden]`` for x ``[rows, hidden]``."""


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
