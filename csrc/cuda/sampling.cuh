// A row of logits as kernels see it that draw from it or report on it: tiles, sums that need no order, and a selection
// without sorting. Knows no request and no batch.
//
// A row is seen as tiles of 256 logits. A warp looks at one tile, a lane at 8 adjacent logits in it. `scan_tiles` in
// sampling.cu leaves each tile's largest logit and its sum of weights; as the k tiles with the largest maxima hold at
// least k logits not below the k-th of these maxima, a search for large logits reads few tiles.
//
// Weights are e^((x - largest) / temperature), at most 1. What is compared or cumulated over a whole row is counted in
// units of 2^-44: adding integers is associative, so threads may add in any order, and no result depends on how many
// there are. A row loses less than 2^18 * 2^-44 of its most likely token's weight to that, as much as fp32 would.
// Compile without --use_fast_math: thresholds are translated through the very divisions the reference does.
#pragma once

#include "device.cuh"

namespace quintet {

constexpr int TILE = 256;
constexpr int SHARE = TILE / WARP_SIZE;  // logits of a tile that a lane owns, next to one another
constexpr int TILES_AT_ONCE = 2;         // a warp of a sweep has their loads in flight together
constexpr float LOWEST = -3.4028234664e38f;
constexpr float LOG2_E = 1.4426950409f;

// Unsigned numbers in the order of the floats they stand for; -0 comes right before 0.
__device__ __forceinline__ uint32_t key_of(float value) {
  uint32_t bits = __float_as_uint(value);
  return bits ^ ((bits >> 31) != 0u ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float of_key(uint32_t key) {
  return __uint_as_float(key ^ ((key >> 31) != 0u ? 0x80000000u : 0xffffffffu));
}
constexpr uint32_t LOWEST_KEY = 0x00800000u;    // of LOWEST
constexpr uint32_t INFINITE_KEY = 0x007fffffu;  // of -infinity

// Bits at the end of a key that are the same for all numbers of a format (and a sign): 16-bit formats hold few values.
template <class T>
struct KeyGrain;
template <>
struct KeyGrain<float> {
  static constexpr int BITS = 0;
};
template <>
struct KeyGrain<bf16> {
  static constexpr int BITS = 16;
};
template <>
struct KeyGrain<fp16> {
  static constexpr int BITS = 13;
};

// The weight of x beside `top`, the largest; scale is LOG2_E / temperature. Equals weigh 1 whatever the scale is.
__device__ __forceinline__ float weight_of(float x, float top, float scale) {
  return x < top ? exp2f((x - top) * scale) : 1.0f;
}

// In units of 2^-44, rounded down; weight at most 2^19.
__device__ __forceinline__ uint64_t units_of(float weight) { return uint64_t(weight * 17592186044416.0f); }

// What a lane has of a tile, as it came from memory.
template <class T>
struct Share {
  static constexpr int PACKS = SHARE / Pack<T>::SIZE;
  static_assert(SHARE % Pack<T>::SIZE == 0, "a share is whole packs");
  Pack<T> packs[PACKS];

  __device__ __forceinline__ float get(int i) const {
    return packs[i / Pack<T>::SIZE].get(i % Pack<T>::SIZE);
  }
};

template <class T>
struct Row {
  const T* logits;
  int vocab_size;
  int num_tiles;
  bool is_aligned;  // to 16 bytes: an odd vocabulary leaves every second row between

  __device__ __forceinline__ Row(const T* rows, long long stride, long long row, int size)
      : logits(rows + row * stride),
        vocab_size(size),
        num_tiles((size + TILE - 1) / TILE),
        is_aligned((reinterpret_cast<unsigned long long>(logits) & 15ull) == 0ull) {}

  // The id of this lane's first logit of a tile.
  static __device__ __forceinline__ int first_of(int tile) {
    return tile * TILE + int(threadIdx.x) % WARP_SIZE * SHARE;
  }

  // -infinity past the row's end.
  __device__ __forceinline__ Share<T> load(int tile) const {
    constexpr int SIZE = Pack<T>::SIZE;
    const int first = first_of(tile);
    Share<T> share;
    if (is_aligned && first + SHARE <= vocab_size) {
#pragma unroll
      for (int i = 0; i < Share<T>::PACKS; ++i) share.packs[i] = load_pack(logits + first + i * SIZE);
    } else {
#pragma unroll
      for (int i = 0; i < SHARE; ++i)
        share.packs[i / SIZE].set(i % SIZE, first + i < vocab_size ? to_float(logits[first + i]) : -INF);
    }
    return share;
  }

  // visit(tile, share) by the block's warps, for every tile with a maximum of at least `least`. All threads call.
  template <int THREADS, class Visit>
  __device__ __forceinline__ void sweep(const float* maxima, float least, Visit visit) const {
    constexpr int WARPS = THREADS / WARP_SIZE;
    for (int first = int(threadIdx.x) / WARP_SIZE; first < num_tiles; first += WARPS * TILES_AT_ONCE) {
      Share<T> shares[TILES_AT_ONCE];
      bool is_wanted[TILES_AT_ONCE];
#pragma unroll
      for (int i = 0; i < TILES_AT_ONCE; ++i) {
        const int tile = first + i * WARPS;
        is_wanted[i] = tile < num_tiles && maxima[tile] >= least;
        if (is_wanted[i]) shares[i] = load(tile);
      }
#pragma unroll
      for (int i = 0; i < TILES_AT_ONCE; ++i)
        if (is_wanted[i]) visit(first + i * WARPS, shares[i]);
    }
  }
};

__device__ __forceinline__ uint64_t join(uint32_t high, uint32_t low) { return uint64_t(high) << 32 | low; }

__device__ __forceinline__ uint64_t shuffle(uint64_t value, int lane) {
  return join(__shfl_sync(FULL_WARP, uint32_t(value >> 32), lane), __shfl_sync(FULL_WARP, uint32_t(value), lane));
}

// The sum of a warp's values up to and with this lane's.
__device__ __forceinline__ uint64_t warp_cumulated(uint64_t value) {
  const int lane = int(threadIdx.x) % WARP_SIZE;
#pragma unroll
  for (int step = 1; step < WARP_SIZE; step *= 2) {
    const uint32_t high = __shfl_up_sync(FULL_WARP, uint32_t(value >> 32), step);
    const uint32_t low = __shfl_up_sync(FULL_WARP, uint32_t(value), step);
    if (lane >= step) value += join(high, low);
  }
  return value;
}

struct Cumulated {
  uint64_t before;  // the sum of the values of the threads before this one
  uint64_t total;   // of all threads
};

// Of a block of exactly THREADS threads, all of which call. Two barriers; the first lets the shared array be used again.
template <int THREADS>
__device__ __forceinline__ Cumulated block_cumulated(uint64_t value) {
  constexpr int WARPS = THREADS / WARP_SIZE;
  static_assert(THREADS % WARP_SIZE == 0 && WARPS <= WARP_SIZE, "whole warps, and a warp holds a sum of each");
  __shared__ uint64_t totals[WARPS];
  const int lane = int(threadIdx.x) % WARP_SIZE, warp = int(threadIdx.x) / WARP_SIZE;
  const uint64_t of_warp = warp_cumulated(value);
  __syncthreads();
  if (lane == WARP_SIZE - 1) totals[warp] = of_warp;
  __syncthreads();
  const uint64_t of_warps = warp_cumulated(lane < WARPS ? totals[lane] : 0);
  const uint64_t of_warps_before = shuffle(of_warps, warp > 0 ? warp - 1 : 0);
  return {(warp > 0 ? of_warps_before : 0) + of_warp - value, shuffle(of_warps, WARP_SIZE - 1)};
}

// The largest of a row and whether it has a NaN, from what `scan_tiles` left, which is copied to `maxima` in shared
// memory; a tile with a NaN has a NaN there.
struct Largest {
  float value;
  bool any_nan;
};

template <int THREADS>
__device__ __forceinline__ Largest take_maxima(const float* scanned, int num_tiles, float* maxima) {
  float most = -INF, nan = 0.0f;
  for (int tile = int(threadIdx.x); tile < num_tiles; tile += THREADS) {
    const float value = scanned[tile];
    maxima[tile] = value;
    if (value != value)
      nan = 1.0f;
    else
      most = fmaxf(most, value);
  }
  most = block_max<THREADS>(most);
  return {most, block_max<THREADS>(nan) > 0.0f};
}

// Selection by a histogram over keys, 11 bits of them at a time: amounts are added to the bins in any order, then bins
// are cumulated from the largest numbers down.
constexpr int BINS = 2048;
constexpr int BIN_BITS = 11;

// Amounts are 64-bit, added as two words by 32-bit atomics, which shared memory has instructions for.
struct Bins {
  int low[BINS];
  int high[BINS];
  int chosen;       // a bin, -1: none
  uint64_t before;  // what is in larger bins

  __device__ __forceinline__ void add(uint32_t bin, uint64_t amount) {
    const uint32_t low_word = uint32_t(amount);
    uint32_t high_word = uint32_t(amount >> 32);
    if (low_word != 0u) {
      const uint32_t old = uint32_t(atomicAdd(&low[bin], int(low_word)));
      if (old + low_word < old) ++high_word;  // a carry
    }
    if (high_word != 0u) atomicAdd(&high[bin], int(high_word));
  }
};

// What a selection ended with. Numbers with keys of at least `key` together reach the target, those of larger ones by
// themselves do not, but for those that share its last `grain` bits.
struct Selected {
  uint32_t key;
  bool is_reached;  // false: all numbers together do not reach the target
};

// The number a key stands for, after a selection that ended with the grain of the format T.
template <class T>
__device__ __forceinline__ float number_of(Selected selected) {
  constexpr uint32_t REST = (1u << KeyGrain<T>::BITS) - 1u;
  return of_key((selected.key >> 31) != 0u ? selected.key : selected.key | REST);
}

// The largest number such that the amounts of what is not smaller reach a target, among numbers with keys from `first`
// to `last`. All threads call.
// sweep(least, visit) shows the numbers from `least` on (others do no harm), each to visit(x) of one thread;
// amount_of(x): what it adds, 0 for what does not count; target_of(total): at least 1, from the sum of all amounts.
// max_rounds: how many times 11 bits at most; after fewer than are needed, the key is smaller than the best one.
template <int THREADS, int GRAIN, class Sweep, class AmountOf, class TargetOf>
__device__ __forceinline__ Selected select_by_amount(Bins& bins, uint32_t first, uint32_t last, int max_rounds, Sweep sweep,
                                           AmountOf amount_of, TargetOf target_of) {
  constexpr int PER_THREAD = BINS / THREADS;
  static_assert(BINS % THREADS == 0, "threads share the bins evenly");
  uint32_t base = first >> GRAIN << GRAIN;
  const int num_bits = last > base ? 32 - __clz(int(last - base)) : 0;
  int shift = num_bits > GRAIN + BIN_BITS ? num_bits - BIN_BITS : GRAIN;
  uint64_t above = 0, target = 0;
  for (int round = 0;; ++round) {
    for (int bin = int(threadIdx.x); bin < BINS; bin += THREADS) bins.low[bin] = bins.high[bin] = 0;
    if (threadIdx.x == 0) bins.chosen = -1;
    __syncthreads();
    sweep(of_key(base < INFINITE_KEY ? INFINITE_KEY : base), [&](float x) {
      const uint32_t distance = key_of(x) - base;  // wraps for smaller keys, and so is too large
      if (distance > last - base) return;
      bins.add(distance >> shift, amount_of(x));
    });
    __syncthreads();

    // thread 0 owns the largest bins
    uint64_t amounts[PER_THREAD], sum = 0;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const int bin = BINS - 1 - (int(threadIdx.x) * PER_THREAD + i);
      amounts[i] = join(uint32_t(bins.high[bin]), uint32_t(bins.low[bin]));
      sum += amounts[i];
    }
    const Cumulated cumulated = block_cumulated<THREADS>(sum);
    if (round == 0) target = target_of(cumulated.total);
    uint64_t before = above + cumulated.before;
    if (before < target && before + sum >= target) {
#pragma unroll
      for (int i = 0; i < PER_THREAD; ++i) {
        if (before < target && before + amounts[i] >= target) {
          bins.chosen = BINS - 1 - (int(threadIdx.x) * PER_THREAD + i);
          bins.before = before;
        }
        before += amounts[i];
      }
    }
    __syncthreads();
    const int chosen = bins.chosen;
    above = bins.before;
    __syncthreads();  // they are not cleared before all have read
    if (chosen < 0) return {base, false};
    base += uint32_t(chosen) << shift;
    if (shift == GRAIN || round + 1 == max_rounds) return {base, true};
    last = base + (1u << shift) - 1u;
    shift = shift - BIN_BITS > GRAIN ? shift - BIN_BITS : GRAIN;
  }
}

constexpr int ALL_ROUNDS = 32;

// A key that at least `count` numbers of the row reach, as large as the tiles' maxima tell; `first` if they tell nothing.
// From it on, a selection of the `count` largest reads few tiles.
template <int THREADS, int GRAIN>
__device__ __forceinline__ uint32_t reached_by_tiles(Bins& bins, uint32_t first, float top, const float* maxima,
                                                     int num_tiles, long long count) {
  if (count > num_tiles) return first;
  const Selected bound = select_by_amount<THREADS, GRAIN>(
      bins, first, key_of(top), 2,
      [&](float, auto visit) {
        for (int tile = int(threadIdx.x); tile < num_tiles; tile += THREADS) visit(maxima[tile]);
      },
      [](float) { return uint64_t(1); }, [&](uint64_t) { return uint64_t(count); });
  return bound.is_reached && bound.key > first ? bound.key : first;
}

// The same over the numbers of a row; amount_of decides which count.
template <int THREADS, class T, class AmountOf, class TargetOf>
__device__ __forceinline__ Selected select_in_row(Bins& bins, const Row<T>& row, const float* maxima, uint32_t first,
                                                  float top, AmountOf amount_of, TargetOf target_of) {
  return select_by_amount<THREADS, KeyGrain<T>::BITS>(
      bins, first, key_of(top), ALL_ROUNDS,
      [&](float least, auto visit) {
        row.template sweep<THREADS>(maxima, least, [&](int, const Share<T>& share) {
#pragma unroll
          for (int i = 0; i < SHARE; ++i) visit(share.get(i));
        });
      },
      amount_of, target_of);
}

}  // namespace quintet
