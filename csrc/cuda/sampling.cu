// Samples one token from each row of logits: temperature, min-p, top-k, top-p, then inversion of the cumulative distribution at
// one random number; or greedy. The candidates, ties included, are those of quintet.executor.sampling.draw, with the same
// random number. A GPU and a CPU sample differ only if the rounding of a sum decides.
//
// Inversion needs one random number per sample. The Gumbel trick would need no sum but one random number per token. All
// implementations with equal sums sample the same token by inversion. The random number is Philox4x32-10 of the request's seed
// and the token's position (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
//
// Two launches; see sampling.cuh for tiles and units:
//   scan_tiles  a warp owns a tile; any number of blocks share a row. Reads every logit once, with an exponential for each
//               unless the row is greedy. Limiter: memory bandwidth (2 or 4 bytes a logit).
//   draw        a block owns a row. Greedy, or without filters: reads maxima and sums of the tiles, then one tile. Min-p:
//               also the tiles that reach its bound. Top-k: a selection among about k tiles. Top-p without top-k: the
//               same among 64 tiles; if they hold less than p, two or three passes over the row (from L2;
//               limiter: exponentials and shared atomics).
// Reduction order: within a tile a lane's 8 ascending, then the warp's butterfly; all other sums are integers. So a row's token
// depends on the row, its settings and its position, not on the batch size or the grid.
//
// Logits are compared without division by the temperature. In the reference each bound is a quotient; here it is translated to
// the least logit with a rounded quotient that reaches it.
#include "device.cuh"
#include "sampling.cuh"

