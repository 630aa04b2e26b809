// Gated activations: out = round(f(gate)) * up, the first half of a row being gates and the second ups.
//
// A thread owns 16 bytes of gates, the ups beside them and what comes of both (one number of each, where the halves are
// no multiple of 16 bytes); a block 256 such pieces of one token. 6 bytes an element in 16 bits, some 10 FLOPs and an
// exponential. Limiter: memory bandwidth. Nothing is reduced. f(gate) is rounded to the rows' format before it is
// multiplied, as torch does when it is a tensor of its own. No result depends on the batch size.
#include "device.cuh"
#include "pointwise.cuh"

namespace quintet {
namespace {

struct Silu {
  static __device__ __forceinline__ float of(float x) { return x / (1.0f + expf(-x)); }
};

// Hendrycks and Gimpel, "Gaussian error linear units", 2016, and its approximation there.
struct Gelu {
  static __device__ __forceinline__ float of(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678f)); }
};
struct GeluTanh {
  static __device__ __forceinline__ float of(float x) {
    return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * (x * x * x))));
  }
};

template <class F, class T, int V>
__device__ __forceinline__ void gated(const T* x, long long x_stride, T* out, int width) {
  const int at = (blockIdx.y * blockDim.x + threadIdx.x) * V;
  if (at >= width) return;
  const T* row = x + blockIdx.x * x_stride;
  Numbers<T, V> gate, up;
  gate.load(row + at);
  up.load(row + width + at);
  float y[V];
#pragma unroll
  for (int i = 0; i < V; i++) y[i] = rounded<T>(F::of(gate.get(i))) * up.get(i);
  Numbers<T, V> result;
  result.round(y);
  result.store(out + blockIdx.x * static_cast<long long>(width) + at);
}

}  // namespace
}  // namespace quintet

using namespace quintet;

#define QT_GATED(name, F, T, V)                                                  \
  QT_KERNEL(256, name, (const T* x, long long x_stride, T* out, int width)) {    \
    gated<F, T, V>(x, x_stride, out, width);                                     \
  }

// `single` for halves that are no multiple of 16 bytes.
#define QT_ACTIVATIONS(format, T)                                          \
  QT_GATED(silu_and_mul_##format, Silu, T, Pack<T>::SIZE)                  \
  QT_GATED(silu_and_mul_single_##format, Silu, T, 1)                       \
  QT_GATED(gelu_and_mul_##format, Gelu, T, Pack<T>::SIZE)                  \
  QT_GATED(gelu_and_mul_single_##format, Gelu, T, 1)                       \
  QT_GATED(gelu_tanh_and_mul_##format, GeluTanh, T, Pack<T>::SIZE)         \
  QT_GATED(gelu_tanh_and_mul_single_##format, GeluTanh, T, 1)

QT_ACTIVATIONS(bf16, bf16)
QT_ACTIVATIONS(fp16, fp16)
QT_ACTIVATIONS(fp32, float)
