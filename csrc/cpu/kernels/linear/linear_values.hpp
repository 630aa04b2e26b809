// Floating-point codes (Values): fp8 (e4m3), and 4-bit indices into a table.
#pragma once

#include "linear_codes.hpp"
#include "linear_scales.hpp"

namespace qt::QT_ISA {
namespace {

// nf4 of bitsandbytes: means of 16 equally likely parts of a normal distribution (Dettmers et al., QLoRA, 2023, appendix E).
alignas(64) constexpr float kNormal[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
    -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
// fp4 of bitsandbytes: sign, two bits of exponent, one of fraction, in twelfths.
alignas(64) constexpr float kTwelfths[16] = {
    0.0f,  0.0625f / 12,  8.0f / 12,  1.0f,  4.0f / 12,  0.5f,  2.0f / 12,  0.25f,
    -0.0f, -0.0625f / 12, -8.0f / 12, -1.0f, -4.0f / 12, -0.5f, -2.0f / 12, -0.25f};

QT_INLINE f32v numbers_of(Values values, i32v codes) {
  return values == Values::fp8 ? eighths_of(codes) : look_up(values == Values::nf4 ? kNormal : kTwelfths, codes);
}

// Value of one code.
QT_INLINE float number_of(Values values, int code) { return numbers_of(values, all(std::int32_t(code)))[0]; }

inline constexpr float kEighthsUnit = 1.329227995784916e36f;  // 2^120, between the biases of fp8 and of fp32
inline constexpr index_t kWidenAhead = 8 << 10;  // bytes

// Widens codes sequentially, with prefetch. Whole lines: `out` needs space for all k of the last one.
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
        if constexpr (kValues == Values::fp8)  // the sign moves with the byte; otherwise as eighths_of
          number = as_float((words << (24 - 8 * i)) >> 4 & std::int32_t(0x87F00000)) * all(kEighthsUnit);
        else
          number = numbers_of(kValues, (i32v)((u32v)words >> (i % 4 * 8 + i / 4 * 4)) & 15);
        store(out + i * block + c, number * scales[c / kLanes]);
      }
    }
}

// Widens `depth` k of `block` columns of a tile, from a block's head on, to fp32 [k][block].
void widen_codes(const Weight& weight, const char* head, index_t depth, index_t column, index_t block, float* out) {
  for (index_t k = 0; k < depth; k += weight.block, head += weight.block_bytes, out += weight.block * block) {
    const index_t count = depth - k < weight.block ? depth - k : weight.block;
    if (weight.values == Values::fp8) widen_codes_as<Values::fp8>(weight, head, count, column, block, out);
    if (weight.values == Values::nf4) widen_codes_as<Values::nf4>(weight, head, count, column, block, out);
    if (weight.values == Values::fp4) widen_codes_as<Values::fp4>(weight, head, count, column, block, out);
  }
}

}  // namespace
}  // namespace qt::QT_ISA
