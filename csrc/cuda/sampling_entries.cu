// Log-probability reports of rows of logits: one token's log-probability and rank, and the most likely tokens, without sorting
// the vocabulary. Reference: quintet.executor.sampling.logprob_entries; a tie goes to the lower id.
//
// Runs after scan_tiles of sampling.cu at temperature 1. Ownership: a block owns a row. Bytes: the normalizer reads the tiles'
// sums only. The rank reads the tiles with logits above the token's. The n most likely tokens need a selection in little more
// than n tiles. Limiter: latency. Reduction order: a thread's tiles ascending, then the block's butterfly; all other sums are
// integer counts. So a report depends on the row only, not on the batch size.
#include "device.cuh"
#include "sampling.cuh"

namespace quintet {

constexpr int REPORT_THREADS = 512;
constexpr int MAX_TOP = 64;  // larger requests are sorted by torch

// The most likely tokens, unordered until they are sorted.
struct Found {
  int count;
  float values[MAX_TOP];
  int ids[MAX_TOP];
};

// Finds the `count` largest logits of the row; ties at the last one go to the lowest ids. num_equals: shared memory, one number
// per tile.
template <class T>
__device__ __forceinline__ void find_largest(const Row<T>& row, const float* maxima, float top, int count, Bins& bins,
                                             int* num_equals, Found& found) {
  const uint32_t first = reached_by_tiles<REPORT_THREADS, KeyGrain<T>::BITS>(bins, INFINITE_KEY, top, maxima,
                                                                            row.num_tiles, count);
  const Selected selected = select_in_row<REPORT_THREADS>(
      bins, row, maxima, first, top, [](float) { return uint64_t(1); }, [&](uint64_t) { return uint64_t(count); });
  const float last = number_of<T>(selected);

  // larger logits, in any order; and the number of ties with the last one in each tile
  if (threadIdx.x == 0) found.count = 0;
  for (int tile = int(threadIdx.x); tile < row.num_tiles; tile += REPORT_THREADS) num_equals[tile] = 0;
  __syncthreads();
  row.template sweep<REPORT_THREADS>(maxima, last, [&](int tile, const Share<T>& share) {
    const int id = Row<T>::first_of(tile);
    int equals = 0;
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
      const float x = share.get(i);
      if (id + i >= row.vocab_size) continue;
      equals += x == last;
      if (x > last) {
        const int place = atomicAdd(&found.count, 1);  // fewer than `count` logits are larger than the count-th
        found.values[place] = x;
        found.ids[place] = id + i;
      }
    }
    if (equals > 0) atomicAdd(&num_equals[tile], equals);
  });
  __syncthreads();

  // ties in previous tiles, then in previous lanes: their order is that of their ids
  const int per_thread = (row.num_tiles + REPORT_THREADS - 1) / REPORT_THREADS;
  const int begin = int(threadIdx.x) * per_thread;
  const int end = begin + per_thread < row.num_tiles ? begin + per_thread : row.num_tiles;
  int mine = 0;
  for (int tile = begin; tile < end; ++tile) mine += num_equals[tile];
  int before = int(block_cumulated<REPORT_THREADS>(uint64_t(mine)).before);
  for (int tile = begin; tile < end; ++tile) {
    const int of_tile = num_equals[tile];
    num_equals[tile] = before;
    before += of_tile;
  }
  __syncthreads();
  const int num_larger = found.count;
  row.template sweep<REPORT_THREADS>(maxima, last, [&](int tile, const Share<T>& share) {
    int place = num_larger + num_equals[tile];
    if (place >= count) return;  // uniform in the warp: all lanes have the same tile
    const int id = Row<T>::first_of(tile);
    int equals = 0;
#pragma unroll
    for (int i = 0; i < SHARE; ++i) equals += id + i < row.vocab_size && share.get(i) == last;
    place += int(warp_cumulated(uint64_t(equals))) - equals;
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
      if (id + i < row.vocab_size && share.get(i) == last) {
        if (place < count) {
          found.values[place] = share.get(i);
          found.ids[place] = id + i;
        }
        ++place;
      }
    }
  });
  __syncthreads();
}

