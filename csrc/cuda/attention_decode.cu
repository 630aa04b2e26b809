// Decode attention over the paged cache: rows with at most 16 queries (new tokens times query group), one matrix tile.
//
// Ownership: a block of 4 warps takes work items (attention.cuh) until none is left. A work item is 16 queries of one row and KV
// head, over the positions of a split. For each tile of 64 positions:
//   scores    warp w multiplies the 16 queries (in registers up to DIM 128) by keys 16 w .. 16 w + 15;
//   softmax   the warps combine their largest scores in shared memory and store the weights there, rounded to the model's format;
//   sums      warp w multiplies all 64 weights by columns w DIM / 4 .. of the values, and by a column of ones: the
//             normalizer is the sum of the rounded weights, in the order of the value sums.
// All accumulators are in registers. Barriers per tile: keys arrived; largest scores; weights and values arrived.
//
// Bytes: 2 * head_dim numbers of the cache per position and KV head, each read once. FLOPs: 4 * head_dim * 16 queries, of which
// `group` queries are useful. Limiter: memory bandwidth, hence bytes in flight. The ring holds units (64 keys or 64 values: 17
// KiB at head_dim 128 in 16 bits); all but one are in flight. Shared memory per block, 16 bits:
//   queries 16 * (2 DIM + 16) + weights 2304 + largest scores 256, and stages * 64 * (2 DIM + 16) for the ring
//   DIM 128: 6.9 KiB + 17 KiB a stage: 2 blocks of 6 stages on sm_90 and sm_100 (227 KiB), 2 of 4 on sm_80 (163 KiB)
//   DIM 256: 10.8 KiB + 33 KiB a stage: 1 block of 6 stages, 4 on sm_80
// The host chooses the number of blocks and stages (executor/backends/cuda/ops/attention_plan.py).
//
// Reduction order: see attention.cuh; it depends on positions only, not on the batch size.
#include "device.cuh"

#include "attention.cuh"
#include "attention_ring.cuh"

namespace quintet {

constexpr int DECODE_THREADS = 128;

// Totals of a query over the previous splits, in registers.
struct Totals {
  float* numbers;
  __device__ __forceinline__ float& operator()(int i) const { return numbers[i]; }
};

template <class T, class KV, int DIM>
__device__ __forceinline__ void attention_decode(const Attention& a) {
  using Cache = Ring<T, KV, DIM, DECODE_THREADS>;
  constexpr int WARPS = DECODE_THREADS / WARP_SIZE;
  constexpr int STEPS = DIM / 16;            // matrix steps along a head, for scores
  constexpr bool KEEPS = STEPS <= 8;         // whether queries fit in registers
  constexpr int COLUMNS = DIM / WARPS / 8;   // matrix tiles of a warp's columns, for sums
  constexpr int WEIGHTS_ROW = TILE * int(sizeof(T)) + 16;
  static_assert(DIM % (8 * WARPS) == 0 && TILE == 16 * WARPS, "warps share columns and keys equally");

  QT_DYNAMIC_SHARED(shared);
  unsigned char* queries = shared;
  unsigned char* weights = queries + DECODE_QUERY_TILE * Cache::ROW;
  float* largest = reinterpret_cast<float*>(weights + DECODE_QUERY_TILE * WEIGHTS_ROW);  // [WARPS][16]
  unsigned char* ring_memory = reinterpret_cast<unsigned char*>(largest + WARPS * DECODE_QUERY_TILE);
  __shared__ int next_item;
  __shared__ WorkItem item;

  const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
  const int quad = lane / 4, pair = lane % 4 * 2;  // this thread's queries are quad and quad + 8
  const float unit = a.scores.unit();
  const uint32_t ones[2] = {pack_pair<T>(1.0f, 1.0f), pack_pair<T>(1.0f, 1.0f)};
  // Addresses for load_matrix_x4: rows of A; 16 rows of keys as two B tiles; 32 rows of values as two steps of one B tile.
  const unsigned char* queries_at = queries + lane % 16 * Cache::ROW + lane / 16 * 16;
  const unsigned char* weights_at = weights + lane % 16 * WEIGHTS_ROW + lane / 16 * 16;
  const int keys_at = (16 * warp + lane / 16 * 8 + lane % 8) * Cache::ROW + lane / 8 % 2 * 16;
  const int values_at = lane * Cache::ROW + warp * COLUMNS * 16;

  for (int index = blockIdx.x; index < a.plan.num_items(); index = next_item) {
    __syncthreads();  // all threads have left the shared memory of the previous work item
    if (warp == 0) {
      int upcoming = 0;
      if (lane == 0) upcoming = gridDim.x + atomicAdd(a.plan.taken(), 1);  // its latency overlaps find_item
      const WorkItem found = find_item<DECODE_QUERY_TILE>(a, index);
      if (lane == 0) {
        next_item = upcoming;
        item = found;
      }
    }
    __syncthreads();
    if (item.begin < item.end) {
      Cache cache(a, item, ring_memory);
      copy_queries<T, DIM, DECODE_QUERY_TILE, DECODE_THREADS>(a, item, queries);
      cache.fill();
      bool folded = false;
      const QueryMask masks[2] = {QueryMask(a, item, quad), QueryMask(a, item, quad + 8)};

      uint32_t query[KEEPS ? STEPS : 1][4];
      float sums[COLUMNS][4] = {}, normalizer[4] = {}, most[2] = {UNSEEN, UNSEEN};
      float totals[2][2 * COLUMNS + 2];
      totals[0][2 * COLUMNS + 1] = totals[1][2 * COLUMNS + 1] = UNSEEN;

#pragma unroll 1
      for (int tile = item.begin / TILE;; ++tile) {
        const bool ends = tile * TILE >= item.end;
        if (ends ? folded : tile % a.split_tiles == 0 && tile * TILE > item.begin) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            fold_query<COLUMNS>(sums, normalizer, most[half], half, unit, Totals{totals[half]});
          }
          folded = true;
        }
        if (ends) break;

        const unsigned char* keys = cache.take();
        if constexpr (KEEPS) {
          if (tile == item.begin / TILE) {
#pragma unroll
            for (int k = 0; k < STEPS; ++k) load_matrix_x4(query[k], queries_at + k * 32);
          }
        }
        float score[2][4] = {};
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
          if constexpr (!KEEPS) load_matrix_x4(query[0], queries_at + k * 32);
          uint32_t key[4];
          load_matrix_x4(key, keys + keys_at + k * 32);
          const uint32_t left[2] = {key[0], key[1]}, right[2] = {key[2], key[3]};
          mma_16x8x16<T>(score[0], query[KEEPS ? k : 0], left);
          mma_16x8x16<T>(score[1], query[KEEPS ? k : 0], right);
        }

        const int position = tile * TILE + 16 * warp + pair;
        const bool masked = sees_partly(a, item, tile);
        float tile_most[2] = {UNSEEN, UNSEEN};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const QueryMask& mask = masks[i / 2];
            const int at = position + 8 * n + i % 2;
            if (!a.scores.plain) score[n][i] = a.scores.logit(score[n][i], mask.slope, at - mask.last);
            if (masked && !sees(mask, at)) score[n][i] = UNSEEN;
            tile_most[i / 2] = fmaxf(tile_most[i / 2], score[n][i]);
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          tile_most[half] = largest_of_quad(tile_most[half]);
          if (lane % 4 == 0) largest[warp * DECODE_QUERY_TILE + quad + 8 * half] = tile_most[half];
        }
        __syncthreads();

