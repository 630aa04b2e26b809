// Packing of GGUF blocks (ggml's quantized types) to tile order, without requantization.
//
// A row of the file is a sequence of blocks of 32 or 256 k, each with its scales. A thread owns a tile. It splits 256 k of up to
// 64 rows into bytes, which become steps (linear_pack_steps.hpp), and writes the scales to the head. The ggml type follows from
// the weight's codes and scales.
#pragma once

#include "linear_pack_steps.hpp"

namespace qt::QT_ISA {
namespace {

// One lane of a block's head.
struct HeadOfLane {
  char* head;
  index_t lane;

  void half(index_t which, const unsigned char* from) const { std::memcpy(head + which * kHalves + lane * 2, from, 2); }
  // Byte `which` after `halves` fp16 numbers.
  void byte(index_t halves, index_t which, int value) const {
    head[halves * kHalves + which * kTileColumns + lane] = char(value);
  }
};

// 16 bytes as a vector: in byte loops, compilers must assume that stores alias loads.
typedef std::uint8_t u8x16 __attribute__((vector_size(16)));
QT_INLINE u8x16 bytes_at(const unsigned char* from) {
  u8x16 bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return bytes;
}

// Low halves of bytes, then high halves. count: bytes, a multiple of 16; the same below.
QT_INLINE void split(const unsigned char* from, index_t count, unsigned char* codes) {
#pragma GCC unroll 4
  for (index_t i = 0; i < count; i += 16) {
    const u8x16 bytes = bytes_at(from + i), low = bytes & 15, high = bytes >> 4;
    std::memcpy(codes + i, &low, 16);
    std::memcpy(codes + count + i, &high, 16);
  }
}

// Adds the bits of `mask` from bit n of each byte on, times `value`, to codes.
QT_INLINE void add_bits(const unsigned char* from, index_t count, int n, int mask, int value, unsigned char* codes) {
#pragma GCC unroll 2
  for (index_t i = 0; i < count; i += 16) {
    const u8x16 sum = bytes_at(codes + i) + (bytes_at(from + i) >> n & std::uint8_t(mask)) * std::uint8_t(value);
    std::memcpy(codes + i, &sum, 16);
  }
}

// Adds bit n of a byte, times 16, to code n.
QT_INLINE void add_bit_of_each(unsigned char bits, unsigned char* codes) {
  constexpr std::uint64_t each = 0x0101010101010101;
  const std::uint64_t apart = bits * each & 0x8040201008040201;  // bit n in byte n
  std::uint64_t sum;
  std::memcpy(&sum, codes, sizeof sum);
  sum += ((apart + 127 * each) >> 7 & each) << 4;
  std::memcpy(codes, &sum, sizeof sum);
}

// 6-bit scales and minima of eight groups in twelve bytes. The first four groups have a byte each. Its upper two bits are the
// upper two bits of the other groups.
QT_INLINE void six_bits(const unsigned char* from, const HeadOfLane& head) {
  for (int g = 0; g < 8; ++g) {
    const int scale = g < 4 ? from[g] & 63 : (from[g + 4] & 15) | from[g - 4] >> 6 << 4;
    const int minimum = g < 4 ? from[g + 4] & 63 : from[g + 4] >> 4 | from[g] >> 6 << 4;
    head.byte(2, 2 * g, scale), head.byte(2, 2 * g + 1, minimum);
  }
}

// Types with blocks of 32 k: fp16 d or a power of two; the minimum, if any; upper bits of 5-bit codes; halves of bytes.
void take_small(const Weight& weight, const unsigned char* from, unsigned char* codes, const HeadOfLane& head) {
  if (weight.scales == Scales::exponent) {
    head.byte(0, 0, from[0]);
    return split(from + 1, 16, codes);
  }
  head.half(0, from);
  from += 2;
  if (weight.scales == Scales::half_minimum) head.half(1, from), from += 2;
  if (weight.codes == Codes::eight) {
    for (index_t i = 0; i < 32; ++i) codes[i] = (unsigned char)(from[i] + 128);
    return;
  }
  const bool five = weight.codes == Codes::five;
  split(from + (five ? 4 : 0), 16, codes);
  if (!five) return;
  for (index_t i = 0; i < 4; ++i) add_bit_of_each(from[i], codes + 8 * i);
}

// Q4_K and Q5_K: d, minima's d, 6-bit scales; upper bits of 5-bit codes, bit g of a byte for group g; halves of bytes.
void take_groups_of_32(const Weight& weight, const unsigned char* from, unsigned char* codes, const HeadOfLane& head) {
  const bool five = weight.codes == Codes::five;
  head.half(0, from), head.half(1, from + 2);
  six_bits(from + 4, head);
  const unsigned char *const upper = from + 16, *const nibbles = upper + (five ? 32 : 0);
  for (int pair = 0; pair < 4; ++pair) split(nibbles + 32 * pair, 32, codes + 64 * pair);
  for (int g = 0; five && g < 8; ++g) add_bits(upper, 32, g, 1, 16, codes + 32 * g);
}

// Q6_K: halves of bytes, upper two bits, scales, d.
void take_six(const unsigned char* from, unsigned char* codes, const HeadOfLane& head) {
  for (int half = 0; half < 2; ++half) {
    split(from + 64 * half, 64, codes + 128 * half);
    for (int n = 0; n < 4; ++n) add_bits(from + 128 + 32 * half, 32, 2 * n, 3, 16, codes + 128 * half + 32 * n);
  }
  for (int g = 0; g < 16; ++g) head.byte(1, g, from[192 + g]);
  head.half(0, from + 208);
}

QT_INLINE void take_lower_pairs(const unsigned char* from, unsigned char* codes) {
  std::memset(codes, 0, 256);
  for (int n = 0; n < 8; ++n) add_bits(from + n / 4 * 32, 32, n % 4 * 2, 3, 1, codes + 32 * n);
}

// Q3_K: upper bits, bit n of a byte for the n-th 32 k; pairs of bits; 6-bit scales, lower four bits, then upper two; d.
void take_three(const unsigned char* from, unsigned char* codes, const HeadOfLane& head) {
  take_lower_pairs(from + 32, codes);
  for (int n = 0; n < 8; ++n) add_bits(from, 32, n, 1, 4, codes + 32 * n);
  const unsigned char *const lower = from + 96, *const upper = lower + 8;
  for (int g = 0; g < 16; ++g) {
    const int scale = (lower[g % 8] >> (g / 8 * 4) & 15) | (upper[g % 4] >> (g / 4 * 2) & 3) << 4;
    head.byte(1, g, scale - 32);
  }
  head.half(0, from + 108);
}

// Q2_K: scales and minima in the halves of bytes; pairs of bits; d, minima's d.
void take_two(const unsigned char* from, unsigned char* codes, const HeadOfLane& head) {
  for (int g = 0; g < 16; ++g) head.byte(2, g, from[g]);
  take_lower_pairs(from + 16, codes);
  head.half(0, from + 80), head.half(1, from + 82);
}

// IQ4_XS: d; 6-bit scales, upper two bits, then lower four; halves of bytes.
void take_uneven(const unsigned char* from, unsigned char* codes, const HeadOfLane& head) {
  head.half(0, from);
  for (int g = 0; g < 8; ++g) {
    const int scale = (from[4 + g / 2] >> (g % 2 * 4) & 15) | (from[2 + g / 4] >> (g % 4 * 2) & 3) << 4;
    head.byte(1, g, scale - 32);
    split(from + 8 + 16 * g, 16, codes + 32 * g);
  }
}

// One block of one row. Table codes stay indices, as in steps.
void take_block(const Weight& weight, const unsigned char* from, unsigned char* codes, const HeadOfLane& head) {
  if (weight.block == 32) return take_small(weight, from, codes, head);
  switch (weight.codes) {
    case Codes::six: return take_six(from, codes, head);
    case Codes::three: return take_three(from, codes, head);
    case Codes::two: return take_two(from, codes, head);
    case Codes::table: return take_uneven(from, codes, head);
    default: return take_groups_of_32(weight, from, codes, head);
  }
}

// Bytes of a block in the file.
index_t stored_bytes(const Weight& weight) {
  const index_t codes = step_of(weight.codes).bytes * weight.block / step_of(weight.codes).k / kTileColumns;
  const index_t head = weight.head_bytes / kTileColumns;
  if (weight.codes == Codes::table && weight.block == 256) return codes + head - 2;
  return codes + (weight.scales == Scales::bytes_minimum || weight.codes == Codes::three ? head - 4 : head);
}

inline constexpr index_t kTakenAtOnce = 256;  // k of each row

void fill_blocks(const void* described, index_t begin, index_t end) {
  const PackCall& call = *(const PackCall*)described;
  const Weight& weight = *call.weight;
  const index_t in_file = stored_bytes(weight), together = kTakenAtOnce / weight.block;
  alignas(64) unsigned char codes[kTileColumns * kTakenAtOnce];
  for (index_t i = begin; i < end; ++i) {
    const index_t tile = call.first_tile + i;
    const Rows rows = rows_of(call, tile);
    Rows taken = rows;
    for (index_t lane = 0; lane < kTileColumns; ++lane)
      if (rows.of[lane]) taken.of[lane] = (const char*)codes + lane * kTakenAtOnce;
    char* const memory = weight.memory + tile * weight.tile_bytes;
    for (index_t lane = 0; lane < kTileColumns; ++lane) {
      const float one = weight.scales == Scales::exponent ? 0.5f : 1.0f;  // its table is doubled
      if (rows.of[lane]) std::memcpy(memory + lane * 4, &one, 4);
    }
    for (index_t first = 0, last; first < weight.blocks; first = last) {
      last = weight.blocks - first < together ? weight.blocks : first + together;
      const index_t ahead = (weight.blocks - last < together ? weight.blocks - last : together) * in_file;
      for (index_t lane = 0; lane < kTileColumns; ++lane) {
        if (!rows.of[lane]) continue;
        // 64 rows are more streams than hardware prefetchers follow.
        const char* const next = rows.of[lane] + last * in_file;
        for (index_t at = 0; at < ahead; at += 64) __builtin_prefetch(next + at);
        for (index_t block = first; block < last; ++block) {
          const unsigned char* const from = (const unsigned char*)rows.of[lane] + block * in_file;
          unsigned char* const to = codes + lane * kTakenAtOnce + (block - first) * weight.block;
          take_block(weight, from, to, {head_at(weight, memory, block), lane});
        }
      }
      put_codes(weight, taken, memory, first * weight.block, (last - first) * weight.block, 0);
    }
  }
}

}  // namespace
}  // namespace qt::QT_ISA
