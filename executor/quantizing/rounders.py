"""What becomes of linear layers that see a text: rounded one after the other, each by the inputs that the former ones make."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import torch

from quintet.executor.quantizing.awq import AwqRounded, factors_of, in_words, narrowed
from quintet.executor.quantizing.gptq import gptq
from quintet.executor.quantizing.rounding import Rounded
from quintet.executor.quantizing.targets import Target

SMOOTHED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose tensors' names say what makes a layer's inputs, as AWQ has to know."""
_BEFORE = {
    "self_attn.q_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.down_proj": "mlp.up_proj",
}
"""By the first of layers that see the same: the norm, or the layer, that makes what they see."""
_NAME = re.compile(r"(.*\.layers\.\d+\.)([\w.]+)\.weight")


class Rounder(Protocol):
    """Rounds what it is given, and keeps what it made by the names of weights in the checkpoint."""

    def round(
        self, names: Sequence[str], weights: Sequence[torch.Tensor], hessian: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """Return the numbers of weights ``[rows, depth]`` that see the same inputs. Raises ValueError.

        hessian: the inputs' products, fp32 ``[depth, depth]``.
        """


class GptqRounder:
    """A `Rounder`."""

    def __init__(self, target: Target, scale_dtype: torch.dtype) -> None:
        self._target, self._scale_dtype = target, scale_dtype
        self.found: dict[str, Rounded] = {}

    def round(
        self, names: Sequence[str], weights: Sequence[torch.Tensor], hessian: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """See `Rounder`."""
        for name, weight in zip(names, weights, strict=True):
            self.found[name] = gptq(weight, hessian, self._target, self._scale_dtype)
        return [self.found[name].numbers for name in names]


class AwqRounder:
    """A `Rounder` of the architectures of `SMOOTHED`."""

    def __init__(self) -> None:
        self.found: dict[str, AwqRounded] = {}
        self.divided: dict[str, torch.Tensor] = {}
        """Names of norms' weights and of biases, if there are such, and what divides them, fp32 ``[depth]``."""

    def round(
        self, names: Sequence[str], weights: Sequence[torch.Tensor], hessian: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """See `Rounder`."""
        floats, squares = [each.float() for each in weights], hessian.diagonal()
        matched = _NAME.fullmatch(names[0])
        before = None if matched is None else _BEFORE.get(matched[2])
        factors = torch.ones(len(squares))
        if matched is not None and before is not None:
            factors = factors_of(floats, squares)
            maker = f"{matched[1]}{before}.weight"
            if maker in self.found:  # a layer: its outputs' scales
                scales = self.found[maker].scales
                self.found[maker].scales = (scales.float() / factors[:, None]).half()
                self.divided[f"{matched[1]}{before}.bias"] = factors
            else:
                self.divided[maker] = factors
        for name, each in zip(names, floats, strict=True):
            self.found[name] = narrowed(each * factors, squares / factors.square())
        return [self.found[name].numbers / factors for name in names]


def tensors_of(made: AwqRounded) -> dict[str, torch.Tensor]:
    """Return what a checkpoint has of a layer, by the endings of names."""
    return {
        "qweight": in_words(made.codes),
        "qzeros": in_words(made.zeros),
        "scales": made.scales.t().contiguous(),
    }
