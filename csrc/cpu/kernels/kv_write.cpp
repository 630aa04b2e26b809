// Between the projections and attention: norms over heads, rotary positions, and the write of keys and values to the cache.
//
// A piece of work is the new tokens of one row in one tile of 16 positions, with all their heads: no two pieces write the same
// tile. A query goes from q to q_out, a key is scattered over its tile (a 32-bit word every 64 bytes), a value interleaved
// with its neighbour's. Per number: 2 to 4 bytes read and written, some 5 FLOPs. Limiter: cache misses of the tiles, which
// attention reads next anyway. Reduction order: a norm sums squares of dimensions i mod lanes ascending, then the lanes
// by halves; nothing depends on other tokens.
//
// A block may hold numbers of a former tenant, NaN among them, and attention multiplies what a token does not see by 0. So
// who writes the first position of a tile clears the values of those positions that this step does not write.
#include "attention.hpp"
#include "simd.hpp"

namespace qt::QT_ISA {
namespace {

// y = norm of one head, rounded where the reference rounds.
template <class Element>
void norm(const Element* x, const Element* weight, index_t width, float eps, Element* y) {
  f32v squares = all(0.0f);
  for (index_t i = 0; i < width; i += kLanes) {
    const f32v value = load(x + i);
    squares = fma(value, value, squares);
  }
  const f32v scale = all(1.0f / __builtin_sqrtf(sum_of(squares) / float(width) + eps));
  for (index_t i = 0; i < width; i += kLanes) store(y + i, rounded_to<Element>(load(x + i) * scale) * load(weight + i));
}

// Pairs (i, i + rotary / 2) turned by their angle, what lies past the rotary dimensions copied. The products are rounded once.
template <class Element>
void rotate(const Element* x, const Element* cosines, const Element* sines, index_t rotary, index_t width, Element* y) {
  const index_t half = rotary / 2;
  for (index_t i = 0; i < half; i += kLanes) {
    const index_t count = half - i;
    const f32v first = load(x + i, count), second = load(x + half + i, count);
    const f32v turned = second * load(sines + i, count);
    const f32v other = first * load(sines + half + i, count);
    store(y + i, fma(first, load(cosines + i, count), -turned), count);
    store(y + half + i, fma(second, load(cosines + half + i, count), other), count);
  }
  if (x != y) std::memcpy(y + rotary, x + rotary, (width - rotary) * sizeof(Element));
}

template <class Element>
void turn(const KvWriteCall& call, const Element* x, const void* weight, const Element* cosines, const Element* sines,
          Element* y) {
  const index_t width = call.kv.head_dim;
  if (weight) {
    Element normed[kMaxHeadDim];
    norm(x, (const Element*)weight, width, call.eps, normed);
    rotate(normed, cosines, sines, call.rotary, width, y);
  } else {
    rotate(x, cosines, sines, call.rotary, width, y);
  }
}

// The place of row `major` (a key's dimension, or a value's key) in a column of the `width` of a plane.
template <class Stored>
QT_INLINE Stored* place(char* plane, index_t major, index_t column, index_t width) {
  if constexpr (std::is_same_v<Stored, bf16>)
    return (bf16*)plane + (major / 2 * width + column) * 2 + major % 2;
  else
    return (Stored*)plane + major * width + column;
}

// One head's numbers as they are stored; returns their scale. int8: nearest of 255 steps between the largest magnitude and
// its negative (ties to even).
template <class Element, class Stored>
QT_INLINE float stored(const Element* numbers, index_t head_dim, Stored* to) {
  if constexpr (std::is_same_v<Element, Stored>) {
    std::memcpy(to, numbers, head_dim * sizeof(Element));
    return 1.0f;
  } else {
    f32v most = all(0.0f);
    for (index_t d = 0; d < head_dim; d += kLanes) {
      const f32v value = load(numbers + d);
      most = max(most, max(value, -value));
    }
    const float largest = max_of(most), steps = largest > 0.0f ? 127.0f / largest : 0.0f;
    for (index_t d = 0; d < head_dim; d += kLanes) {
      const i32v step = to_int(round(load(numbers + d) * all(steps)));
      for (int i = 0; i < kLanes; ++i) to[d + i] = Stored(step[i]);
    }
    return largest / 127.0f;
  }
}

template <class Element, class Stored>
void write_piece(const KvWriteCall& call, const KvWritePiece& piece) {
  const PagedKv& kv = call.kv;
  const index_t width = kv.head_dim, tile = piece.position / kTileKeys, inside = piece.position % kTileKeys;
  char* keys = kv.memory + piece.blocks[tile / kv.block_tiles] * kv.block_bytes + tile % kv.block_tiles * kv.tile_bytes;
  for (index_t i = 0; i < piece.count; ++i) {
    const index_t token = piece.token + i, row = (call.rope_by_token ? token : piece.position + i) * call.rotary;
    const Element *cosines = (const Element*)call.cosines + row, *sines = (const Element*)call.sines + row;
    const Element *q = (const Element*)call.q + token * call.q_stride, *k = (const Element*)call.k + token * call.k_stride;
    const Element* v = (const Element*)call.v + token * call.v_stride;
    Element* out = (Element*)call.q_out + token * call.out_stride;
    for (index_t head = 0; head < call.heads; ++head)
      turn(call, q + head * width, call.q_norm, cosines, sines, out + head * width);
    for (index_t head = 0; head < kv.kv_heads; ++head) {
      Element key[kMaxHeadDim];
      turn(call, k + head * width, call.k_norm, cosines, sines, key);
      Stored numbers[kMaxHeadDim];
      char *key_plane = keys + head * kv.head_bytes, *value_plane = key_plane + kv.plane_bytes;
      float* scales = (float*)(value_plane + kv.plane_bytes) + inside + i;
      const float key_scale = stored(key, width, numbers);
      for (index_t d = 0; d < width; ++d) *place<Stored>(key_plane, d, inside + i, kTileKeys) = numbers[d];
      const float value_scale = stored(v + head * width, width, numbers);
      for (index_t d = 0; d < width; ++d) *place<Stored>(value_plane, inside + i, d, width) = numbers[d];
      if constexpr (!std::is_same_v<Element, Stored>) scales[0] = key_scale, scales[kTileKeys] = value_scale;
    }
  }
  if (inside == 0 && piece.count < kTileKeys) {
    for (index_t head = 0; head < kv.kv_heads; ++head) {
      char* value_plane = keys + head * kv.head_bytes + kv.plane_bytes;
      for (index_t i = piece.count; i < kTileKeys; ++i) {
        for (index_t d = 0; d < width; ++d) *place<Stored>(value_plane, i, d, width) = Stored{};
        if constexpr (!std::is_same_v<Element, Stored>) {
          float* scales = (float*)(value_plane + kv.plane_bytes) + i;
          scales[0] = scales[kTileKeys] = 0.0f;
        }
      }
    }
  }
}

template <class Element, class Stored>
void write(const void* description, index_t begin, index_t end) {
  const KvWriteCall& call = *(const KvWriteCall*)description;
  for (index_t i = begin; i < end; ++i) write_piece<Element, Stored>(call, call.pieces[i]);
}

}  // namespace

const KvWriteKernels kv_write = {
    .write = {write<bf16, bf16>, write<fp16, fp16>, write<float, float>},
    .write_bytes = {write<bf16, std::int8_t>, write<fp16, std::int8_t>, write<float, std::int8_t>},
};

}  // namespace qt::QT_ISA
