// Codes of one byte each on their way into the steps of a tile.
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

// k [first, first + count) of the filled lanes from their rows, which begin with the first, plus `added` each. Returns an
// upper bound of the codes: all their bits.
std::uint8_t put_codes(const Weight& weight, const Rows& rows, char* tile, index_t first, index_t count, std::uint8_t added) {
  const CodeStep size = step_of(weight.codes);
  const int lines = int(size.bytes / kCodeLine);
  u8v any{};
  for (index_t begin = 0; begin < count; begin += kCodesAtOnce)
    for (index_t v = 0; v < kVectors; ++v) {
      if (!rows.any[v]) continue;
      i32v fours[kCodesAtOnce / 4];
      for (index_t i = 0; i < kCodesAtOnce / 4; i += kLanes) {
        i32v words[kLanes] = {};
        if (begin + i * 4 < count) load_words(rows, v, begin + i * 4, count - begin - i * 4, words);
        for (index_t j = 0; j < kLanes; ++j) {
          const u8v codes = (u8v)words[j] + added;
          any |= codes;
          fours[i + j] = (i32v)codes;
        }
      }
      for (index_t k = 0; k < kCodesAtOnce && begin + k < count; k += size.k) {
        const StoredStep step = stored_step(weight.codes, fours + k / 4);
        char* const to = codes_at(weight, tile, first + begin + k);
        for (int line = 0; line < lines; ++line) put(to + line * kCodeLine, rows, v, step.lines[line]);
        if (weight.codes == Codes::three) put_halves(to + kCodeLine, rows, v, step.halves);
      }
    }
  std::uint8_t bits = 0;
  for (int i = 0; i < 4 * kLanes; ++i) bits = std::uint8_t(bits | any[i]);
  return bits;
}

}  // namespace
}  // namespace qt::QT_ISA
