// Values that are what keys begin with (latent attention), laid out as tiles of values: what multiplies values needs them with
// the dimensions of a key side by side, and in a tile of keys it is the keys of a dimension that lie so.
//
// By blocks of kLanes dimensions and keys, transposed in registers: some 2 log2(kLanes) shuffles for each vector, once for up to 16
// groups of rows, while the next chunk's keys come closer. Memory is read half as often as if values lay there too.
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

// The bits of kLanes numbers as they are stored.
template <class Stored>
using Lanes = typename LanesOf<Stored>::Type;

// kLanes keys' numbers of dimension d of a tile, one a lane.
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

// The first value_dim numbers of a tile's keys as a tile of values.
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

// A chunk with values that are a prefix of its keys: they are made and pointed to.
template <class Stored>
void take_values_of_keys(Chunk& chunk, index_t value_dim, char* room) {
  for (index_t i = 0; i < chunk.count; ++i, room += kTileKeys * value_dim * index_t(sizeof(Stored))) {
    values_of_keys<Stored>(chunk.keys[i], value_dim, room);
    chunk.values[i] = chunk.beside_values[i] = room;
  }
}

}  // namespace
}  // namespace qt::QT_ISA
