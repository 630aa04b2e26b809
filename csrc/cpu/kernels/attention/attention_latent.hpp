// Latent attention: transposes the first value_dim dimensions of a tile of keys into a tile of values. The value kernels need
// adjacent dimensions of one key; a tile of keys stores adjacent keys of one dimension.
//
// Blocks of kLanes dimensions by kLanes keys are transposed in registers. Cost: about 2 log2(kLanes) shuffles per vector, once
// for up to 16 groups of rows, while the keys of the next chunk are prefetched. Bytes: half of those of a cache that stores
// values separately.
#pragma once

#include "attention_tiles.hpp"

namespace qt::QT_ISA {
namespace {

template <class Stored>
struct LanesOf {
  typedef std::conditional_t<sizeof(Stored) == 4, std::int32_t, std::conditional_t<sizeof(Stored) == 2, std::uint16_t, std::int8_t>>
      Bits;
  typedef Bits Type __attribute__((vector_size(sizeof(Bits) * kLanes)));
};

// The stored bits of kLanes numbers.
template <class Stored>
using Lanes = typename LanesOf<Stored>::Type;

// Dimension d of kLanes keys of a tile, one key per lane.
template <class Stored>
QT_INLINE i32v keys_numbers(const char* tile, index_t d, index_t key) {
  if constexpr (std::is_same_v<Stored, bf16>) {
    const u32v pairs = (u32v)load_bits(tile + (d / 2 * kTileKeys + key) * 4);
    return (i32v)(d % 2 ? pairs >> 16 : pairs & 0xFFFFu);
  } else {
    Lanes<Stored> numbers;
    std::memcpy(&numbers, tile + (d * kTileKeys + key) * sizeof(Stored), sizeof numbers);
    return __builtin_convertvector(numbers, i32v);
  }
}

// Writes the first value_dim dimensions of a tile's keys to `to` as a tile of values.
template <class Stored>
void values_of_keys(const char* tile, index_t value_dim, char* to) {
  for (index_t d = 0; d < value_dim; d += kLanes)
    for (index_t key = 0; key < kTileKeys; key += kLanes) {
      i32v rows[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) rows[i] = keys_numbers<Stored>(tile, d + i, key);
      transpose(rows);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        if constexpr (std::is_same_v<Stored, bf16>) {
          const i32v pairs = rows[i & ~1] | rows[i | 1] << 16;
          if (i % 2 == 0) std::memcpy(to + ((key + i) / 2 * value_dim + d) * 4, &pairs, sizeof pairs);
        } else {
          const Lanes<Stored> numbers = __builtin_convertvector(rows[i], Lanes<Stored>);
          std::memcpy(to + ((key + i) * value_dim + d) * sizeof(Stored), &numbers, sizeof numbers);
        }
    }
}

// Fills the buffer with the values of a chunk, transposed from its keys, and sets the chunk's value pointers.
template <class Stored>
void take_values_of_keys(Chunk& chunk, index_t value_dim, char* room) {
  for (index_t i = 0; i < chunk.count; ++i, room += kTileKeys * value_dim * index_t(sizeof(Stored))) {
    values_of_keys<Stored>(chunk.keys[i], value_dim, room);
    chunk.values[i] = chunk.beside_values[i] = room;
  }
}

}  // namespace
}  // namespace qt::QT_ISA