// Dynamic shared memory: 8 bytes per tile. ids, values: [items, 1 + num_top].
template <class T>
__device__ __forceinline__ void report(unsigned char* shared, const T* logits, long long stride, int vocab_size,
                                       const int* rows, const int* own, const float* scanned_maxima, const float* sums,
                                       int num_top, int* ids, float* values, int* ranks, double* normalizers) {
  __shared__ Bins bins;
  __shared__ Found found;
  const int item = int(blockIdx.x), thread = int(threadIdx.x);
  const Row<T> row(logits, stride, rows == nullptr ? item : rows[item], vocab_size);
  float* maxima = reinterpret_cast<float*>(shared);
  int* num_equals = reinterpret_cast<int*>(maxima + row.num_tiles);
  scanned_maxima += static_cast<long long>(item) * row.num_tiles;
  sums += static_cast<long long>(item) * row.num_tiles;
  ids += static_cast<long long>(item) * (1 + num_top);
  values += static_cast<long long>(item) * (1 + num_top);
  const int token = own[item];

  const Largest top = take_maxima<REPORT_THREADS>(scanned_maxima, row.num_tiles, maxima);
  if (top.any_nan || !(top.value - top.value == 0.0f)) {  // no distribution: all values are NaN, ids are the first ones
    const float nan = __uint_as_float(0x7fc00000u);
    if (thread <= num_top) {
      ids[thread] = thread == 0 ? token : thread - 1;
      values[thread] = nan;
    }
    if (thread == 0) {
      ranks[item] = 1;
      normalizers[item] = double(nan);
    }
    return;
  }

  float sum = 0.0f;
  for (int tile = thread; tile < row.num_tiles; tile += REPORT_THREADS)
    sum += sums[tile] * weight_of(maxima[tile], top.value, LOG2_E);
  const double normalizer = double(top.value) + double(logf(block_sum<REPORT_THREADS>(sum)));

  const float x = to_float(row.logits[token]);
  int num_above = 0;
  row.template sweep<REPORT_THREADS>(maxima, x, [&](int, const Share<T>& share) {
#pragma unroll
    for (int i = 0; i < SHARE; ++i) num_above += share.get(i) > x;
  });
  const int rank = 1 + int(block_sum<REPORT_THREADS>(float(num_above)));  // exact: less than 2^24
  if (thread == 0) {
    ids[0] = token;
    values[0] = float(double(x) - normalizer);
    ranks[item] = rank;
    normalizers[item] = normalizer;
  }
  if (num_top == 0) return;

  find_largest(row, maxima, top.value, num_top, bins, num_equals, found);
  if (thread >= num_top) return;
  const float value = found.values[thread];
  const int id = found.ids[thread];
  int place = 1;
  for (int i = 0; i < num_top; ++i)
    place += found.values[i] > value || (found.values[i] == value && found.ids[i] < id);
  ids[place] = id;
  values[place] = float(double(value) - normalizer);
}

}  // namespace quintet

using namespace quintet;

#define QT_REPORT_KERNEL(T, suffix)                                                                              \
  QT_KERNEL(REPORT_THREADS, report_##suffix,                                                                     \
            (const T* logits, long long stride, int vocab_size, const int* rows, const int* own,                 \
             const float* maxima, const float* sums, int num_top, int* ids, float* values, int* ranks,           \
             double* normalizers)) {                                                                             \
    QT_DYNAMIC_SHARED(shared);                                                                                   \
    report<T>(shared, logits, stride, vocab_size, rows, own, maxima, sums, num_top, ids, values, ranks,          \
              normalizers);                                                                                      \
  }

QT_REPORT_KERNEL(bf16, bf16)
QT_REPORT_KERNEL(fp16, fp16)
QT_REPORT_KERNEL(float, fp32)
