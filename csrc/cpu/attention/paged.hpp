// Sizes of a layer's cache, with the layout of attention.hpp. For sources that are compiled once: kernel sources share no
// inline functions.
#pragma once

#include "attention.hpp"

namespace qt {

// Bytes of 16 keys or 16 values of one head, without the scales of an int8 cache.
inline index_t plane_bytes(Dtype dtype, index_t dim) {
  if (dtype == Dtype::int4)
    return kTileKeys * dim / 2 + (dim + kFourGroup - 1) / kFourGroup * kTileKeys * 2 * index_t(sizeof(std::uint16_t));
  return kTileKeys * dim * (dtype == Dtype::fp32 ? 4 : dtype == Dtype::int8 || dtype == Dtype::fp8 ? 1 : 2);
}

inline bool takes(Dtype kv_dtype, index_t kv_heads, index_t key_width, index_t value_width, index_t block_size,
           bool values_in_keys) {
  return kv_heads > 0 && key_width > 0 && key_width <= kMaxKeyDim && value_width > 0 && value_width <= kMaxValueDim &&
         block_size > 0 && block_size % kTileKeys == 0 && !(values_in_keys && kv_dtype == Dtype::int4);
}

// Width of a head with its zero padding.
inline index_t padded(index_t width) { return (width + kTileKeys - 1) / kTileKeys * kTileKeys; }

inline PagedKv paged(Dtype dtype, index_t kv_heads, index_t key_width, index_t value_width, index_t block_size,
              bool values_in_keys) {
  PagedKv kv{};
  kv.dtype = dtype;
  kv.kv_heads = kv_heads;
  kv.key_dim = padded(key_width);
  kv.value_dim = padded(value_width);
  kv.block_tiles = block_size / kTileKeys;
  kv.key_bytes = plane_bytes(dtype, kv.key_dim);
  kv.value_bytes = values_in_keys ? 0 : plane_bytes(dtype, kv.value_dim);
  const index_t scales = dtype == Dtype::int8 ? (values_in_keys ? 1 : 2) * kTileKeys : 0;
  kv.tile_bytes = kv.key_bytes + kv.value_bytes + scales * index_t(sizeof(float));
  kv.head_bytes = kv.block_tiles * kv.tile_bytes;
  kv.block_bytes = kv_heads * kv.head_bytes;
  return kv;
}

}  // namespace qt
