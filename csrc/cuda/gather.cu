// All-gather: y = all ranks' x side by side. Used for logits with columns divided over the ranks, and for norms over divided
// columns. If one rank has all columns, it is a broadcast: the ids of a step's tokens, from rank 0's table.
//
// Ownership: a block owns a channel (peers.cuh) and chunks b, b + gridDim.x, … of every rank's contiguous rows. A thread owns
// units of a chunk: 16 bytes, or 4 or 2 if columns are not multiples. Bytes: a rank writes its own rows once to its memory,
// reads those of all others, and writes the result; a rank without a result (null) reads nothing. Limiter: links for many rows,
// two microseconds of flags for few. There is no reduction; results are independent of the batch size.
#include "device.cuh"
#include "peers.cuh"

namespace quintet {
namespace {

constexpr int THREADS = 512;

// Writes a chunk of a rank's rows, `width` units each, to their positions in rows of `whole` units.
template <class Unit>
__device__ __forceinline__ void spread(const Unit* part, Unit* y, long long first, int units, int width, int whole) {
  y += first / width * whole;
  const int column = int(first % width);
#pragma unroll 1
  for (int at = threadIdx.x; at < units; at += THREADS) {
    const int row = (column + at) / width;
    y[(long long)row * whole + (column + at - row * width)] = part[at];
  }
}

template <int N, class Unit>
__device__ __forceinline__ void gather(Channel<N> channel, int rank, const Unit* x, Unit* y, const int* begins, int rows,
                                       int chunk) {
  const int whole = begins[N], own_width = begins[rank + 1] - begins[rank];
  int widest = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) widest = max(widest, begins[i + 1] - begins[i]);
  const long long count = (long long)rows * widest, own_count = (long long)rows * own_width;
#pragma unroll 1
  for (long long first = (long long)blockIdx.x * chunk; first < count; first += (long long)gridDim.x * chunk) {
    Unit* own = reinterpret_cast<Unit*>(channel.begin());
    const int mine = int(max(0ll, min((long long)chunk, own_count - first)));
#pragma unroll 1
    for (int at = threadIdx.x; at < mine; at += THREADS) own[at] = x[first + at];
    channel.meet();
    if (y == nullptr) continue;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int width = begins[i + 1] - begins[i];
      const int units = int(max(0ll, min((long long)chunk, (long long)rows * width - first)));
      if (units) spread(reinterpret_cast<const Unit*>(channel.part(i)), y + begins[i], first, units, width, whole);
    }
  }
  channel.end();
}

}  // namespace
}  // namespace quintet

using namespace quintet;

// mailboxes, counts, alarm: see `Channel`. x: [rows, this rank's columns]; y: [rows, all columns], or null; begins: [N + 1],
// first column of each rank, in units. chunk: units of a block's exchange, at most HALF_BYTES. Every block has at least one
// chunk.
#define QT_GATHER(n, bytes, Unit)                                                                                              \
  QT_KERNEL_OCCUPANCY(THREADS, 1, gather_##n##_##bytes,                                                                                     \
            (const long long* mailboxes, int rank, unsigned* counts, unsigned* alarm, long long timeout_ns, const Unit* x,     \
             Unit* y, const int* begins, int rows, int chunk)) {                                                               \
    gather<n, Unit>(Channel<n>(mailboxes, rank, counts, alarm, timeout_ns), rank, x, y, begins, rows, chunk);                  \
  }

#define QT_GATHERS(n)          \
  QT_GATHER(n, 16, uint4)      \
  QT_GATHER(n, 4, uint32_t)    \
  QT_GATHER(n, 2, uint16_t)

QT_GATHERS(2)
QT_GATHERS(4)
QT_GATHERS(8)
