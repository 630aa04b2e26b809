// Gated activations: out = round(f(gate)) * up. The first half of a row are gates, the second half ups.
//
// Ownership: a thread owns 16 bytes of gates, the corresponding ups and their results (one number of each if the halves are not
// multiples of 16 bytes). A block owns 256 such parts of one token. Bytes: 6 per element in 16-bit formats, for some 10 FLOPs
// and an exponential. Limiter: memory bandwidth. There is no reduction; results are independent of the batch size. f(gate) is
// rounded to the rows' format before the multiplication, as in torch, where it is a separate tensor.
#include "device.cuh"
#include "pointwise.cuh"

namespace quintet {
namespace {

struct Silu {
  static __device__ __forceinline__ float of(float x) { return x / (1.0f + expf(-x)); }
};

// Hendrycks and Gimpel, "Gaussian error linear units", 2016, and its approximation.
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

// `single`: for halves that are not multiples of 16 bytes.
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
