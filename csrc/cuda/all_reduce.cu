// One-shot all-reduce: y = the sum of all ranks' x (+ bias), for a layer with inputs divided over the ranks. Every rank reads
// the numbers of all ranks and adds them itself.
//
// Ownership: a block owns a channel (peers.cuh) and chunks b, b + gridDim.x, … of the contiguous numbers. A thread owns packs
// of 16 bytes of a chunk, or single numbers if rows are not multiples of a pack. Bytes: a rank writes its numbers once to its
// own memory and reads N - 1 times as many from other ranks, for N - 1 additions each. Limiter for few rows: twice the latency
// of a flag between devices, about two microseconds. Limiter for many rows: the links, with N - 1 times the message. A two-shot
// all-reduce would transfer 2 (N - 1) / N times the message, but need a second barrier.
//
// Reduction order: a tree of ranks, (0 + 1) + (2 + 3), in fp32, then the bias, rounded once, as in
// csrc/cpu/kernels/rank_sums.cpp. It depends neither on the size of the message nor on the position in it, hence not on the
// batch size. All ranks add the same numbers in the same order, so all have the same bits.
//
// After NVIDIA's one-shot all-reduce of TensorRT-LLM, 2023, with separate halves for each channel. So a message of any size is
// one launch, and no block waits for another block of its device.
#include "device.cuh"
#include "peers.cuh"
#include "pointwise.cuh"

namespace quintet {
namespace {

constexpr int THREADS = 512;

// Sum over ranks [FIRST, FIRST + N) of the numbers at `at` in their parts.
template <class T, int V, int FIRST, int N, class Parts>
__device__ __forceinline__ void add_tree(float (&sum)[V], const Parts& parts) {
  if constexpr (N == 1) {
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] = parts[FIRST].get(i);
  } else {
    float right[V];
    add_tree<T, V, FIRST, N / 2>(sum, parts);
    add_tree<T, V, FIRST + N / 2, N / 2>(right, parts);
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] += right[i];
  }
}

template <int N, class T, int V>
__device__ __forceinline__ void all_reduce(Channel<N> channel, const T* x, const T* bias, T* y, long long count, int width,
                                           int chunk) {
  static_assert((N & (N - 1)) == 0, "halves of the ranks are as many");
#pragma unroll 1
  for (long long first = (long long)blockIdx.x * chunk; first < count; first += (long long)gridDim.x * chunk) {
    const int numbers = int(min((long long)chunk, count - first));
    T* own = reinterpret_cast<T*>(channel.begin());
#pragma unroll 1
    for (int at = threadIdx.x * V; at < numbers; at += THREADS * V) {
      Numbers<T, V> mine;
      mine.load(x + first + at);
      mine.store(own + at);
    }
    channel.meet();
#pragma unroll 1
    for (int at = threadIdx.x * V; at < numbers; at += THREADS * V) {
      Numbers<T, V> parts[N];
#pragma unroll
      for (int rank = 0; rank < N; ++rank) parts[rank].load(reinterpret_cast<const T*>(channel.part(rank)) + at);
      float sum[V];
      add_tree<T, V, 0, N>(sum, parts);
      if (bias != nullptr) {
        Numbers<T, V> added;
        added.load(bias + (first + at) % width);
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i] += added.get(i);
      }
      Numbers<T, V> rounded;
      rounded.round(sum);
      rounded.store(y + first + at);
    }
  }
  channel.end();
}

}  // namespace
}  // namespace quintet

using namespace quintet;

// mailboxes, counts, alarm: see `Channel`. x, y: [count], y may be x; bias: [width], or null; count is a multiple of width.
// chunk: numbers of a block's exchange, full packs, at most HALF_BYTES. Every block has at least one chunk.
#define QT_ALL_REDUCE(n, variant, format, T, V)                                                                            \
  QT_KERNEL_OCCUPANCY(THREADS, 1, all_reduce_##n##variant##format,                                                                      \
            (const long long* mailboxes, int rank, unsigned* counts, unsigned* alarm, long long timeout_ns, const T* x,    \
             const T* bias, T* y, long long count, int width, int chunk)) {                                                \
    all_reduce<n, T, V>(Channel<n>(mailboxes, rank, counts, alarm, timeout_ns), x, bias, y, count, width, chunk);          \
  }

#define QT_ALL_REDUCES(n, format, T)                       \
  QT_ALL_REDUCE(n, _, format, T, Pack<T>::SIZE)            \
  QT_ALL_REDUCE(n, _single_, format, T, 1)

#define QT_ALL_REDUCES_OF(format, T) \
  QT_ALL_REDUCES(2, format, T)       \
  QT_ALL_REDUCES(4, format, T)       \
  QT_ALL_REDUCES(8, format, T)

QT_ALL_REDUCES_OF(bf16, bf16)
QT_ALL_REDUCES_OF(fp16, fp16)
QT_ALL_REDUCES_OF(fp32, float)
