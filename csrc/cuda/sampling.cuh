// Common parts of sampling and log-probability kernels: tiles of a row of logits, order-independent sums, and selection without
// sorting.
//
// A row is divided into tiles of 256 logits. A warp reads one tile, a lane 8 adjacent logits in it. `scan_tiles` in sampling.cu
// computes the maximum and the sum of weights of each tile. The k tiles with the largest maxima hold at least k logits not
// below the k-th of these maxima, so a search for large logits reads few tiles.
//
// Weights are e^((x - largest) / temperature), at most 1. Sums and comparisons over a whole row use integers in units of 2^-44.
// Integer addition is associative, so threads may add in any order, and results do not depend on their number. The loss is less
// than 2^18 * 2^-44 of the most likely token's weight, comparable to fp32. Compile without --use_fast_math: thresholds are
// derived with the same divisions as in the reference.
#pragma once

#include "device.cuh"

namespace quintet {

constexpr int TILE = 256;
constexpr int SHARE = TILE / WARP_SIZE;  // adjacent logits of a tile that a lane owns
constexpr int TILES_AT_ONCE = 2;         // tiles with loads in flight per warp of a sweep
constexpr float LOWEST = -3.4028234664e38f;
constexpr float LOG2_E = 1.4426950409f;

// Unsigned keys in the order of their floats; -0 is directly below 0.
__device__ __forceinline__ uint32_t key_of(float value) {
  uint32_t bits = __float_as_uint(value);
  return bits ^ ((bits >> 31) != 0u ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float of_key(uint32_t key) {
  return __uint_as_float(key ^ ((key >> 31) != 0u ? 0x80000000u : 0xffffffffu));
}
constexpr uint32_t LOWEST_KEY = 0x00800000u;    // of LOWEST
constexpr uint32_t INFINITE_KEY = 0x007fffffu;  // of -infinity

// Low bits of a key that are equal for all numbers of a format (and sign): 16-bit formats have few values.
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

// Weight of x relative to `top`, the largest; scale is LOG2_E / temperature. Equal logits weigh 1 for every scale.
__device__ __forceinline__ float weight_of(float x, float top, float scale) {
  return x < top ? exp2f((x - top) * scale) : 1.0f;
}

// In units of 2^-44, rounded down; weight at most 2^19.
__device__ __forceinline__ uint64_t units_of(float weight) { return uint64_t(weight * 17592186044416.0f); }

// A lane's logits of a tile, in memory format.
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
  bool is_aligned;  // to 16 bytes: with an odd vocab_size, every other row is not

  __device__ __forceinline__ Row(const T* rows, long long stride, long long row, int size)
      : logits(rows + row * stride),
        vocab_size(size),
        num_tiles((size + TILE - 1) / TILE),
        is_aligned((reinterpret_cast<unsigned long long>(logits) & 15ull) == 0ull) {}

  // Id of this lane's first logit of a tile.
  static __device__ __forceinline__ int first_of(int tile) {
    return tile * TILE + int(threadIdx.x) % WARP_SIZE * SHARE;
  }

  // Loads a share; -infinity past the row's end.
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

  // Calls visit(tile, share), distributed over the block's warps, for every tile with a maximum of at least `least`. All
  // threads call.
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

// Inclusive prefix sum over the lanes of a warp.
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
  uint64_t before;  // sum over the previous threads
  uint64_t total;   // sum over all threads
};

// Exclusive prefix sum and total over a block of exactly THREADS threads, all of which call. Two barriers; the first one allows
// immediate reuse of the shared array.
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

// Maximum of a row and whether it has a NaN, from the results of `scan_tiles`. They are copied to `maxima` in shared memory;
// the maximum of a tile with a NaN is NaN.
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

// Radix selection: a histogram over 11 bits of the keys at a time. Amounts are added to the bins in any order, then the bins
// are accumulated from the largest key down.
constexpr int BINS = 2048;
constexpr int BIN_BITS = 11;

// Amounts are 64-bit, added as two words with 32-bit atomics, which shared memory supports natively.
struct Bins {
  int low[BINS];
  int high[BINS];
  int chosen;       // a bin, -1: none
  uint64_t before;  // sum of the larger bins

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

// Result of a selection. Numbers with keys of at least `key` reach the target; numbers with larger keys do not, except those
// that differ only in the last `grain` bits.
struct Selected {
  uint32_t key;
  bool is_reached;  // false: all numbers together do not reach the target
};

// Number of the selected key, after a selection with the grain of the format T.
template <class T>
__device__ __forceinline__ float number_of(Selected selected) {
  constexpr uint32_t REST = (1u << KeyGrain<T>::BITS) - 1u;
  return of_key((selected.key >> 31) != 0u ? selected.key : selected.key | REST);
}

// Returns the largest x such that the amounts of all numbers >= x reach a target, among keys from `first` to `last`. All
// threads call.
// sweep(least, visit): calls visit(x), in one thread each, for all numbers from `least` on; smaller numbers are ignored.
// amount_of(x): amount of a number; 0 excludes it. target_of(total): the target, at least 1, from the sum of all amounts.
// max_rounds: limit of 11-bit rounds. If it is too low, the key is smaller than the best one.
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
      const uint32_t distance = key_of(x) - base;  // wraps around for smaller keys, which are then out of range
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
    __syncthreads();  // all threads have read the bins before they are cleared
    if (chosen < 0) return {base, false};
    base += uint32_t(chosen) << shift;
    if (shift == GRAIN || round + 1 == max_rounds) return {base, true};
    last = base + (1u << shift) - 1u;
    shift = shift - BIN_BITS > GRAIN ? shift - BIN_BITS : GRAIN;
  }
}

constexpr int ALL_ROUNDS = 32;

// Lower bound, from the tiles' maxima, of the key of the `count`-th largest number; `first` if there is none. A selection of
// the `count` largest numbers from it reads few tiles.
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

// The same selection over the numbers of a row; amount_of excludes numbers with 0.
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
