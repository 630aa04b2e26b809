// RMS norm and layer norm over rows, each with an optional residual addition before the norm.
//
// Ownership: a block owns a row; a thread owns packs t, t + THREADS, ... of 16 bytes (of one number if rows are not multiples
// of a pack). The first two packs stay in registers; packs of longer rows are read again from L1 or L2. Bytes: a row is read
// once and written once, 4 bytes per element in 16-bit formats. With a residual, two rows are read and their sum is also
// written, 8 bytes per element. FLOPs: 4 to 8 per element. Limiter: memory bandwidth for many rows, latency for few. So all
// loads, those of the weight included, are in flight before the first wait.
//
// Reduction order: a thread adds its elements ascending, then block_sum over the threads. It depends on the width only, not on
// the batch size. The sum with the residual is rounded to the rows' format before the norm, as in torch, where it is a separate
// tensor. RMS norm rounds again before the weight, as in Llama models. With rounds_once it rounds once, as in Gemma (offset +
// weight) and OLMo 2.
#include "device.cuh"
#include "pointwise.cuh"

namespace quintet {
namespace {

constexpr int KEPT = 2;

// One thread's share of a row.
template <class T, int V, int THREADS>
struct Share {
  Numbers<T, V> kept[KEPT];
  const T* row;
  int num_packs;

  __device__ __forceinline__ void load(const T* from, int width) {
    row = from;
    num_packs = width / V;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
      const int at = threadIdx.x + k * THREADS;
      if (at < num_packs) kept[k].load(row + at * V);
    }
  }

  // Loads the rounded sum of `from` and `residual`, and writes it to `total`, which may be either.
  __device__ __forceinline__ void load_sum(const T* from, const T* residual, T* total, int width) {
    load(from, width);
    Numbers<T, V> others[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
      const int at = threadIdx.x + k * THREADS;
      if (at < num_packs) others[k].load(residual + at * V);
    }
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
      const int at = threadIdx.x + k * THREADS;
      if (at < num_packs) {
        add(kept[k], others[k]);
        kept[k].store(total + at * V);
      }
    }
    for (int at = threadIdx.x + KEPT * THREADS; at < num_packs; at += THREADS) {
      Numbers<T, V> sum, other;
      sum.load(from + at * V);
      other.load(residual + at * V);
      add(sum, other);
      sum.store(total + at * V);
    }
    row = total;  // this thread reads again only its own writes
  }

  // Calls visit(first element, numbers) for every pack of the share, ascending.
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
      const int at = threadIdx.x + k * THREADS;
      if (at < num_packs) visit(at * V, kept[k]);
    }
    for (int at = threadIdx.x + KEPT * THREADS; at < num_packs; at += THREADS) {
      Numbers<T, V> again;
      again.load(row + at * V);
      visit(at * V, again);
    }
  }

 private:
  static __device__ __forceinline__ void add(Numbers<T, V>& sum, const Numbers<T, V>& other) {
    float x[V];
#pragma unroll
    for (int i = 0; i < V; i++) x[i] = other.get(i) + sum.get(i);
    sum.round(x);
  }
};

template <class T, int V, int THREADS>
__device__ __forceinline__ void load_row(Share<T, V, THREADS>& share, const T* x, long long x_stride, const T* residual,
                                         long long residual_stride, T* sum, int width) {
  const long long row = blockIdx.x;
  if (residual == nullptr) {
    share.load(x + row * x_stride, width);
  } else {
    share.load_sum(x + row * x_stride, residual + row * residual_stride, sum + row * width, width);
  }
}

template <class T, int V>
__device__ __forceinline__ void write_rms(T* out, const Numbers<T, V>& x, const Numbers<T, V>& weight, bool has_weight,
                                          float scale, float offset, bool rounds_once) {
  float y[V];
#pragma unroll
  for (int i = 0; i < V; i++) {
    const float normed = x.get(i) * scale;
    const float factor = has_weight ? weight.get(i) : 1.0f;
    y[i] = rounds_once ? normed * (offset + factor) : rounded<T>(normed) * factor;
  }
  Numbers<T, V> numbers;
  numbers.round(y);
  numbers.store(out);
}