namespace quintet {

constexpr int SCAN_THREADS = 256;
constexpr int SCAN_TILES = 4;  // tiles with loads in flight per warp
constexpr int DRAW_THREADS = 512;
constexpr int FEW_TILES = 64;
constexpr float LEAST_EXPONENT = -87.0f;  // tokens less likely than e^-87 of the most likely one are excluded

// Parameters of one slot, with the layout of quintet.executor.sampling.settings.
struct DrawSettings {
  float temperature;   // 0: greedy; the other fields are ignored
  float log_min_p;     // -infinity: off
  long long top_k;     // 0 or at least vocab_size: off
  double top_p;        // 1: off
  uint64_t seed;
};
static_assert(sizeof(DrawSettings) == 32, "a record of the settings table");

// Settings of an item; null if all items are greedy. slot -1: unused.
__device__ __forceinline__ const DrawSettings* settings_of(const DrawSettings* settings, const int* slots, int item) {
  return settings == nullptr ? nullptr : settings + (slots == nullptr ? item : slots[item]);
}

template <class T>
__device__ __forceinline__ void scan_tiles(const T* logits, long long stride, int vocab_size, const int* rows,
                                           const DrawSettings* settings, const int* slots, float temperature,
                                           float* maxima, float* sums) {
  const int item = int(blockIdx.y);
  if (slots != nullptr && slots[item] < 0) return;
  const DrawSettings* mine = settings_of(settings, slots, item);
  if (mine != nullptr) temperature = mine->temperature;
  const bool is_greedy = temperature == 0.0f;
  const float scale = is_greedy ? 0.0f : LOG2_E / temperature;

  const Row<T> row(logits, stride, rows == nullptr ? item : rows[item], vocab_size);
  maxima += static_cast<long long>(item) * row.num_tiles;
  sums += static_cast<long long>(item) * row.num_tiles;
  constexpr int WARPS = SCAN_THREADS / WARP_SIZE;
  const int num_warps = int(gridDim.x) * WARPS;
  const int warp = int(blockIdx.x) * WARPS + int(threadIdx.x) / WARP_SIZE;
  const bool is_writer = threadIdx.x % WARP_SIZE == 0;
  for (int first = warp; first < row.num_tiles; first += SCAN_TILES * num_warps) {
    Share<T> shares[SCAN_TILES];
#pragma unroll
    for (int i = 0; i < SCAN_TILES; ++i)
      if (first + i * num_warps < row.num_tiles) shares[i] = row.load(first + i * num_warps);
#pragma unroll
    for (int i = 0; i < SCAN_TILES; ++i) {
      const int tile = first + i * num_warps;
      if (tile >= row.num_tiles) break;
      float most = -INF;
      bool is_nan = false;
#pragma unroll
      for (int j = 0; j < SHARE; ++j) {
        const float x = shares[i].get(j);
        most = fmaxf(most, x);
        is_nan |= x != x;
      }
      most = warp_max(most);
      if (__any_sync(FULL_WARP, is_nan)) most = __uint_as_float(0x7fc00000u);
      float sum = 0.0f;
      if (!is_greedy && most > -INF) {
#pragma unroll
        for (int j = 0; j < SHARE; ++j) sum += weight_of(shares[i].get(j), most, scale);
        sum = warp_sum(sum);
      }
      if (is_writer) {
        maxima[tile] = most;
        if (!is_greedy) sums[tile] = sum;
      }
    }
  }
}

// Uniform random number in (0, 1) of a seed and a position.
__device__ __forceinline__ double uniform(uint64_t seed, uint64_t position) {
  uint32_t c0 = uint32_t(position), c1 = uint32_t(position >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(c0) * 0xd2511f53u, p1 = uint64_t(c2) * 0xcd9e8d57u;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(p0);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return (double(uint64_t(c0) << 20 | c1 >> 12) + 0.5) * 2.220446049250313e-16;  // 2^-52
}

// Returns the least x <= most with x / temperature >= bound; requires bound <= most / temperature. A warp tests 32 numbers at a
// time; all its lanes call and get the result.
__device__ __forceinline__ float least_reaching(float bound, float temperature, float most) {
  if (temperature == 1.0f) return bound;
  const uint32_t lane = threadIdx.x % WARP_SIZE;
  uint32_t low = LOWEST_KEY, high = key_of(most);  // invariant: high reaches the bound
  while (low < high) {
    const uint32_t step = (high - low) / WARP_SIZE + 1u;
    const uint32_t beyond = (lane + 1u) * step - 1u;  // distance from low; 32 * step is more than high - low
    const uint32_t point = beyond < high - low ? low + beyond : high;
    const unsigned reaching = __ballot_sync(FULL_WARP, of_key(point) / temperature >= bound);
    const uint32_t first = uint32_t(__ffs(int(reaching)) - 1);  // never empty: the last lane tests high
    const uint32_t end = (first + 1u) * step - 1u;
    if (end < high - low) high = low + end;
    low += first * step;
  }
  return of_key(high);
}

// The least number of units that is at least p of the total, and at least 1.
__device__ __forceinline__ uint64_t share_of(uint64_t total, double p) {
  const double share = p * double(total);
  const uint64_t below = uint64_t(share);
  const uint64_t units = below + (double(below) < share ? 1u : 0u);
  return units == 0 ? uint64_t(1) : units < total ? units : total;
}

// Candidates of a row: logits from `floor` on.
template <class T>
struct Filter {
  const Row<T>& row;
  const float* maxima;
  Bins& bins;
  float top, temperature, scale;
  float floor;

  __device__ __forceinline__ void raise(float least) { floor = fmaxf(floor, least); }

  // Excludes logits below x after division.
  __device__ __forceinline__ void cut_below(float x) {
    raise(least_reaching(x / temperature, temperature, x));
  }

  __device__ __forceinline__ void cut_min_p(float log_min_p) {
    const float least = top / temperature + log_min_p;
    if (least >= LOWEST) raise(least_reaching(least, temperature, top));
  }

  // Top-k, or top-p (is_by_weight): the same selection by count or by weight; a flag, so that the code exists once.
  // scanned_total: weight of all tiles; 0 if an earlier filter excluded candidates. If it is not 0, top-p first tries the tiles
  // with the largest logits, which hold p of most distributions; otherwise it reads all tiles.
  __device__ __forceinline__ void cut(bool is_by_weight, long long k, double p, uint64_t scanned_total) {
    const uint32_t least = key_of(floor);
    uint32_t first = least;
    if (!is_by_weight || scanned_total != 0)
      first = reached_by_tiles<DRAW_THREADS, KeyGrain<T>::BITS>(bins, least, top, maxima, row.num_tiles,
                                                                is_by_weight ? FEW_TILES : k);
    for (;;) {
      const bool is_part = first != least;
      const Selected last = select_in_row<DRAW_THREADS>(
          bins, row, maxima, first, top,
          [&](float x) {
            if (!(x >= floor)) return uint64_t(0);
            return is_by_weight ? units_of(weight_of(x, top, scale)) : uint64_t(1);
          },
          [&](uint64_t total) {
            return is_by_weight ? share_of(is_part ? scanned_total : total, p) : uint64_t(k);
          });
      if (last.is_reached) cut_below(number_of<T>(last));
      if (last.is_reached || !is_part) return;
      first = least;
    }
  }
};

// Interval of consecutive amounts that contains a target.
struct Place {
  int tile;
  double inside;  // position in the tile's amount, in [0, 1)
};

// Writes the token at which the cumulative weights of the candidates exceed `number` times their total. First searches the
// tiles, by their amounts in shared memory, then one tile. All threads call; one thread writes the token.
template <class T>
__device__ __forceinline__ void invert(const Row<T>& row, const float* maxima, const uint64_t* amounts, float floor,
                                       float scale, double number, int* token) {
  __shared__ Place place;
  const int per_thread = (row.num_tiles + DRAW_THREADS - 1) / DRAW_THREADS;
  const int first = int(threadIdx.x) * per_thread;
  const int end = first + per_thread < row.num_tiles ? first + per_thread : row.num_tiles;
  uint64_t sum = 0;
  for (int tile = first; tile < end; ++tile) sum += amounts[tile];
  const Cumulated cumulated = block_cumulated<DRAW_THREADS>(sum);
  const double exact = number * double(cumulated.total);
  const uint64_t target = uint64_t(exact) < cumulated.total ? uint64_t(exact) : cumulated.total - 1;
  uint64_t before = cumulated.before;
  if (before <= target && target < before + sum) {
    for (int tile = first; tile < end; ++tile) {
      const uint64_t own = amounts[tile];
      if (target < before + own) {
        place = {tile, (exact - double(before)) / double(own)};
        break;
      }
      before += own;
    }
  }
  __syncthreads();
  if (threadIdx.x >= WARP_SIZE) return;

  const int tile = place.tile;
  const float top = maxima[tile];
  const Share<T> share = row.load(tile);
  uint64_t units[SHARE], of_lane = 0;
#pragma unroll
  for (int i = 0; i < SHARE; ++i) {
    const float x = share.get(i);
    units[i] = x >= floor ? units_of(weight_of(x, top, scale)) : 0;
    of_lane += units[i];
  }
  const uint64_t with_lane = warp_cumulated(of_lane);
  const uint64_t total = shuffle(with_lane, WARP_SIZE - 1);
  const double at = place.inside * double(total);
  const uint64_t in_tile = !(at > 0.0) ? 0 : uint64_t(at) < total ? uint64_t(at) : total - 1;
  uint64_t before_lane = with_lane - of_lane;
  if (before_lane <= in_tile && in_tile < with_lane) {
    int found = 0;
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
      if (before_lane <= in_tile) found = units[i] != 0 && in_tile < before_lane + units[i] ? i : found;
      before_lane += units[i];
    }
    *token = Row<T>::first_of(tile) + found;
  }
}

// Writes the lowest id of the largest logit, or of a NaN if there is one.
template <class T>
__device__ __forceinline__ void take_largest(const Row<T>& row, const float* maxima, Largest top, int* token) {
  int first = row.num_tiles;
  for (int tile = int(threadIdx.x); tile < row.num_tiles; tile += DRAW_THREADS) {
    const float most = maxima[tile];
    if ((top.any_nan ? most != most : most == top.value) && tile < first) first = tile;
  }
  first = int(-block_max<DRAW_THREADS>(float(-first)));  // exact: far fewer than 2^24
  if (threadIdx.x >= WARP_SIZE) return;
  const Share<T> share = row.load(first);
  int mine = SHARE;
#pragma unroll
  for (int i = SHARE - 1; i >= 0; --i) {
    const float x = share.get(i);
    if (top.any_nan ? x != x : x == top.value) mine = i;
  }
  const unsigned found = __ballot_sync(FULL_WARP, mine < SHARE);
  if (int(threadIdx.x) == __ffs(int(found)) - 1) *token = Row<T>::first_of(first) + mine;
}

// Dynamic shared memory: 12 bytes per tile.
template <class T>
__device__ __forceinline__ void draw(unsigned char* shared, const T* logits, long long stride, int vocab_size,
                                     const int* rows, const DrawSettings* settings, const int* slots,
                                     const int* positions, const float* scanned_maxima, const float* scanned_sums,
                                     int* tokens) {
  __shared__ Bins bins;
  const int item = int(blockIdx.x);
  if (slots != nullptr && slots[item] < 0) return;
  const Row<T> row(logits, stride, rows == nullptr ? item : rows[item], vocab_size);
  uint64_t* amounts = reinterpret_cast<uint64_t*>(shared);
  float* maxima = reinterpret_cast<float*>(amounts + row.num_tiles);
  scanned_maxima += static_cast<long long>(item) * row.num_tiles;
  scanned_sums += static_cast<long long>(item) * row.num_tiles;
  int* const token = tokens + item;

  const Largest top = take_maxima<DRAW_THREADS>(scanned_maxima, row.num_tiles, maxima);
  const DrawSettings* mine = settings_of(settings, slots, item);
  const float temperature = mine == nullptr ? 0.0f : mine->temperature;
  if (temperature == 0.0f) {
    take_largest(row, maxima, top, token);
    return;
  }
  const float quotient = top.value / temperature;
  if (top.any_nan || !(quotient >= LOWEST && quotient <= -LOWEST)) {  // as in the reference: no candidates
    if (threadIdx.x == 0) *token = 0;
    return;
  }

  const float scale = LOG2_E / temperature;
  Filter<T> left = {row, maxima, bins, top.value, temperature, scale, LOWEST};
  left.raise(top.value + LEAST_EXPONENT * temperature);
  const bool is_min_p = mine->log_min_p > -INF;
  const bool is_top_k = mine->top_k > 0 && mine->top_k < vocab_size;
  const bool is_top_p = mine->top_p < 1.0;
  const bool is_cut = is_min_p || is_top_k || is_top_p;

  uint64_t of_thread = 0;
  for (int tile = int(threadIdx.x); tile < row.num_tiles; tile += DRAW_THREADS) {
    amounts[tile] = units_of(scanned_sums[tile] * weight_of(maxima[tile], top.value, scale));
    of_thread += amounts[tile];
  }
  if (is_cut) {
    uint64_t scanned_total = 0;
    if (!is_min_p && !is_top_k) scanned_total = block_cumulated<DRAW_THREADS>(of_thread).total;
    if (is_min_p) left.cut_min_p(mine->log_min_p);
#pragma unroll 1
    for (int i = 0; i < 2; ++i)
      if (i == 0 ? is_top_k : is_top_p) left.cut(i == 1, mine->top_k, mine->top_p, scanned_total);

    __syncthreads();  // from here on, other threads write the amounts
    for (int tile = int(threadIdx.x); tile < row.num_tiles; tile += DRAW_THREADS)
      if (maxima[tile] < left.floor) amounts[tile] = 0;
    row.template sweep<DRAW_THREADS>(maxima, left.floor, [&](int tile, const Share<T>& share) {
      const float most = maxima[tile];
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < SHARE; ++i) {
        const float x = share.get(i);
        sum += x >= left.floor ? weight_of(x, most, scale) : 0.0f;
      }
      sum = warp_sum(sum);
      if (threadIdx.x % WARP_SIZE == 0) amounts[tile] = units_of(sum * weight_of(most, top.value, scale));
    });
  }
  __syncthreads();
  invert(row, maxima, amounts, left.floor, scale, uniform(mine->seed, uint64_t(positions[item])), token);
}

}  // namespace quintet

using namespace quintet;

#define QT_SAMPLING_KERNELS(T, suffix)                                                                             \
  QT_KERNEL(SCAN_THREADS, scan_tiles_##suffix,                                                                     \
            (const T* logits, long long stride, int vocab_size, const int* rows, const DrawSettings* settings,     \
             const int* slots, float temperature, float* maxima, float* sums)) {                                   \
    scan_tiles<T>(logits, stride, vocab_size, rows, settings, slots, temperature, maxima, sums);                   \
  }                                                                                                                \
  QT_KERNEL(DRAW_THREADS, draw_##suffix,                                                                           \
            (const T* logits, long long stride, int vocab_size, const int* rows, const DrawSettings* settings,     \
             const int* slots, const int* positions, const float* maxima, const float* sums, int* tokens)) {       \
    QT_DYNAMIC_SHARED(shared);                                                                                     \
    draw<T>(shared, logits, stride, vocab_size, rows, settings, slots, positions, maxima, sums, tokens);           \
  }

QT_SAMPLING_KERNELS(bf16, bf16)
QT_SAMPLING_KERNELS(fp16, fp16)
QT_SAMPLING_KERNELS(float, fp32)
