// Integer codes of packed weights and their expansion to bytes.
//
// A step (step_of) is a fixed number of k for all 64 columns. Below, a line is [64][4] bytes. A four is four adjacent k of a
// column, one in each of its four bytes; q counts the fours of a step. Upper bits come first: all fours need them, and registers
// are few.
//
//   eight   a line: one four, as stored                                             4 k
//   four    a line: q = 0 in the low halves, q = 1 in the high halves               8 k
//   table   the same; each half is an index into a table of 16 bytes                8 k
//   six     a line: bits 2 q, 2 q + 1 are the upper two; then two lines as of four  16 k
//   five    a line: bit q is the upper one; then four lines as of four              32 k
//   two     a line: bits 2 q, 2 q + 1                                               16 k
//   three   the same; then 16 bits for each column: bit 4 i + q is the upper one
//           of number i of four q                                                  16 k
#pragma once

#include "linear.hpp"
#include "simd.hpp"

namespace qt::QT_ISA {
namespace {

inline constexpr index_t kCodeLine = kTileColumns * 4;

// Number of fours in a step.
constexpr int fours_of(Codes codes) { return int(step_of(codes).k / 4); }

QT_INLINE i32v nibbles_of(i32v line, int half) {
  const i32v nibbles = all(std::int32_t(0x0F0F0F0F));
  return half == 0 ? line & nibbles : (i32v)((u32v)line >> 4) & nibbles;
}

// Shifts all bytes left (or right, if negative) and keeps the bits of `mask`.
QT_INLINE i32v moved_bits(i32v line, int left, std::int32_t mask) {
  return (left >= 0 ? line << left : (i32v)((u32v)line >> -left)) & all(mask);
}

// Expands 16 bits of each column to one byte for each number of a four; bit q belongs to four q.
QT_INLINE i32v spread_bits(const char* halves) {
  const i32v bits = (i32v)((u32v)as_bits(load((const bf16*)halves)) >> 16);
  const i32v apart = (bits & 0xFF) | (bits & 0xFF00) << 8;
  return apart | apart << 4;
}

// Whole lines of a step.
constexpr int lines_of(Codes codes) { return int(step_of(codes).bytes / kCodeLine); }

// Four q of a step, for one vector of columns. halves: the spread upper bits of three-bit codes.
template <Codes kCodes>
QT_INLINE i32v four_of(const i32v (&lines)[lines_of(kCodes)], [[maybe_unused]] i32v halves, int q, [[maybe_unused]] i32v table) {
  if constexpr (kCodes == Codes::eight) return lines[0];
  if constexpr (kCodes == Codes::four) return nibbles_of(lines[0], q);
  if constexpr (kCodes == Codes::table) return look_up(table, nibbles_of(lines[0], q));
  if constexpr (kCodes == Codes::six) return nibbles_of(lines[1 + q / 2], q % 2) | moved_bits(lines[0], 4 - 2 * q, 0x30303030);
  if constexpr (kCodes == Codes::five) return nibbles_of(lines[1 + q / 2], q % 2) | moved_bits(lines[0], 4 - q, 0x10101010);
  const i32v low = moved_bits(lines[0], -2 * q, 0x03030303);
  if constexpr (kCodes == Codes::three) return low | moved_bits(halves, 2 - q, 0x04040404);
  return low;
}

QT_INLINE i32v table_of(const unsigned char (&bytes)[16]) {
  char repeated[4 * kLanes];
  for (int i = 0; i < 4 * kLanes; i += 16) std::memcpy(repeated + i, bytes, 16);
  return load_bits(repeated);
}

// Expands `steps` steps of `columns` columns, from `column` on, to lines of bytes, `line` bytes apart.
template <Codes kCodes>
void expand_as(const char* step, index_t column, index_t columns, index_t steps, const unsigned char (&table)[16], char* out,
               index_t line) {
  constexpr CodeStep size = step_of(kCodes);
  constexpr int kLines = lines_of(kCodes), kFours = fours_of(kCodes);
  const i32v values = table_of(table);
  for (index_t s = 0; s < steps; ++s, step += size.bytes, out += size.k / 4 * line)
    for (index_t c = 0; c < columns; c += kLanes) {
      i32v lines[kLines];
#pragma GCC unroll 5
      for (int n = 0; n < kLines; ++n) lines[n] = load_bits(step + n * kCodeLine + (column + c) * 4);
      const i32v halves = kCodes == Codes::three ? spread_bits(step + kCodeLine + (column + c) * 2) : i32v{};
#pragma GCC unroll 8
      for (int q = 0; q < kFours; ++q) {
        const i32v four = four_of<kCodes>(lines, halves, q, values);
        std::memcpy(out + q * line + c * 4, &four, sizeof four);
      }
    }
}

using Expand = void (*)(const char*, index_t, index_t, index_t, const unsigned char (&)[16], char*, index_t);
QT_INLINE Expand expander_of(Codes codes) {
  switch (codes) {
    case Codes::four: return expand_as<Codes::four>;
    case Codes::table: return expand_as<Codes::table>;
    case Codes::six: return expand_as<Codes::six>;
    case Codes::five: return expand_as<Codes::five>;
    case Codes::three: return expand_as<Codes::three>;
    default: return expand_as<Codes::two>;  // eight: already bytes, not reached
  }
}

// One step in storage format, packed from fours of bytes. `lines`: of one vector of columns.
inline constexpr int kMostLines = 5;
struct StoredStep {
  i32v lines[kMostLines];
  i32v halves;  // three: upper bits, in the low half of each word
};

QT_INLINE i32v both_nibbles(const i32v* fours) {
  const i32v nibbles = all(std::int32_t(0x0F0F0F0F));
  return (fours[0] & nibbles) | (fours[1] & nibbles) << 4;
}

// Concatenates bits [from, from + count) of each number of n fours.
QT_INLINE i32v gathered_bits(const i32v* fours, int n, int from, int count) {
  const i32v mask = all(std::int32_t(count == 1 ? 0x01010101 : 0x03030303));
  i32v line{};
  for (int q = 0; q < n; ++q) line = line | ((i32v)((u32v)fours[q] >> from) & mask) << q * count;
  return line;
}

QT_INLINE StoredStep stored_step(Codes codes, const i32v* fours) {
  StoredStep step{};
  switch (codes) {
    case Codes::eight: step.lines[0] = fours[0]; break;
    case Codes::four:
    case Codes::table: step.lines[0] = both_nibbles(fours); break;
    case Codes::six:
      for (int n = 0; n < 2; ++n) step.lines[1 + n] = both_nibbles(fours + 2 * n);
      step.lines[0] = gathered_bits(fours, 4, 4, 2);
      break;
    case Codes::five:
      for (int n = 0; n < 4; ++n) step.lines[1 + n] = both_nibbles(fours + 2 * n);
      step.lines[0] = gathered_bits(fours, 8, 4, 1);
      break;
    case Codes::three: {
      step.lines[0] = gathered_bits(fours, 4, 0, 2);
      const i32v spread = gathered_bits(fours, 4, 2, 1);  // bit q of byte i
      const i32v pairs = spread | (i32v)((u32v)spread >> 4);
      step.halves = (pairs & 0xFF) | ((i32v)((u32v)pairs >> 8) & 0xFF00);
      break;
    }
    case Codes::two: step.lines[0] = gathered_bits(fours, 4, 0, 2); break;
  }
  return step;
}

// Code k of a lane, relative to the first step at `codes`.
int code_at(const Weight& weight, const unsigned char* codes, index_t lane, index_t k) {
  const CodeStep size = step_of(weight.codes);
  const unsigned char* const step = codes + k / size.k * size.bytes;
  const index_t q = k % size.k / 4, i = k % 4;
  const auto byte = [&](index_t line) { return int(step[line * kCodeLine + lane * 4 + i]); };
  const auto nibble = [&](index_t first) { return byte(first + q / 2) >> (q % 2 * 4) & 15; };
  switch (weight.codes) {
    case Codes::eight: return byte(0);
    case Codes::four: return nibble(0);
    case Codes::table: return weight.table[nibble(0)];
    case Codes::six: return nibble(1) | (byte(0) >> 2 * q & 3) << 4;
    case Codes::five: return nibble(1) | (byte(0) >> q & 1) << 4;
    case Codes::two: return byte(0) >> 2 * q & 3;
    default: return (byte(0) >> 2 * q & 3) | (step[kCodeLine + lane * 2 + i / 2] >> (i % 2 * 4 + q) & 1) << 2;
  }
}

}  // namespace
}  // namespace qt::QT_ISA