template <class T, int V, int THREADS>
__device__ __forceinline__ void rms_norm(const T* x, long long x_stride, const T* residual, long long residual_stride,
                                         T* sum, const T* weight, T* out, int width, float eps, float offset, bool rounds_once) {
  Share<T, V, THREADS> weights, row;
  const bool has_weight = weight != nullptr;
  if (has_weight) weights.load(weight, width);
  load_row(row, x, x_stride, residual, residual_stride, sum, width);
  float squares = 0.0f;
  row.each([&](int, const Numbers<T, V>& numbers) {
#pragma unroll
    for (int i = 0; i < V; i++) squares = fmaf(numbers.get(i), numbers.get(i), squares);
  });
  const float scale = rsqrtf(block_sum<THREADS>(squares) / float(width) + eps);

  out += blockIdx.x * static_cast<long long>(width);
#pragma unroll
  for (int k = 0; k < KEPT; k++) {
    const int at = threadIdx.x + k * THREADS;
    if (at < row.num_packs) write_rms(out + at * V, row.kept[k], weights.kept[k], has_weight, scale, offset, rounds_once);
  }
  for (int at = threadIdx.x + KEPT * THREADS; at < row.num_packs; at += THREADS) {
    Numbers<T, V> numbers, weight_numbers;
    numbers.load(row.row + at * V);
    if (has_weight) weight_numbers.load(weight + at * V);
    write_rms(out + at * V, numbers, weight_numbers, has_weight, scale, offset, rounds_once);
  }
}

template <class T, int V, int THREADS>
__device__ __forceinline__ void layer_norm(const T* x, long long x_stride, const T* residual, long long residual_stride,
                                           T* total, const T* weight, const T* bias, T* out, int width, float eps) {
  Share<T, V, THREADS> row;
  load_row(row, x, x_stride, residual, residual_stride, total, width);
  float sum = 0.0f;
  row.each([&](int, const Numbers<T, V>& numbers) {
#pragma unroll
    for (int i = 0; i < V; i++) sum += numbers.get(i);
  });
  const float mean = block_sum<THREADS>(sum) / float(width);
  // Sum of squares around the mean: the difference of two large sums would lose precision.
  float squares = 0.0f;
  row.each([&](int, const Numbers<T, V>& numbers) {
#pragma unroll
    for (int i = 0; i < V; i++) {
      const float off = numbers.get(i) - mean;
      squares = fmaf(off, off, squares);
    }
  });
  const float scale = rsqrtf(block_sum<THREADS>(squares) / float(width) + eps);

  out += blockIdx.x * static_cast<long long>(width);
  row.each([&](int first, const Numbers<T, V>& numbers) {
    Numbers<T, V> weights, biases, result;
    if (weight != nullptr) weights.load(weight + first);
    if (bias != nullptr) biases.load(bias + first);
    float y[V];
#pragma unroll
    for (int i = 0; i < V; i++) {
      const float normed = (numbers.get(i) - mean) * scale;
      const float factor = weight != nullptr ? weights.get(i) : 1.0f;
      y[i] = bias != nullptr ? fmaf(normed, factor, biases.get(i)) : normed * factor;
    }
    result.round(y);
    result.store(out + first);
  });
}

}  // namespace
}  // namespace quintet

using namespace quintet;

// Five blocks of 256 threads, or one of 1024, per multiprocessor: enough bytes in flight, and enough registers.
//
// residual: null, or the row that is added to `x` before the norm; the sum is written to `sum`. sum and out are contiguous; sum
// may be `x` or `residual`, out may be `x`. weight: null for ones.
#define QT_RMS_NORM(name, T, V, THREADS)                                                                           \
  QT_KERNEL_OCCUPANCY(THREADS, 1280 / THREADS, name,                                                              \
            (const T* x, long long x_stride, const T* residual, long long residual_stride, T* sum, const T* weight, \
             T* out, int width, float eps, float offset, int rounds_once)) {                                       \
    rms_norm<T, V, THREADS>(x, x_stride, residual, residual_stride, sum, weight, out, width, eps, offset,          \
                            rounds_once);                                                                           \
  }

// bias: null for none.
#define QT_LAYER_NORM(name, T, V, THREADS)                                                                         \
  QT_KERNEL_OCCUPANCY(THREADS, 1280 / THREADS, name,                                                              \
            (const T* x, long long x_stride, const T* residual, long long residual_stride, T* sum, const T* weight, \
             const T* bias, T* out, int width, float eps)) {                                                       \
    layer_norm<T, V, THREADS>(x, x_stride, residual, residual_stride, sum, weight, bias, out, width, eps);         \
  }

// `wide`: rows that do not fit the registers of 256 threads. `single`: rows that are not multiples of 16 bytes.
#define QT_NORMS(format, T)                                        \
  QT_RMS_NORM(rms_norm_##format, T, Pack<T>::SIZE, 256)            \
  QT_RMS_NORM(rms_norm_wide_##format, T, Pack<T>::SIZE, 1024)      \
  QT_RMS_NORM(rms_norm_single_##format, T, 1, 256)                 \
  QT_LAYER_NORM(layer_norm_##format, T, Pack<T>::SIZE, 256)        \
  QT_LAYER_NORM(layer_norm_wide_##format, T, Pack<T>::SIZE, 1024)  \
  QT_LAYER_NORM(layer_norm_single_##format, T, 1, 256)

QT_NORMS(bf16, bf16)
QT_NORMS(fp16, fp16)
QT_NORMS(fp32, float)
