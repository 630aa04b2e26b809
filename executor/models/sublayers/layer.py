"""One layer of a decoder: a mixer, a feed-forward, and the norms around them.

sequential    x ── before ─ mixer ─ after ── + ─ of sum ── before ─ feed-forward ─ after ── + ─ of sum ── x
              └───────────────────────────────┘          └────────────────────────────────────┘

parallel      x ─┬─ before ─┬─ mixer ─ after ────────── + ── + ── x
                 │          └──or: before──┐             │    │
                 │                  feed-forward ─ after ────┘
                 └───────────────────────────────────────┘
"""

from __future__ import annotations

from quintet.executor.model_config.spec import LayerSpec, Norms
from quintet.executor.models.forward import ForwardPass, ValueT
from quintet.executor.models.sublayers.scope import Scope
from quintet.executor.models.sublayers.sublayer import Sublayer, feed_forward, mixer


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
