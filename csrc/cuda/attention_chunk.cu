// Prefill attention over the paged cache, for rows of many new tokens: prompts, chunks of prompts, draft tokens.
//
// Ownership: a block of 4 warps takes work items (attention.cuh) until none is left. A work item is 128 queries of one row and KV
// head (64 if DIM is 256), over the positions of a split. A warp owns 32 queries (16) with their scores, weights and sums in
// registers, so every key loaded from shared memory is used twice. For each tile of 64 positions: scores, softmax within quads
// of threads, sums. Weights are rounded to the model's format and multiplied by the values and by a column of ones; the latter
// gives the normalizer. Warps with queries past the query tile's end only copy. Barriers per tile: keys arrived; values arrived.
//
// FLOPs: 4 * head_dim per query and visible position; tiles that no query of the query tile sees are skipped. Bytes: the
// positions of a query tile once, mostly from L2. Limiter: matrix instructions (mma.sync, not Hopper's wgmma; so a library
// kernel may be chosen for long prompts: executor/backends/cuda/attention). Shared memory per block, 16 bits:
//   queries 64 MT * (2 DIM + 16) and stages * 64 * (2 DIM + 16) for the ring
//   DIM 128: 34 KiB + 17 KiB a stage: 2 blocks of 4 stages on sm_90 and sm_100 (227 KiB), 1 of 7 on sm_80 (163 KiB)
//   DIM 256: 33 KiB + 33 KiB a stage: 1 block of 5 stages, 3 on sm_80
//
// With a fixed split size, a work item may cover several splits. Their totals are in global memory, private to the thread,
// because no registers are left.
//
// Reduction order: see attention.cuh; it depends on positions only, not on the batch size.
#include "device.cuh"

#include "attention.cuh"
#include "attention_ring.cuh"