        float shrink[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int other = 0; other < WARPS; ++other) {
            tile_most[half] = fmaxf(tile_most[half], largest[other * DECODE_QUERY_TILE + quad + 8 * half]);
          }
          const Rise rise(most[half], tile_most[half], unit);
          most[half] = rise.most;
          shrink[half] = rise.shrink;
          unsigned char* row = weights + (quad + 8 * half) * WEIGHTS_ROW + (16 * warp + pair) * int(sizeof(T));
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            *reinterpret_cast<uint32_t*>(row + n * 8 * int(sizeof(T))) =
                pack_pair<T>(rise.weight(score[n][2 * half], unit), rise.weight(score[n][2 * half + 1], unit));
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          normalizer[i] *= shrink[i / 2];
#pragma unroll
          for (int n = 0; n < COLUMNS; ++n) sums[n][i] *= shrink[i / 2];
        }

        const unsigned char* values = cache.take();  // its barrier also covers the weights
#pragma unroll
        for (int k = 0; k < TILE / 32; ++k) {
          uint32_t early[4], late[4];
          load_matrix_x4(early, weights_at + k * 64);
          load_matrix_x4(late, weights_at + k * 64 + 32);
          mma_16x8x16<T>(normalizer, early, ones);
          mma_16x8x16<T>(normalizer, late, ones);
#pragma unroll
          for (int n = 0; n < COLUMNS; ++n) {
            uint32_t value[4];
            load_matrix_x4_transposed(value, values + values_at + k * 32 * Cache::ROW + n * 16);
            const uint32_t low[2] = {value[0], value[1]}, high[2] = {value[2], value[3]};
            mma_16x8x16<T>(sums[n], early, low);
            mma_16x8x16<T>(sums[n], late, high);
          }
        }
      }

#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (folded) unfold_query<COLUMNS>(sums, normalizer, most[half], half, Totals{totals[half]});
        const int in_tile = quad + 8 * half;
        if (in_tile < item.num_queries) {
          store_query<T, DECODE_QUERY_TILE, COLUMNS>(a, item, in_tile, warp * COLUMNS * 8 + pair, half, sums,
                                               normalizer[2 * half], most[half]);
        }
      }
      if (item.slot >= 0) merge_parts<T, DIM, DECODE_QUERY_TILE, DECODE_THREADS>(a, item);
    }
    __syncthreads();
  }
  finish<T, DECODE_THREADS>(a);
}

}  // namespace quintet

#define QT_ATTENTION_DECODE(dim, suffix, T, KV)                                                           \
  QT_KERNEL_OCCUPANCY(quintet::DECODE_THREADS, 2, attention_decode_##dim##suffix, (QT_ATTENTION_PARAMETERS)) {         \
    quintet::attention_decode<T, KV, dim>(QT_ATTENTION_ARGUMENTS);                                        \
  }
#define QT_ATTENTION_DECODE_FORMATS(dim)                                            \
  QT_ATTENTION_DECODE(dim, _bf16, quintet::bf16, quintet::bf16)                     \
  QT_ATTENTION_DECODE(dim, _fp16, quintet::fp16, quintet::fp16)                     \
  QT_ATTENTION_DECODE(dim, _bf16_fp8kv, quintet::bf16, quintet::fp8)                \
  QT_ATTENTION_DECODE(dim, _fp16_fp8kv, quintet::fp16, quintet::fp8)

QT_ATTENTION_DECODE_FORMATS(64)
QT_ATTENTION_DECODE_FORMATS(128)
QT_ATTENTION_DECODE_FORMATS(256)
