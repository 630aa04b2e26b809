// Packs codes of one byte each into the steps of a tile.
#pragma once

#include "linear_pack_integers.hpp"

namespace qt::QT_ISA {
namespace {

typedef std::uint8_t u8v __attribute__((vector_size(4 * kLanes)));

inline constexpr index_t kCodesAtOnce = 64;  // k; whole steps

QT_INLINE void put_halves(char* row, const Rows& rows, index_t v, i32v values) {
  for (int i = 0; i < kLanes; ++i)
    if (rows.of[v * kLanes + i]) {
      const std::uint16_t half = std::uint16_t(values[i]);
      std::memcpy(row + (v * kLanes + i) * 2, &half, 2);
    }
}

template <Codes kCodes>
std::uint8_t put_codes_as(const Weight& weight, const Rows& rows, char* tile, index_t first, index_t count, std::uint8_t added) {
  constexpr CodeStep size = step_of(kCodes);
  u8v any{};
  for (index_t begin = 0; begin < count; begin += kCodesAtOnce)
    for (index_t v = 0; v < kVectors; ++v) {
      if (!rows.any[v]) continue;
      i32v fours[kCodesAtOnce / 4];
#pragma GCC unroll 4
      for (index_t i = 0; i < kCodesAtOnce / 4; i += kLanes) {
        i32v words[kLanes];
        load_words(rows, v, begin + i * 4, count - begin - i * 4, words);
#pragma GCC unroll 16
        for (index_t j = 0; j < kLanes; ++j) {
          const u8v codes = (u8v)words[j] + added;
          any |= codes;
          fours[i + j] = (i32v)codes;
        }
      }
      char* to = codes_at(weight, tile, first + begin);
      index_t left = weight.block - (first + begin) % weight.block;  // of its block
      for (index_t k = 0; k < kCodesAtOnce && begin + k < count; k += size.k) {
        const StoredStep step = stored_step(kCodes, fours + k / 4);
        for (int line = 0; line < lines_of(kCodes); ++line) put(to + line * kCodeLine, rows, v, step.lines[line]);
        if constexpr (kCodes == Codes::three) put_halves(to + kCodeLine, rows, v, step.halves);
        to += size.bytes, left -= size.k;
        if (left <= 0) to += weight.head_bytes, left = weight.block;
      }
    }
  std::uint8_t bits = 0;
  for (int i = 0; i < 4 * kLanes; ++i) bits = std::uint8_t(bits | any[i]);
  return bits;
}

// Packs k [first, first + count) of the filled lanes from their rows, which begin at k = first. Adds `added` to each code.
// Returns the OR of all codes.
std::uint8_t put_codes(const Weight& weight, const Rows& rows, char* tile, index_t first, index_t count, std::uint8_t added) {
  switch (weight.codes) {
    case Codes::four: return put_codes_as<Codes::four>(weight, rows, tile, first, count, added);
    case Codes::table: return put_codes_as<Codes::table>(weight, rows, tile, first, count, added);
    case Codes::six: return put_codes_as<Codes::six>(weight, rows, tile, first, count, added);
    case Codes::five: return put_codes_as<Codes::five>(weight, rows, tile, first, count, added);
    case Codes::three: return put_codes_as<Codes::three>(weight, rows, tile, first, count, added);
    case Codes::two: return put_codes_as<Codes::two>(weight, rows, tile, first, count, added);
    default: return put_codes_as<Codes::eight>(weight, rows, tile, first, count, added);
  }
}

}  // namespace
}  // namespace qt::QT_ISA