namespace quintet {

constexpr int CHUNK_THREADS = 128;

// Totals of a query in global memory: a column of `totals [blocks][MT * 2 * (2 COLUMNS + 2)][threads]`.
struct FarTotals {
  float* numbers;
  __device__ __forceinline__ float& operator()(int i) const { return numbers[i * CHUNK_THREADS]; }
};

template <class T, class KV, int DIM, int MT>
__device__ __forceinline__ void attention_chunk(const Attention& a) {
  using Cache = Ring<T, KV, DIM, CHUNK_THREADS>;
  constexpr int WARPS = CHUNK_THREADS / WARP_SIZE;
  constexpr int QUERY_TILE = WARPS * MT * 16;
  constexpr int STEPS = DIM / 16;     // matrix steps along a head, for scores
  constexpr int COLUMNS = DIM / 8;    // matrix tiles of a head's columns, for sums
  constexpr int PER_QUERY = 2 * COLUMNS + 2;
  static_assert(DIM % 16 == 0 && TILE % 16 == 0, "two matrix tiles are loaded at a time");

  QT_DYNAMIC_SHARED(shared);
  unsigned char* queries = shared;
  unsigned char* ring_memory = queries + QUERY_TILE * Cache::ROW;
  __shared__ int next_item;
  __shared__ WorkItem item;

  const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
  const int quad = lane / 4, pair = lane % 4 * 2;
  const int first_index = warp * MT * 16;  // the warp's first query in the query tile
  const float unit = a.scores.unit();
  const uint32_t ones[2] = {pack_pair<T>(1.0f, 1.0f), pack_pair<T>(1.0f, 1.0f)};
  // Addresses for load_matrix_x4: rows of A; 16 rows of keys as two B tiles; 16 rows of values as two B tiles.
  const unsigned char* queries_at = queries + (first_index + lane % 16) * Cache::ROW + lane / 16 * 16;
  const int keys_at = (lane / 16 * 8 + lane % 8) * Cache::ROW + lane / 8 % 2 * 16;
  const int values_at = lane % 16 * Cache::ROW + lane / 16 * 16;
  const auto total_of = [&](int m, int half) {
    const int column = (blockIdx.x * MT * 2 + 2 * m + half) * PER_QUERY;
    return FarTotals{a.totals + (long long)column * CHUNK_THREADS + threadIdx.x};
  };

  for (int index = blockIdx.x; index < a.plan.num_items(); index = next_item) {
    __syncthreads();  // all threads have left the shared memory of the previous work item
    if (warp == 0) {
      int upcoming = 0;
      if (lane == 0) upcoming = gridDim.x + atomicAdd(a.plan.taken(), 1);  // its latency overlaps find_item
      const WorkItem found = find_item<QUERY_TILE>(a, index);
      if (lane == 0) {
        next_item = upcoming;
        item = found;
      }
    }
    __syncthreads();
    if (item.begin < item.end) {
      Cache cache(a, item, ring_memory);
      copy_queries<T, DIM, QUERY_TILE, CHUNK_THREADS>(a, item, queries);
      cache.fill();
      const bool works = first_index < item.num_queries;
      bool folded = false;
      float sums[MT][COLUMNS][4] = {}, normalizer[MT][4] = {}, most[MT][2];
#pragma unroll
      for (int m = 0; m < MT; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) most[m][half] = UNSEEN;
      }

#pragma unroll 1
      for (int tile = item.begin / TILE;; ++tile) {
        const bool ends = tile * TILE >= item.end;
        if (ends ? folded : tile % a.split_tiles == 0 && tile * TILE > item.begin) {
#pragma unroll
          for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const FarTotals total = total_of(m, half);
              if (!folded) total(PER_QUERY - 1) = UNSEEN;
              fold_query<COLUMNS>(sums[m], normalizer[m], most[m][half], half, unit, total);
            }
          }
          folded = true;
        }
        if (ends) break;

        uint32_t weights[MT][TILE / 16][4];
        const unsigned char* keys = cache.take();
        if (works) {
          float score[MT][TILE / 8][4] = {};
#pragma unroll
          for (int k = 0; k < STEPS; ++k) {
            uint32_t query[MT][4];
#pragma unroll
            for (int m = 0; m < MT; ++m) load_matrix_x4(query[m], queries_at + m * 16 * Cache::ROW + k * 32);
#pragma unroll
            for (int n = 0; n < TILE / 16; ++n) {
              uint32_t key[4];
              load_matrix_x4(key, keys + keys_at + n * 16 * Cache::ROW + k * 32);
              const uint32_t left[2] = {key[0], key[1]}, right[2] = {key[2], key[3]};
#pragma unroll
              for (int m = 0; m < MT; ++m) {
                mma_16x8x16<T>(score[m][2 * n], query[m], left);
                mma_16x8x16<T>(score[m][2 * n + 1], query[m], right);
              }
            }
          }

          const int position = tile * TILE + pair;
          const bool masked = sees_partly(a, item, tile);
#pragma unroll
          for (int m = 0; m < MT; ++m) {
            float tile_most[2] = {UNSEEN, UNSEEN};
            const int in_tile = first_index + 16 * m + quad;
            if (!a.scores.plain) {
              const QueryMask masks[2] = {QueryMask(a, item, in_tile), QueryMask(a, item, in_tile + 8)};
#pragma unroll
              for (int i = 0; i < TILE / 2; ++i) {
                const int at = position + i / 4 * 8 + i % 2;
                float& one = score[m][i / 4][i % 4];
                one = a.scores.logit(one, masks[i % 4 / 2].slope, at - masks[i % 4 / 2].last);
              }
            }
            if (masked) {
              const QueryMask masks[2] = {QueryMask(a, item, in_tile), QueryMask(a, item, in_tile + 8)};
#pragma unroll
              for (int i = 0; i < TILE / 2; ++i) {
                const int at = position + i / 4 * 8 + i % 2;
                if (!sees(masks[i % 4 / 2], at)) score[m][i / 4][i % 4] = UNSEEN;
              }
            }
#pragma unroll
            for (int n = 0; n < TILE / 8; ++n) {
#pragma unroll
              for (int i = 0; i < 4; ++i) tile_most[i / 2] = fmaxf(tile_most[i / 2], score[m][n][i]);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const Rise rise(most[m][half], largest_of_quad(tile_most[half]), unit);
              most[m][half] = rise.most;
#pragma unroll
              for (int n = 0; n < TILE / 8; ++n) {
                // Scores of columns 2 (lane % 4) .. + 1 of two adjacent tiles have the layout of the weights' fragment.
                weights[m][n / 2][n % 2 * 2 + half] = pack_pair<T>(
                    rise.weight(score[m][n][2 * half], unit), rise.weight(score[m][n][2 * half + 1], unit));
              }
              // Most tiles do not raise the maximum; scaling by 1 changes nothing.
              if (__any_sync(FULL_WARP, rise.shrink != 1.0f)) {
                normalizer[m][2 * half] *= rise.shrink;
                normalizer[m][2 * half + 1] *= rise.shrink;
#pragma unroll
                for (int n = 0; n < COLUMNS; ++n) {
                  sums[m][n][2 * half] *= rise.shrink;
                  sums[m][n][2 * half + 1] *= rise.shrink;
                }
              }
            }
          }
        }

        const unsigned char* values = cache.take();
        if (works) {
#pragma unroll
          for (int k = 0; k < TILE / 16; ++k) {
#pragma unroll
            for (int m = 0; m < MT; ++m) mma_16x8x16<T>(normalizer[m], weights[m][k], ones);
#pragma unroll
            for (int n = 0; n < COLUMNS / 2; ++n) {
              uint32_t value[4];
              load_matrix_x4_transposed(value, values + values_at + k * 16 * Cache::ROW + n * 32);
              const uint32_t left[2] = {value[0], value[1]}, right[2] = {value[2], value[3]};
#pragma unroll
              for (int m = 0; m < MT; ++m) {
                mma_16x8x16<T>(sums[m][2 * n], weights[m][k], left);
                mma_16x8x16<T>(sums[m][2 * n + 1], weights[m][k], right);
              }
            }
          }
        }
      }

#pragma unroll
      for (int m = 0; m < MT; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (folded) unfold_query<COLUMNS>(sums[m], normalizer[m], most[m][half], half, total_of(m, half));
          const int in_tile = first_index + 16 * m + 8 * half + quad;
          if (in_tile < item.num_queries) {
            store_query<T, QUERY_TILE, COLUMNS>(a, item, in_tile, pair, half, sums[m], normalizer[m][2 * half], most[m][half]);
          }
        }
      }
      if (item.slot >= 0) merge_parts<T, DIM, QUERY_TILE, CHUNK_THREADS>(a, item);
    }
    __syncthreads();
  }
  finish<T, CHUNK_THREADS>(a);
}

}  // namespace quintet

#define QT_ATTENTION_CHUNK(dim, suffix, T, KV, MT)                                                     \
  QT_KERNEL_OCCUPANCY(quintet::CHUNK_THREADS, 2, attention_chunk_##dim##suffix, (QT_ATTENTION_PARAMETERS)) {        \
    quintet::attention_chunk<T, KV, dim, MT>(QT_ATTENTION_ARGUMENTS);                                  \
  }
#define QT_ATTENTION_CHUNK_FORMATS(dim, MT)                                           \
  QT_ATTENTION_CHUNK(dim, _bf16, quintet::bf16, quintet::bf16, MT)                    \
  QT_ATTENTION_CHUNK(dim, _fp16, quintet::fp16, quintet::fp16, MT)                    \
  QT_ATTENTION_CHUNK(dim, _bf16_fp8kv, quintet::bf16, quintet::fp8, MT)               \
  QT_ATTENTION_CHUNK(dim, _fp16_fp8kv, quintet::fp16, quintet::fp8, MT)

QT_ATTENTION_CHUNK_FORMATS(64, 2)
QT_ATTENTION_CHUNK_FORMATS(128, 2)
QT_ATTENTION_CHUNK_FORMATS(256, 1)
