// Packing of prequantized weights: integer codes, scales and zero points, without rounding.
//
// A single scale per column is stored as the column's scale. Group scales are fp32 if the format stores fp32. Otherwise they are
// fp16: fp16 scales of the checkpoint are stored unchanged. Others are divided by a power of two for each column, so that the
// largest is near 2^8. bf16 scales are then exact down to about 2^-25 of the largest.
#pragma once

#include "linear_pack.hpp"
#include "linear_pack_steps.hpp"

namespace qt::QT_ISA {
namespace {

QT_INLINE void report(const CodesCall& call, Problem problem) {
  __atomic_or_fetch(call.problems, std::uint32_t(problem), __ATOMIC_RELAXED);
}

QT_INLINE bool is_finite(float value) { return value - value == 0.0f; }

float scale_at(const CodesCall& call, index_t column, index_t i) {
  const index_t at = column * call.scale_stride + i;
  switch (call.scale_dtype) {
    case Dtype::bf16: return widened((const bf16*)call.scales + at);
    case Dtype::fp16: return widened((const fp16*)call.scales + at);
    default: return ((const float*)call.scales)[at];
  }
}

// 2^-8 times the power of two at or below the largest magnitude, clamped so that division and multiplication are exact.
float power_of_column(float largest) {
  if (largest == 0.0f) return 1.0f;
  std::uint32_t bits;
  std::memcpy(&bits, &largest, sizeof bits);
  const std::uint32_t exponent = bits >> 23, least = 127 - 100 + 8, most = 127 + 100 + 8;
  const std::uint32_t of_column = ((exponent < least ? least : exponent > most ? most : exponent) - 8) << 23;
  float power;
  std::memcpy(&power, &of_column, sizeof power);
  return power;
}

// Scales of fp4: one byte each. The column's scale is half of its factor, because the table is doubled.
void fill_byte_scales(const CodesCall& call, index_t column, char* tile, index_t lane) {
  const Weight& weight = *call.codes.weight;
  const float half = 0.5f * (call.factors ? call.factors[column] : 1.0f);
  if (!is_finite(half)) report(call, Problem::scale);
  std::memcpy(tile + lane * 4, &half, 4);
  const int not_a_number = weight.scales == Scales::exponent ? 255 : 127;
  for (index_t g = 0; g < weight.blocks; ++g) {
    const int byte = ((const unsigned char*)call.scales)[column * call.scale_stride + g];
    if ((weight.scales == Scales::exponent ? byte : byte & 127) == not_a_number) report(call, Problem::scale);
    head_at(weight, tile, g)[lane] = char(byte);
  }
}

// fp32 scale and zero point of a group, for one lane.
void fill_singles(const CodesCall& call, index_t column, index_t from, char* head, index_t lane) {
  const Weight& weight = *call.codes.weight;
  const float scale = scale_at(call, column, from);
  std::memcpy(head + lane * 4, &scale, 4);
  if (weight.scales != Scales::single_zero) return;
  const float zero = call.zeros ? ((const float*)call.zeros)[column * call.zero_stride + from] : float(middle_of(weight.codes));
  if (!is_finite(zero)) report(call, Problem::scale);
  std::memcpy(head + kTileColumns * 4 + lane * 4, &zero, 4);
}

// Scales and zero points of one lane, from column `column` of the source.
void fill_scales(const CodesCall& call, index_t column, char* tile, index_t lane) {
  const Weight& weight = *call.codes.weight;
  if (weight.codes == Codes::table) return fill_byte_scales(call, column, tile, lane);
  const index_t count = (weight.depth + call.scale_group - 1) / call.scale_group;
  float largest = 0.0f;
  for (index_t i = 0; i < count; ++i) {
    const float scale = scale_at(call, column, i), magnitude = scale < 0 ? -scale : scale;
    if (!(magnitude <= 3.4e38f)) return report(call, Problem::scale);
    largest = magnitude > largest ? magnitude : largest;
  }
  const bool single = weight.scales == Scales::single || weight.scales == Scales::single_zero;
  const float of_column = single                             ? 1.0f
                          : count == 1                         ? scale_at(call, column, 0)
                          : call.scale_dtype == Dtype::fp16 ? 1.0f
                                                             : power_of_column(largest);
  std::memcpy(tile + lane * 4, &of_column, 4);
  if (weight.group == kWholeDepth) return;
  for (index_t g = 0; g < weight.blocks; ++g) {
    const index_t from = g * weight.group / call.scale_group;
    if (single) {
      fill_singles(call, column, from, head_at(weight, tile, g), lane);
      continue;
    }
    const float relative = count == 1 ? 1.0f : scale_at(call, column, from) / of_column;
    const fp16 stored{half_bits(relative)};
    if (widened(&stored) != relative) report(call, Problem::scale);
    char* const group = head_at(weight, tile, g);
    std::memcpy(group + lane * 2, &stored, 2);
    if (weight.scales == Scales::half_zero)
      group[kHalves + lane] = char(call.zeros ? ((const unsigned char*)call.zeros)[column * call.zero_stride + from] : middle_of(weight.codes));
  }
}

void fill_codes_of(const CodesCall& call, const Rows& rows, char* tile) {
  const Weight& weight = *call.codes.weight;
  // Signed bytes become unsigned: + the weight's middle.
  const std::uint8_t added = call.is_signed ? std::uint8_t(middle_of(weight.codes)) : 0;
  const std::uint8_t all_of_them = put_codes(weight, rows, tile, 0, weight.depth, added);
  if (weight.codes != Codes::eight && all_of_them > 15) report(call, Problem::code);
  if (weight.values != Values::fp8) return;
  for (index_t lane = 0; lane < kTileColumns; ++lane) {
    int wrong = 0;
    for (index_t k = 0; rows.of[lane] && k < weight.depth; ++k) wrong |= (rows.of[lane][k] & 127) == 127;
    if (wrong) report(call, Problem::code);
  }
}

void fill_codes(const void* described, index_t begin, index_t end) {
  const CodesCall& call = *(const CodesCall*)described;
  const Weight& weight = *call.codes.weight;
  for (index_t i = begin; i < end; ++i) {
    const index_t tile = call.codes.first_tile + i;
    const Rows rows = rows_of(call.codes, tile);
    char* memory = weight.memory + tile * weight.tile_bytes;
    fill_codes_of(call, rows, memory);
    for (index_t lane = 0; lane < kTileColumns; ++lane)
      if (rows.of[lane]) fill_scales(call, column_of(weight, tile, lane) - call.codes.first, memory, lane);
  }
}

// Packs a column's codes. Returns the OR of all codes.
int put_lines(const Weight& weight, const char* row, const char* tile, index_t lane) {
  int any = 0;
  for (index_t begin = 0; begin < weight.depth; begin += kTableBlock) {
    std::uint32_t words[kWordsOfLine] = {};
    const index_t count = weight.depth - begin < kTableBlock ? weight.depth - begin : kTableBlock;
    for (index_t k = 0; k < count; ++k) {
      const std::uint32_t code = (unsigned char)row[begin + k];
      any |= int(code);
      words[word_of(k)] |= (code & 15) << shift_of(k);
    }
    std::memcpy((char*)line_at(weight, tile, begin / kTableBlock, lane), words, sizeof words);
  }
  return any;
}

// Packs per-column tables and their indices.
void fill_tables(const void* described, index_t begin, index_t end) {
  const TablesCall& call = *(const TablesCall*)described;
  const Weight& weight = *call.codes.weight;
  const auto report = [&](Problem problem) { __atomic_or_fetch(call.problems, std::uint32_t(problem), __ATOMIC_RELAXED); };
  for (index_t i = begin; i < end; ++i) {
    const index_t tile = call.codes.first_tile + i;
    const Rows rows = rows_of(call.codes, tile);
    char* const memory = weight.memory + tile * weight.tile_bytes;
    for (index_t lane = 0; lane < kTileColumns; ++lane) {
      if (!rows.of[lane]) continue;
      if (put_lines(weight, rows.of[lane], memory, lane) > 15) report(Problem::code);
      const float* const table = call.tables + (column_of(weight, tile, lane) - call.codes.first) * kTableSize;
      for (int n = 0; n < kTableSize; ++n)
        if (!is_finite(table[n])) report(Problem::scale);
      ((float*)memory)[lane] = 1.0f;
      std::memcpy((char*)table_at(memory, lane), table, kTableSize * sizeof(float));
    }
  }
}

}  // namespace
}  // namespace qt::QT_ISA
