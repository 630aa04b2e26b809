// Norms over heads, rotary embedding, and the write of keys and values to the paged KV cache.
//
// A thread owns a piece: the new tokens of one row in one tile of 16 positions, with all heads. No two pieces write the same
// tile. Queries go from q to q_out. A key is scattered over its tile (a 32-bit word every 64 bytes). A value is interleaved with
// the other value of its pair. Per number: 2 to 4 bytes read and written, about 5 FLOPs. Limiter: cache misses of the tiles,
// which attention reads next. Reduction order: a norm sums squares of dimensions i mod lanes, ascending, then the lanes by
// halves. Independent of batch size and of other tokens.
//
// A reused block may hold NaN of an earlier request, and attention multiplies unseen values by 0. The piece that writes a tile's
// first position therefore clears the values of the positions that this step does not write. With values_in_keys it clears their
// keys.
#include "attention_tiles.hpp"

namespace qt::QT_ISA {
namespace {

// y = norm of one head, with the roundings of `rms_norm` in pointwise.cpp; y may be x.
template <class Element>
void norm(const Element* x, const Element* weight, index_t width, float eps, float offset, Element* y) {
  f32v squares = all(0.0f);
  for (index_t i = 0; i < width; i += kLanes) {
    const f32v value = load(x + i, width - i);
    squares = fma(value, value, squares);
  }
  const f32v scale = all(1.0f / __builtin_sqrtf(sum_of(squares) / float(width) + eps));
  for (index_t i = 0; i < width; i += kLanes) {
    const f32v normed = load(x + i, width - i) * scale, factor = load(weight + i, width - i);
    store(y + i, offset == 0.0f ? rounded_to<Element>(normed) * factor : normed * (all(offset) + factor), width - i);
  }
}

// Rotates pairs (i, i + rotary / 2). One product is rounded, the other is fused.
template <class Element>
void rotate_halves(const Element* x, const Element* cosines, const Element* sines, index_t rotary, Element* y) {
  const index_t half = rotary / 2;
  for (index_t i = 0; i < half; i += kLanes) {
    const index_t count = half - i;
    const f32v first = load(x + i, count), second = load(x + half + i, count);
    const f32v turned = second * load(sines + i, count);
    const f32v other = first * load(sines + half + i, count);
    store(y + i, fma(first, load(cosines + i, count), -turned), count);
    store(y + half + i, fma(second, load(cosines + half + i, count), other), count);
  }
}

// Permutation: lane i of the result is lane `from[i]`.
QT_INLINE f32v lanes_of(f32v value, i32v from) {
#if defined(__clang__)
  f32v result;
  for (int i = 0; i < kLanes; ++i) result[i] = value[from[i]];
  return result;
#else
  return __builtin_shuffle(value, from);
#endif
}

// Rotates pairs (2 i, 2 i + 1), with the roundings of rotate_halves.
template <class Element>
void rotate_interleaved(const Element* x, const Element* cosines, const Element* sines, index_t rotary, Element* y) {
  i32v other, pair;
  f32v sign;
  for (int i = 0; i < kLanes; ++i) other[i] = i ^ 1, pair[i] = i / 2, sign[i] = i % 2 ? 1.0f : -1.0f;
  for (index_t i = 0; i < rotary; i += kLanes) {
    const index_t count = rotary - i, pairs = count < kLanes ? count / 2 : kLanes / 2;
    const f32v value = load(x + i, count);
    const f32v sine = lanes_of(load(sines + i / 2, pairs), pair) * sign;
    store(y + i, fma(value, lanes_of(load(cosines + i / 2, pairs), pair), lanes_of(value, other) * sine), count);
  }
}

// A head of queries or keys: norm and rotation in the order of the layer, zero-padded to `padded`.
template <class Element>
void turn(const AttentionLayer& layer, const Element* x, const void* weight, const Element* cosines, const Element* sines,
          index_t padded, Element* y) {
  const index_t width = layer.key_width, begin = layer.rotary_first, rotary = layer.rotary;
  Element normed[kMaxKeyDim];
  if (weight && !layer.norms_after_rope) {
    norm(x, (const Element*)weight, width, layer.eps, layer.norm_offset, normed);
    x = normed;
  }
  std::memcpy(y, x, begin * sizeof(Element));
  if (layer.interleaved)
    rotate_interleaved(x + begin, cosines, sines, rotary, y + begin);
  else
    rotate_halves(x + begin, cosines, sines, rotary, y + begin);
  const index_t end = begin + rotary;
  std::memcpy(y + end, x + end, (width - end) * sizeof(Element));
  if (weight && layer.norms_after_rope) norm(y, (const Element*)weight, width, layer.eps, layer.norm_offset, y);
  std::memset(y + width, 0, (padded - width) * sizeof(Element));
}

// Scales queries by a factor that grows with the position (Llama 4's temperature, Qwen 1's logarithm); one more rounding.
template <class Element>
void grow(const AttentionLayer& layer, index_t position, index_t count, Element* q) {
  const index_t shifted = position + layer.shift;
  if (shifted <= 0) return;
  const float periods = layer.in_parts ? float(shifted) / float(layer.period) : float(shifted / layer.period);
  const f32v factor = all(1.0f + layer.growth * __builtin_log1pf(periods));
  for (index_t i = 0; i < count; i += kLanes) store(q + i, load(q + i) * factor);
}

// int4: the nearest of 16 steps (ties to even) from the minimum to the maximum of each kFourGroup of a head, without padding.
// Step and minimum are rounded to fp16 first. codes: [padded]. factors: of this position, [groups][2][kTileKeys].
struct Four {
  std::uint8_t pair;
};

QT_INLINE float to_half(float value, fp16* to) {
  value = value < 65504.0f ? value : 65504.0f;
  to->bits = half_bits(value > -65504.0f ? value : -65504.0f);
  float half[kLanes];
  store(half, load(to, 1));
  return half[0];
}

template <class Element>
void in_fours(const Element* numbers, index_t width, index_t padded, std::uint8_t* codes, fp16* factors) {
  float wide[kMaxKeyDim + kLanes];
  for (index_t d = 0; d < width; d += kLanes) store(wide + d, load(numbers + d, width - d));
  for (index_t d = width; d < padded; ++d) wide[d] = wide[width - 1];
  for (index_t begin = 0; begin < padded; begin += kFourGroup, factors += 2 * kTileKeys) {
    const index_t end = begin + kFourGroup < padded ? begin + kFourGroup : padded;
    f32v most = load(wide + begin), least = most;
    for (index_t d = begin + kLanes; d < end; d += kLanes) {
      most = max(load(wide + d), most);
      least = min(load(wide + d), least);
    }
    const float low = -max_of(-least), step = to_half((max_of(most) - low) / 15.0f, factors);
    const f32v from = all(to_half(low, factors + kTileKeys)), steps = all(step > 0.0f ? 1.0f / step : 0.0f);
    for (index_t d = begin; d < end; d += kLanes) {
      const i32v code = to_int(round(min(max((load(wide + d) - from) * steps, all(0.0f)), all(15.0f))));
      for (int i = 0; i < kLanes; ++i) codes[d + i] = std::uint8_t(code[i]);
    }
  }
}

QT_INLINE fp16* factors_of(char* plane, index_t dim, index_t position) {
  return (fp16*)(plane + kTileKeys / 2 * dim) + position;
}

QT_INLINE void put_code(char* plane, index_t major, index_t column, index_t width, std::uint8_t code) {
  std::uint8_t& pair = ((Four*)plane)[major / 2 * width + column].pair;
  pair = std::uint8_t(major % 2 ? (pair & 0x0F) | code << 4 : (pair & 0xF0) | code);
}

// Writes a head's key, or value, at position i of the tile.
template <class Element>
void put_key(const Element* key, index_t width, const PagedKv& kv, char* plane, index_t i) {
  std::uint8_t codes[kMaxKeyDim];
  in_fours(key, width, kv.key_dim, codes, factors_of(plane, kv.key_dim, i));
  for (index_t d = 0; d < kv.key_dim; ++d) put_code(plane, d, i, kTileKeys, codes[d]);
}

template <class Element>
void put_value(const Element* value, index_t width, const PagedKv& kv, char* plane, index_t i) {
  std::uint8_t codes[kMaxKeyDim];
  in_fours(value, width, kv.value_dim, codes, factors_of(plane, kv.value_dim, i));
  for (index_t d = 0; d < kv.value_dim; ++d) put_code(plane, i, d, kv.value_dim, codes[d]);
}

// fp8: the nearest e4m3 (ties to even) of number / scale, at most 448, as torch rounds. NaN becomes 448; torch keeps it. From
// 2^-6 on, the lowest 20 bits are rounded away. Smaller numbers are multiples of 2^-9.
template <class Element>
QT_INLINE void in_eighths(const Element* numbers, index_t width, index_t padded, float scale, Eighth* to) {
  for (index_t d = 0; d < padded; d += kLanes) {
    const f32v value = (d < width ? load(numbers + d, width - d) : all(0.0f)) / all(scale);
    const f32v magnitude = min(max(value, -value), all(448.0f));
    const i32v bits = as_bits(magnitude);
    const i32v normal = (bits + all(0x7FFFF) + (bits >> 20 & 1)) >> 20;
    const i32v small = as_bits(magnitude + all(16384.0f)) - as_bits(all(16384.0f));
    const i32v is_small = magnitude < all(0x1p-6f);
    const i32v code = (is_small & small) | (~is_small & (normal - (120 << 3)));
    const i32v sign = (i32v)((u32v)as_bits(value) >> 24) & 0x80;
    for (int i = 0; i < kLanes; ++i) to[d + i].bits = std::uint8_t(code[i] | sign[i]);
  }
}

// True if each head has its own scale.
template <class Stored>
inline constexpr bool kScaled = std::is_same_v<Stored, std::int8_t>;

// Address of row `major` (dimension of a key, or key of a value) and a column in a plane of `width` columns.
template <class Stored>
QT_INLINE Stored* place(char* plane, index_t major, index_t column, index_t width) {
  if constexpr (std::is_same_v<Stored, bf16>)
    return (bf16*)plane + (major / 2 * width + column) * 2 + major % 2;
  else
    return (Stored*)plane + major * width + column;
}

// Quantizes one head for the cache, zero-padded to `padded`, a multiple of 16; returns its scale. `scale`: fp8 only. int8:
// nearest of 255 steps between the largest magnitude and its negative (ties to even).
template <class Element, class Stored>
QT_INLINE float stored(const Element* numbers, index_t width, index_t padded, float scale, Stored* to) {
  if constexpr (std::is_same_v<Stored, Eighth>) {
    in_eighths(numbers, width, padded, scale, to);
    return scale;
  } else if constexpr (std::is_same_v<Element, Stored>) {
    std::memcpy(to, numbers, width * sizeof(Element));
    std::memset(to + width, 0, (padded - width) * sizeof(Element));
    return 1.0f;
  } else {
    f32v most = all(0.0f);
    for (index_t d = 0; d < width; d += kLanes) {
      const f32v value = load(numbers + d, width - d);
      most = max(most, max(value, -value));
    }
    const float largest = max_of(most), steps = largest > 0.0f ? 127.0f / largest : 0.0f;
    for (index_t d = 0; d < padded; d += kLanes) {
      const i32v step = to_int(round((d < width ? load(numbers + d, width - d) : all(0.0f)) * all(steps)));
      for (int i = 0; i < kLanes; ++i) to[d + i] = Stored(step[i]);
    }
    return largest / 127.0f;
  }
}

// Clears the value at position i of the tile, and its scales.
template <class Stored>
void clear(const KvWriteCall& call, char* tile, index_t i) {
  const PagedKv& kv = call.kv;
  char* value_plane = tile + kv.key_bytes;
  if constexpr (std::is_same_v<Stored, Four>) {  // zero factors suffice for any code
    for (index_t d = 0; d < kv.key_dim; d += kFourGroup)
      for (index_t which : {0, 1}) factors_of(tile, kv.key_dim, i)[(d / kFourGroup * 2 + which) * kTileKeys] = fp16{};
    for (index_t d = 0; d < kv.value_dim; d += kFourGroup)
      for (index_t which : {0, 1}) factors_of(value_plane, kv.value_dim, i)[(d / kFourGroup * 2 + which) * kTileKeys] = fp16{};
    return;
  } else {
    const bool in_keys = call.layer.values_in_keys;
    if (in_keys)
      for (index_t d = 0; d < kv.value_dim; ++d) *place<Stored>(tile, d, i, kTileKeys) = Stored{};
    else
      for (index_t d = 0; d < kv.value_dim; ++d) *place<Stored>(value_plane, i, d, kv.value_dim) = Stored{};
    if constexpr (kScaled<Stored>) {
      float* scales = (float*)(value_plane + kv.value_bytes) + i;
      scales[0] = 0.0f;
      if (!in_keys) scales[kTileKeys] = 0.0f;
    }
  }
}

// fp8 scale of a KV head.
QT_INLINE float scale_of(const float* scales, index_t head) { return scales ? scales[head] : 1.0f; }

template <class Element, class Stored>
void write_piece(const KvWriteCall& call, const KvWritePiece& piece) {
  const PagedKv& kv = call.kv;
  const AttentionLayer& layer = call.layer;
  const index_t tile = piece.position / kTileKeys, inside = piece.position % kTileKeys;
  const index_t block = piece.blocks[tile / kv.block_tiles];
  const index_t own_heads = block % call.sharers == call.sharer ? layer.kv_heads : 0;
  char* keys = kv.memory + block * kv.block_bytes + tile % kv.block_tiles * kv.tile_bytes;
  for (index_t i = 0; i < piece.count; ++i) {
    const index_t token = piece.token + i, position = piece.position + i;
    const index_t row = (call.rotation.by_token ? token : position) * layer.rotary;
    const Element *cosines = (const Element*)call.rotation.cosines + row, *sines = (const Element*)call.rotation.sines + row;
    const Element *q = (const Element*)call.q + token * call.q_stride, *k = (const Element*)call.k + token * call.k_stride;
    const Element* v = (const Element*)call.v + token * call.v_stride;
    Element* out = (Element*)call.q_out + token * call.out_stride;
    for (index_t head = 0; head < layer.heads; ++head)
      turn(layer, q + head * layer.key_width, layer.q_norm, cosines, sines, kv.key_dim, out + head * kv.key_dim);
    if (layer.growth != 0.0f) grow(layer, position, layer.heads * kv.key_dim, out);
    for (index_t head = 0; head < own_heads; ++head) {
      Element key[kMaxKeyDim];
      turn(layer, k + head * layer.key_width, layer.k_norm, cosines, sines, kv.key_dim, key);
      char *key_plane = keys + head * kv.head_bytes, *value_plane = key_plane + kv.key_bytes;
      if constexpr (std::is_same_v<Stored, Four>) {
        put_key(key, layer.key_width, kv, key_plane, inside + i);
        put_value(v + head * layer.value_width, layer.value_width, kv, value_plane, inside + i);
      } else {
        Stored numbers[kMaxKeyDim];
        float* scales = (float*)(value_plane + kv.value_bytes) + inside + i;
        const float key_scale = stored(key, kv.key_dim, kv.key_dim, scale_of(layer.key_scales, head), numbers);
        for (index_t d = 0; d < kv.key_dim; ++d) *place<Stored>(key_plane, d, inside + i, kTileKeys) = numbers[d];
        if constexpr (kScaled<Stored>) scales[0] = key_scale;
        if (layer.values_in_keys) continue;
        const float value_scale =
            stored(v + head * layer.value_width, layer.value_width, kv.value_dim, scale_of(layer.value_scales, head), numbers);
        for (index_t d = 0; d < kv.value_dim; ++d) *place<Stored>(value_plane, inside + i, d, kv.value_dim) = numbers[d];
        if constexpr (kScaled<Stored>) scales[kTileKeys] = value_scale;
      }
    }
  }
  if (inside == 0)
    for (index_t head = 0; head < own_heads; ++head)
      for (index_t i = piece.count; i < kTileKeys; ++i) clear<Stored>(call, keys + head * kv.head_bytes, i);
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
    .write_fours = {write<bf16, Four>, write<fp16, Four>, write<float, Four>},
    .write_eighths = {write<bf16, Eighth>, write<fp16, Eighth>, write<float, Eighth>},
};

}  // namespace qt::QT_ISA
