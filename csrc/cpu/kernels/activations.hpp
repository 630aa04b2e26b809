// Activation functions on one fp32 vector, for pointwise operations and for the fused output of linear layers.
#pragma once

#include "simd.hpp"
#include "work.hpp"

namespace qt::QT_ISA {
namespace {

QT_INLINE f32v sigmoid(f32v x) { return all(1.0f) / (all(1.0f) + exponential(-x)); }

QT_INLINE f32v silu(f32v x) { return x / (all(1.0f) + exponential(-x)); }

// x (1 + tanh z) / 2 = x / (1 + e^-2z): no cancellation where tanh z is near -1.
QT_INLINE f32v gelu_tanh(f32v x) {
  const f32v z = all(0.7978845608f) * fma(all(0.044715f) * x * x, x, x);
  return x / (all(1.0f) + exponential(z * all(-2.0f)));
}

// erf by Abramowitz and Stegun 7.1.26, |error| <= 1.5e-7; the factor of x has the same bound.
QT_INLINE f32v gelu_erf(f32v x) {
  const f32v s = x * all(0.7071067812f), magnitude = max(s, -s);
  const f32v t = all(1.0f) / fma(all(0.3275911f), magnitude, all(1.0f));
  f32v p = all(1.061405429f);
  p = fma(p, t, all(-1.453152027f));
  p = fma(p, t, all(1.421413741f));
  p = fma(p, t, all(-0.284496736f));
  p = fma(p, t, all(0.254829592f));
  const f32v upper = p * t * exponential(-(s * s)) * all(0.5f);  // half the complementary error function of |s|
  return x * (x < 0.0f ? upper : all(1.0f) - upper);
}

QT_INLINE f32v relu(f32v x) { return x < 0.0f ? all(0.0f) : x; }  // NaN stays NaN

// kind: any but none.
QT_INLINE f32v activate(Activation kind, f32v x) {
  switch (kind) {
    case Activation::silu: return silu(x);
    case Activation::gelu_tanh: return gelu_tanh(x);
    case Activation::gelu: return gelu_erf(x);
    case Activation::relu2: return relu(x) * relu(x);
    case Activation::quick_gelu: return x / (all(1.0f) + exponential(x * all(-1.702f)));
    case Activation::sigmoid: return sigmoid(x);
    default: return relu(x);
  }
}

}  // namespace
}  // namespace qt::QT_ISA
