// Histogram of the values in a row of 16-bit logits: at most 65 536 values, and far fewer in a relevant range.
#pragma once

#include "logit_row.hpp"

namespace qt::QT_ISA {
namespace {

// 16-bit floats to unsigned numbers of the same order, and back. No NaN.
QT_INLINE std::uint16_t order_of(std::uint16_t bits) {
  return bits ^ std::uint16_t(std::int16_t(bits) >> 15 | std::int16_t(0x8000));
}
QT_INLINE std::uint16_t bits_of(std::uint16_t order) {
  return order ^ (order & 0x8000 ? std::uint16_t(0x8000) : std::uint16_t(0xFFFF));
}

// The bits of `value` in the format, or of an adjacent number; denormals are kept.
QT_INLINE std::uint16_t bits_near(float value, bf16) { return narrow_bits(value); }
QT_INLINE std::uint16_t bits_near(float value, fp16) { return half_bits(value); }

constexpr index_t kTogether = 8;

// True if all counts of kTogether values are zero.
QT_INLINE bool none_of(const std::uint32_t* counts) {
  std::uint64_t words[kTogether];
  std::memcpy(words, counts, sizeof words / 2);
  std::memcpy(words + kTogether / 2, counts + 65536, sizeof words / 2);
  std::uint64_t any = 0;
  for (std::uint64_t word : words) any |= word;
  return !any;
}

// Lists the distinct logits from `least` to `most`, descending, with their counts. Returns their number, padded with -inf and 0
// to whole vectors. counts: kCounts elements; values, times: vocab_size elements plus a vector.
template <class Element>
index_t count_values(const Element* x, index_t vocab_size, const float* maxima, float least, float most,
                     std::uint32_t* counts, float* values, float* times) {
  index_t first_order = order_of(bits_near(least, Element{}));
  first_order -= first_order > 0;  // `least` may be rounded up; the loop below drops smaller values
  const index_t size = order_of(bits_near(most, Element{})) - first_order + 2;  // place 0 counts everything below
  // Two tables, for even and odd indices, so that consecutive increments do not depend on each other.
  for (int table = 0; table < 2; ++table) std::memset(counts + table * 65536, 0, size * sizeof(std::uint32_t));
  for (index_t b = 0, i = 0; i < vocab_size; ++b, i += kBlock) {
    if (maxima[b] < least) continue;
    const index_t n = vocab_size - i < kBlock ? vocab_size - i : kBlock;
    std::int32_t places[kBlock];
    for (index_t j = 0; j < n; ++j) {
      const std::int32_t place = std::int32_t(order_of(x[i + j].bits)) - std::int32_t(first_order) + 1;
      places[j] = place < 0 ? 0 : place;
    }
    for (index_t j = 0; j < n; ++j) ++counts[(j & 1) * 65536 + places[j]];
  }
  index_t different = 0;
  for (index_t place = size - 1; place > 0; --place) {
    while (place >= kTogether && none_of(counts + place + 1 - kTogether)) place -= kTogether;
    if (place <= 0) break;
    const std::uint32_t count = counts[place] + counts[65536 + place];
    if (!count) continue;
    Element value;
    value.bits = bits_of(std::uint16_t(first_order + place - 1));
    const float wide = load(&value, 1)[0];
    if (wide < least) break;
    values[different] = wide;
    times[different++] = float(count);
  }
  index_t whole = different;
  for (; whole % kLanes; ++whole) {
    values[whole] = -__builtin_inff();
    times[whole] = 0;
  }
  return whole;
}

}  // namespace
}  // namespace qt::QT_ISA
