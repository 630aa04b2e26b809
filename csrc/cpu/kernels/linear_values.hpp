// Codes that stand for floating-point numbers: fp8 (e4m3), and what 4 bits choose from a table, of all columns or of one (Values).
#pragma once

#include "linear_codes.hpp"
#include "linear_scales.hpp"

namespace qt::QT_ISA {
namespace {

// bitsandbytes' "nf4": means of 16 equally likely parts of a normal distribution (Dettmers et al., QLoRA, 2023, appendix E).
alignas(64) constexpr float kNormal[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
    -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
// Its "fp4": a sign, two bits of exponent, one of fraction, of twelve.
alignas(64) constexpr float kTwelfths[16] = {
    0.0f,  0.0625f / 12,  8.0f / 12,  1.0f,  4.0f / 12,  0.5f,  2.0f / 12,  0.25f,
    -0.0f, -0.0625f / 12, -8.0f / 12, -1.0f, -4.0f / 12, -0.5f, -2.0f / 12, -0.25f};

QT_INLINE f32v numbers_of(Values values, i32v codes) {
  return values == Values::fp8 ? eighths_of(codes) : look_up(values == Values::nf4 ? kNormal : kTwelfths, codes);
}

// Of one number.
QT_INLINE float number_of(Values values, int code) { return numbers_of(values, all(std::int32_t(code)))[0]; }

inline constexpr float kEighthsUnit = 1.329227995784916e36f;  // 2^120, between the biases of fp8 and of fp32
inline constexpr index_t kWidenAhead = 8 << 10;  // bytes

// Front to back, and so that what comes next is on its way. Whole lines: `out` has room for the last one's k.
template <Values kValues>
void widen_codes_as(const Weight& weight, const char* head, index_t depth, index_t column, index_t block, float* out) {
  constexpr int in_line = kValues == Values::fp8 ? 4 : 8;  // k
  f32v scales[kTileColumns / kLanes], shift;
  for (index_t c = 0; c < block; c += kLanes)
    scales_of(weight.scales, head, 0, column + c, 0.0f, scales[c / kLanes], shift);
  const char* line = head + weight.head_bytes + column * 4;
  for (index_t k = 0; k < depth; k += in_line, line += kCodeLine, out += in_line * block)
    for (index_t c = 0; c < block; c += kLanes) {
      __builtin_prefetch(line + kWidenAhead + c * 4, 0, 3);
      const i32v words = load_bits(line + c * 4);
#pragma GCC unroll 8
      for (int i = 0; i < in_line; ++i) {
        f32v number;
        if constexpr (kValues == Values::fp8)  // the byte's sign stays where it is moved to; the rest is eighths_of
          number = as_float((words << (24 - 8 * i)) >> 4 & std::int32_t(0x87F00000)) * all(kEighthsUnit);
        else
          number = numbers_of(kValues, (i32v)((u32v)words >> (i % 4 * 8 + i / 4 * 4)) & 15);
        store(out + i * block + c, number * scales[c / kLanes]);
      }
    }
}

// The table of a lane.
QT_INLINE float* table_at(char* tile, index_t lane) { return (float*)(tile + kTileColumns * 4) + lane * 16; }
QT_INLINE const float* table_at(const char* tile, index_t lane) { return (const float*)(tile + kTileColumns * 4) + lane * 16; }

// Where a column's word of a line has each k.
alignas(64) constexpr std::int32_t kBitsOfWord[16] = {0, 8, 16, 24, 4, 12, 20, 28, 0, 8, 16, 24, 4, 12, 20, 28};

// Lanes from the eighth on are the other's.
QT_INLINE i32v with_upper_lanes(i32v lanes, i32v other) {
  i32v upper{};
  for (int i = 8; i < kLanes; ++i) upper[i] = -1;
  return upper ? other : lanes;
}

// Tables of a tile's columns. A vector of k of one column chooses from its table, which is in a register or two; so many columns are
// turned over then. Whole lines, and whole vectors of k: `out` has room for them.
void widen_tables(const char* tile, const char* line, index_t depth, index_t column, index_t block, float* out) {
  constexpr index_t in_line = 8, together = kLanes > in_line ? kLanes : in_line;  // k
  for (index_t k = 0; k < depth; k += together, line += together / in_line * kCodeLine, out += together * block) {
    const char* const second = depth - k > in_line ? line + kCodeLine : line;  // where a vector is two lines
    for (index_t c = 0; c < block; c += kLanes) {
      __builtin_prefetch(line + kWidenAhead + (column + c) * 4, 0, 3);
      if (kLanes > in_line) __builtin_prefetch(line + kWidenAhead + kCodeLine + (column + c) * 4, 0, 3);
      for (index_t from = 0; from < together; from += kLanes) {
        const u32v shifts = (u32v)load_bits(kBitsOfWord + from);
        i32v turned[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          i32v words = spread_word(line + (column + c + i) * 4);
          if constexpr (kLanes > in_line) words = with_upper_lanes(words, spread_word(second + (column + c + i) * 4));
          turned[i] = as_bits(look_up(table_at(tile, column + c + i), (i32v)((u32v)words >> shifts) & 15));
        }
        transpose(turned);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(out + (from + i) * block + c, as_float(turned[i]));
      }
    }
  }
}

// Outliers among the numbers of a tile's `block` columns, of the piece of k that begins at `k`.
void put_outliers(const Weight& weight, index_t tile, index_t k, index_t column, index_t block, float* out) {
  const Outliers& outliers = weight.outliers;
  if (!outliers.begins) return;
  const std::uint32_t* const runs = outliers.begins + outlier_run(weight, tile, k, column);
  const Outlier* const end = outliers.numbers + runs[block / kOutlierColumns];
  for (const Outlier* its = outliers.numbers + runs[0]; its < end; ++its) out[its->k * block + its->lane - column] = its->number;
}

// `depth` k of a tile's `block` columns, from a block's head on, which is at `begin`, as fp32 [k][block].
void widen_codes(const Weight& weight, index_t tile, index_t begin, const char* head, index_t depth, index_t column, index_t block,
                 float* out) {
  if (weight.values == Values::tables) {
    widen_tables(weight.memory + tile * weight.tile_bytes, head, depth, column, block, out);
    return put_outliers(weight, tile, begin, column, block, out);
  }
  for (index_t k = 0; k < depth; k += weight.block, head += weight.block_bytes, out += weight.block * block) {
    const index_t count = depth - k < weight.block ? depth - k : weight.block;
    if (weight.values == Values::fp8) widen_codes_as<Values::fp8>(weight, head, count, column, block, out);
    if (weight.values == Values::nf4) widen_codes_as<Values::nf4>(weight, head, count, column, block, out);
    if (weight.values == Values::fp4) widen_codes_as<Values::fp4>(weight, head, count, column, block, out);
  }
}

}  // namespace
}  // namespace qt::QT_ISA
