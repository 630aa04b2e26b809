// y = the sum of all ranks' x (+ bias): of a layer with inputs divided between ranks. In one shot: every rank reads
// every rank's numbers, and adds them itself.
//
// A block owns a channel (peers.cuh), and pieces number b, b + gridDim.x, … of the numbers, which lie without gaps; a thread packs
// of 16 bytes of a piece, or single numbers where rows are no multiple of a pack. Bytes: a rank writes its numbers once into its own
// memory, and reads N - 1 times as many from others', and two of each bias; for N - 1 additions each. Limiter: for few rows the
// time in which a flag reaches another device, twice, about two microseconds; for many the links, over which N - 1 times a
// message goes instead of the 2 (N - 1) / N times that dividing the additions would need, after a second meeting.
//
// Order of the sum: as a tree of ranks, (0 + 1) + (2 + 3), in fp32, then the bias, rounded once: that of csrc/cpu/kernels/rank_sums.cpp. It
// does not depend on the size of the message, nor on the number's place in it, so not on the batch; and all ranks add the same numbers in
// the same order, so they agree on every bit.
//
// After NVIDIA's one-shot all-reduce of TensorRT-LLM, 2023, with channels that keep halves of their own: so a message of any size is one
// launch, and no block waits for another one of its device.
#include "device.cuh"
#include "peers.cuh"
#include "pointwise.cuh"

namespace quintet {
namespace {

constexpr int THREADS = 512;

// The sum of ranks [FIRST, FIRST + N) of the numbers at `at` of their parts.
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
                                           int piece) {
  static_assert((N & (N - 1)) == 0, "halves of the ranks are as many");
#pragma unroll 1
  for (long long first = (long long)blockIdx.x * piece; first < count; first += (long long)gridDim.x * piece) {
    const int numbers = int(min((long long)piece, count - first));
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

// mailboxes, counts, alarm: see `Channel`. x, y: [count], y may be x; bias: [width], or null; count is a multiple of width. piece:
// numbers of a block's exchange, whole packs, at most HALF_BYTES. Every block has one.
#define QT_ALL_REDUCE(n, variant, format, T, V)                                                                            \
  QT_KERNEL_OCCUPANCY(THREADS, 1, all_reduce_##n##variant##format,                                                                      \
            (const long long* mailboxes, int rank, unsigned* counts, unsigned* alarm, long long timeout_ns, const T* x,    \
             const T* bias, T* y, long long count, int width, int piece)) {                                                \
    all_reduce<n, T, V>(Channel<n>(mailboxes, rank, counts, alarm, timeout_ns), x, bias, y, count, width, piece);          \
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
