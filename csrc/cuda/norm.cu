// Norms over the rows of a matrix: RMS norm and layer norm, each with or without adding to the residual stream first.
//
// A block owns a row, a thread its packs number t, t + THREADS, ... of 16 bytes (of one number, where rows are no
// multiple of a pack). The first two of them stay in registers; those of longer rows are read again, out of L1 or L2. So
// a row is read once (with the residual two are, and their sum is written) and written once: 4 bytes an element in 16 bits, 8
// with the residual, for 4 to 8 FLOPs. Limiter: memory bandwidth when there are many rows, latency when there are few;
// hence all loads, the weight's too, are under way before the first is waited for.
//
// Order of the sums: a thread adds its elements ascending, then the block adds its threads as `block_sum` says. It
// depends on the width alone, never on how many rows there are. A sum with the residual is rounded to the rows' format
// before it is normed, as torch does when it is a tensor of its own; RMS norm rounds once more before the weight, as the
// Llama family computes it, unless it rounds once, as Gemma's norm, offset + weight, and OLMo 2's.
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

  // The row is that of `from` added to that of `residual`: rounded, and written to `total`, which may be either.
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
    row = total;  // this thread reads again only what it wrote itself
  }

  // Call visit(first element, numbers) for every pack of the share, ascending.
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
  // Around the mean, as the difference of two large sums would lose what is asked for.
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

// Five blocks of 256 threads, or one of 1024, on a multiprocessor: enough bytes under way, and registers for them.
//
// residual: null, or what `x` is added to before the norm, the sum being written to `sum`. sum and out have no gaps between
// rows; sum may be `x` or `residual`, out may be `x`. weight: null for ones.
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

// `wide` for rows that 256 threads do not hold in registers, `single` for those that are no multiple of 16 bytes.
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
