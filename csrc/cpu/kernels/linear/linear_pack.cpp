// Packing of weights: rows of a row-major matrix to tiles, and unpacking.
//
// A thread owns a tile. It reads up to 64 rows of the source in parallel and transposes kLanes rows by kLanes words in registers.
// It writes the tile sequentially. Bytes moved: the source once, the tile once. Limiter: memory bandwidth.
#include "linear_pack.hpp"
#include "linear_pack_blocks.hpp"
#include "linear_pack_codes.hpp"
#include "linear_pack_integers.hpp"

namespace qt::QT_ISA {
namespace {

// bf16 source and weight: pairs of k are copied.
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

QT_INLINE i32v bits_of_bf16(f32v value) {
  bf16 lanes[kLanes];
  store(lanes, value);
  i32v bits;
  for (int i = 0; i < kLanes; ++i) bits[i] = lanes[i].bits;
  return bits;
}

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
    char* memory = call.weight->memory + tile * call.weight->tile_bytes;
    if (int(call.weight->format) <= int(Dtype::fp32))
      fill_floats(call, rows, memory);
    else
      fill_integers(call, rows, memory);
  }
}

// --- unpacking ---

// One column of a floating-point weight, in its stored format.
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

// One column as fp32, with the values that the kernels multiply.
void read_column(const Weight& weight, index_t column, float* out) {
  index_t tile, lane;
  tile_and_lane(weight, column, tile, lane);
  const char* from = weight.memory + tile * weight.tile_bytes;
  switch (weight.format) {
    case Dtype::bf16:
      for (index_t k = 0; k < weight.depth; ++k)
        out[k] = widened((const bf16*)from + (k / 2 * kTileColumns + lane) * 2 + k % 2);
      return;
    case Dtype::fp16:
      for (index_t k = 0; k < weight.depth; ++k) out[k] = widened((const fp16*)from + k * kTileColumns + lane);
      return;
    case Dtype::fp32:
      for (index_t k = 0; k < weight.depth; ++k) out[k] = ((const float*)from)[k * kTileColumns + lane];
      return;
    default: {
      const Reader reader(weight, from, lane);
      const index_t step = reader.in_group();
      for (index_t k = 0; k < weight.depth; k += step)
        reader.read(k, weight.depth - k < step ? weight.depth - k : step, out + k);
    }
  }
}

void read(const void* described, index_t begin, index_t end) {
  const PackCall& call = *(const PackCall*)described;
  for (index_t i = begin; i < end; ++i) read_column(*call.weight, call.first + i, call.out + i * call.out_stride);
}

template <class Element>
void embed_integers(const Weight& weight, index_t column, Element* y) {
  index_t tile, lane;
  tile_and_lane(weight, column, tile, lane);
  const Reader reader(weight, weight.memory + tile * weight.tile_bytes, lane);
  float numbers[kBlock];
  const index_t count = weight.group != kWholeDepth ? weight.group : kBlock;
  for (index_t k = 0; k < weight.depth; k += count) {
    const index_t here = weight.depth - k < count ? weight.depth - k : count;
    reader.read(k, here, numbers);
    for (index_t i = 0; i < here; i += kLanes) store(y + k + i, load(numbers + i, here - i), here - i);
  }
}

void embed(const void* described, index_t begin, index_t end) {
  const PackedEmbeddingCall& call = *(const PackedEmbeddingCall*)described;
  const Weight& weight = *call.weight;
  for (index_t i = begin; i < end; ++i) {
    const index_t column = call.token_ids[i], at = i * call.y_stride;
    const bool integers = int(weight.format) > int(Dtype::fp32);
    if (call.dtype == Dtype::bf16) {
      bf16* y = (bf16*)call.y + at;
      integers ? embed_integers(weight, column, y) : copy_column(weight, column, y);
    } else if (call.dtype == Dtype::fp16) {
      fp16* y = (fp16*)call.y + at;
      integers ? embed_integers(weight, column, y) : copy_column(weight, column, y);
    } else {
      float* y = (float*)call.y + at;
      integers ? embed_integers(weight, column, y) : copy_column(weight, column, y);
    }
  }
}

}  // namespace

const PackKernels pack = {fill, fill_codes, fill_tables, fill_blocks, read, embed};

}  // namespace qt::QT_ISA
