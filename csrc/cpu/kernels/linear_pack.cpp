// Packing of weights: rows of a row-major matrix into tiles, and back.
//
// A thread owns a tile. It reads up to 64 rows of the source side by side, kLanes rows by kLanes words at a time, transposes
// them in registers and writes the tile front to back. Bytes moved: the source once, the tile once. Limiter: memory.
#include "linear_tile.hpp"

namespace qt::QT_ISA {
namespace {

constexpr index_t kVectors = kTileColumns / kLanes;

// The column of a lane of a tile, or -1 for padding.
index_t column_of(const Weight& weight, index_t tile, index_t lane) {
  if (!weight.paired) {
    const index_t column = tile * kTileColumns + lane;
    return column < weight.columns ? column : -1;
  }
  const index_t half = weight.columns / 2, column = tile * kPairedColumns + lane % kPairedColumns;
  return column >= half ? -1 : lane < kPairedColumns ? column : half + column;
}

void tile_and_lane(const Weight& weight, index_t column, index_t& tile, index_t& lane) {
  if (!weight.paired) {
    tile = column / kTileColumns, lane = column % kTileColumns;
    return;
  }
  const index_t half = weight.columns / 2, place = column < half ? column : column - half;
  tile = place / kPairedColumns, lane = place % kPairedColumns + (column < half ? 0 : kPairedColumns);
}

// The source's rows for the lanes of one tile; null where a lane is not filled.
struct Rows {
  const char* of[kTileColumns];
  bool any[kVectors], all[kVectors];
};

Rows rows_of(const PackCall& call, index_t tile) {
  const index_t size = call.source_dtype == Dtype::fp32 ? 4 : 2;
  Rows rows;
  for (index_t v = 0; v < kVectors; ++v) {
    rows.any[v] = false, rows.all[v] = true;
    for (index_t i = 0; i < kLanes; ++i) {
      const index_t column = column_of(*call.weight, tile, v * kLanes + i) - call.first;
      const bool filled = column >= 0 && column < call.count;
      rows.of[v * kLanes + i] = filled ? (const char*)call.source + column * call.source_stride * size : nullptr;
      rows.any[v] |= filled, rows.all[v] &= filled;
    }
  }
  return rows;
}

// Writes a vector of 32-bit words to lanes [v * kLanes, ...) of a row of 64, those that are filled.
QT_INLINE void put(char* row, const Rows& rows, index_t v, i32v words) {
  char* to = row + v * kLanes * 4;
  if (rows.all[v]) {
    std::memcpy(to, &words, sizeof words);
    return;
  }
  for (int i = 0; i < kLanes; ++i)
    if (rows.of[v * kLanes + i]) {
      const std::int32_t word = words[i];
      std::memcpy(to + i * 4, &word, 4);
    }
}

QT_INLINE void put(char* row, const Rows& rows, index_t v, f32v values, fp16*) {
  fp16* to = (fp16*)row + v * kLanes;
  if (rows.all[v]) return store(to, values);
  fp16 lanes[kLanes];
  store(lanes, values);
  for (int i = 0; i < kLanes; ++i)
    if (rows.of[v * kLanes + i]) to[i] = lanes[i];
}

// kLanes words (pairs of 16-bit numbers) from k of each row of vector v, one vector per pair of k. `count` words are left.
QT_INLINE void load_words(const Rows& rows, index_t v, index_t byte, index_t bytes_left, i32v (&words)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    const char* row = rows.of[v * kLanes + i];
    words[i] = i32v{};
    if (row) std::memcpy(&words[i], row + byte, bytes_left < index_t(sizeof(i32v)) ? bytes_left : sizeof(i32v));
  }
  transpose(words);
}

// bf16 from bf16: pairs of k move as they are.
void copy_pairs(const Rows& rows, index_t depth, char* tile) {
  const index_t pairs = (depth + 1) / 2;
  for (index_t p = 0; p < pairs; p += kLanes)
    for (index_t v = 0; v < kVectors; ++v) {
      if (!rows.any[v]) continue;
      i32v words[kLanes];
      load_words(rows, v, p * 4, (depth - 2 * p) * 2, words);
      const index_t count = pairs - p < kLanes ? pairs - p : kLanes;
      if (count == kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) put(tile + (p + i) * kTileColumns * 4, rows, v, words[i]);
      } else {
        for (int i = 0; i < count; ++i) put(tile + (p + i) * kTileColumns * 4, rows, v, words[i]);
      }
    }
}

template <class Element>
QT_INLINE f32v load_from(const char* row, index_t k, index_t count) { return load((const Element*)row + k, count); }

// k [begin, begin + depth) of the rows as fp32 [depth rounded up to kLanes][64]; zero where there is none.
template <class Element>
void load_block(const Rows& rows, index_t begin, index_t depth, float* block) {
  for (index_t k = 0; k < depth; k += kLanes)
    for (index_t v = 0; v < kVectors; ++v) {
      i32v words[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const char* row = rows.of[v * kLanes + i];
        words[i] = row ? as_bits(load_from<Element>(row, begin + k, depth - k)) : i32v{};
      }
      transpose(words);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(block + (k + i) * kTileColumns + v * kLanes, as_float(words[i]));
    }
}

using LoadBlock = void (*)(const Rows&, index_t, index_t, float*);
LoadBlock loader_of(Dtype source) {
  return source == Dtype::bf16 ? load_block<bf16> : source == Dtype::fp16 ? load_block<fp16> : load_block<float>;
}

QT_INLINE i32v bits_of_bf16(f32v value) {
  bf16 lanes[kLanes];
  store(lanes, value);
  i32v bits;
  for (int i = 0; i < kLanes; ++i) bits[i] = lanes[i].bits;
  return bits;
}

constexpr index_t kBlock = 128;  // k

void fill_floats(const PackCall& call, const Rows& rows, char* tile) {
  const Weight& weight = *call.weight;
  if (weight.format == Dtype::bf16 && call.source_dtype == Dtype::bf16) return copy_pairs(rows, weight.depth, tile);
  alignas(64) float block[kBlock * kTileColumns];
  const LoadBlock load_block = loader_of(call.source_dtype);
  for (index_t begin = 0; begin < weight.depth; begin += kBlock) {
    const index_t depth = weight.depth - begin < kBlock ? weight.depth - begin : kBlock;
    load_block(rows, begin, depth, block);
    for (index_t k = 0; k < depth; ++k)
      for (index_t v = 0; v < kVectors; ++v) {
        if (!rows.any[v]) continue;
        const float* from = block + k * kTileColumns + v * kLanes;
        if (weight.format == Dtype::fp32) {
          put(tile + (begin + k) * kTileColumns * 4, rows, v, as_bits(load(from)));
        } else if (weight.format == Dtype::fp16) {
          put(tile + (begin + k) * kTileColumns * 2, rows, v, load(from), (fp16*)nullptr);
        } else if (k % 2 == 0) {
          const i32v high = k + 1 < depth ? bits_of_bf16(load(from + kTileColumns)) : i32v{};
          put(tile + (begin + k) / 2 * kTileColumns * 4, rows, v, bits_of_bf16(load(from)) | high << 16);
        }
      }
  }
}

void fill(const void* described, index_t begin, index_t end) {
  const PackCall& call = *(const PackCall*)described;
  for (index_t i = begin; i < end; ++i) {
    const index_t tile = call.first_tile + i;
    const Rows rows = rows_of(call, tile);
    fill_floats(call, rows, call.weight->memory + tile * call.weight->tile_bytes);
  }
}

// --- back ---

// One column of a floating-point weight, as it is stored.
template <class Element>
void copy_column(const Weight& weight, index_t column, Element* out) {
  index_t tile, lane;
  tile_and_lane(weight, column, tile, lane);
  const Element* from = (const Element*)(weight.memory + tile * weight.tile_bytes);
  if constexpr (std::is_same_v<Element, bf16>)
    for (index_t k = 0; k < weight.depth; ++k) out[k] = from[(k / 2 * kTileColumns + lane) * 2 + k % 2];
  else
    for (index_t k = 0; k < weight.depth; ++k) out[k] = from[k * kTileColumns + lane];
}

template <class Element>
void read_column(const Weight& weight, index_t column, float* out) {
  index_t tile, lane;
  tile_and_lane(weight, column, tile, lane);
  const Element* from = (const Element*)(weight.memory + tile * weight.tile_bytes);
  for (index_t k = 0; k < weight.depth; ++k) {
    Element lanes[kLanes] = {};
    lanes[0] = std::is_same_v<Element, bf16> ? from[(k / 2 * kTileColumns + lane) * 2 + k % 2] : from[k * kTileColumns + lane];
    out[k] = load(lanes)[0];
  }
}

void read(const void* described, index_t begin, index_t end) {
  const PackCall& call = *(const PackCall*)described;
  const Weight& weight = *call.weight;
  for (index_t i = begin; i < end; ++i) {
    float* out = call.out + i * weight.depth;
    switch (weight.format) {
      case Dtype::bf16: read_column<bf16>(weight, call.first + i, out); break;
      case Dtype::fp16: read_column<fp16>(weight, call.first + i, out); break;
      default: read_column<float>(weight, call.first + i, out); break;
    }
  }
}

void embed(const void* described, index_t begin, index_t end) {
  const PackedEmbeddingCall& call = *(const PackedEmbeddingCall*)described;
  for (index_t i = begin; i < end; ++i) {
    const index_t column = call.token_ids[i], at = i * call.y_stride;
    switch (call.weight->format) {
      case Dtype::bf16: copy_column(*call.weight, column, (bf16*)call.y + at); break;
      case Dtype::fp16: copy_column(*call.weight, column, (fp16*)call.y + at); break;
      default: copy_column(*call.weight, column, (float*)call.y + at); break;
    }
  }
}

}  // namespace

const PackKernels pack = {fill, read, embed};

}  // namespace qt::QT_ISA
