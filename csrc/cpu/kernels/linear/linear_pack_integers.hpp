// Quantization of weights during packing.
//
// int8: |q| <= 127, with the scale from the largest magnitude of a column, or of a group in it. int4: q in [-8, 7], or 0..15
// minus a zero point. Each group takes the candidate scale with the least squared error, computed with the scale that is least
// squares for its integers. For given q that scale is (w.q) / (q.q) and the error (w.w) - (w.q)^2 / (q.q). Candidates are
// compared by the last term.
//
// Group scales are fp16 relative to the column's scale, a power of two, which avoids overflow and denormals. Columns are lanes:
// no reduction crosses lanes, and the packed bytes do not depend on the order or size of partial fills.
#pragma once

#include "linear_codes.hpp"
#include "linear_pack.hpp"
#include "linear_tables.hpp"
#include "linear_values.hpp"

namespace qt::QT_ISA {
namespace {

inline constexpr float kLeastMagnitude = 1e-30f;  // of a column or group with a nonzero value

// 1 / scale for each column; zero for a column of zeros.
QT_INLINE f32v inverse_of(f32v scale) {
  const f32v magnitude = max(scale, -scale);
  return magnitude > all(kLeastMagnitude) ? 1.0f / scale : f32v{};
}

QT_INLINE f32v clamp(f32v value, float least, float most) { return min(all(most), max(all(least), value)); }

// The power of two at or below a positive normal number; 1 for zero.
QT_INLINE f32v power_of_two(f32v value) {
  const f32v power = as_float(as_bits(value) & all(std::int32_t(0x7F800000)));
  return power > all(kLeastMagnitude) ? power : all(1.0f);
}

// Extremes of one group of up to 128 k and one vector of columns. `block` is [count][64], from the vector's first column on.
struct Extremes {
  f32v least, most, signed_most;  // signed_most: the largest magnitude, with its sign
};

QT_INLINE Extremes extremes(const float* block, index_t count) {
  Extremes found{load(block), load(block), load(block)};
  for (index_t k = 1; k < count; ++k) {
    const f32v value = load(block + k * kTileColumns);
    found.least = min(value, found.least), found.most = max(value, found.most);
  }
  found.signed_most = found.most > -found.least ? found.most : found.least;
  return found;
}

// Squared error that q = clamp(round(w / scale) + zero) - zero removes, and its least-squares scale.
QT_INLINE f32v explained(const float* block, index_t count, f32v scale, f32v zero, float most, f32v& best_scale) {
  const f32v inverse = inverse_of(scale);
  f32v with_weights = f32v{}, squares = f32v{};
  for (index_t k = 0; k < count; ++k) {
    const f32v w = load(block + k * kTileColumns);
    const f32v q = clamp(round(w * inverse) + zero, 0.0f, most) - zero;
    with_weights = fma(w, q, with_weights);
    squares = fma(q, q, squares);
  }
  best_scale = squares > f32v{} ? with_weights / squares : f32v{};
  return with_weights * best_scale;
}

// Scale (and zero point) of a 4-bit group.
QT_INLINE void choose_scale(const float* block, index_t count, bool zeros, f32v& scale, f32v& zero) {
  const Extremes found = extremes(block, count);
  f32v best = all(-1.0f);
  scale = f32v{}, zero = all(8.0f);
  constexpr int kTries = 9;
  for (int i = 0; i < kTries; ++i) {
    f32v tried, tried_zero = all(8.0f), fitted;
    if (zeros) {
      const f32v least = min(found.least, f32v{}), most = max(found.most, f32v{});
      tried = (most - least) * (1.0f / (15.0f + 0.5f * float(i)));
      tried_zero = clamp(round(-least * inverse_of(tried) * (1.0f - 0.03f * float(i))), 0.0f, 15.0f);
    } else {
      tried = found.signed_most *
              (-1.0f / (7.0f + 0.375f * float(i)));  // the largest magnitude becomes -7 to -10, clamped
    }
    const f32v gain = explained(block, count, tried, tried_zero, 15.0f, fitted);
    scale = gain > best ? fitted : scale;
    zero = gain > best ? tried_zero : zero;
    best = gain > best ? gain : best;
  }
}

// Address of a block's head, and of the codes of k: of its block, or of its step.
QT_INLINE char* head_at(const Weight& weight, char* tile, index_t block) {
  return tile + weight.tile_head + block * weight.block_bytes;
}
QT_INLINE char* codes_at(const Weight& weight, char* tile, index_t k) {
  const CodeStep step = step_of(weight.codes);
  return head_at(weight, tile, k / weight.block) + weight.head_bytes + k % weight.block / step.k * step.bytes;
}

// Stores one group of `count` k: q + zero as bytes or nibbles.
QT_INLINE void store_integers(const Weight& weight, const Rows& rows, index_t v, const float* block, index_t count,
                              f32v inverse, f32v zero, char* integers) {
  const bool four = weight.codes == Codes::four;
  const float least = four ? 0.0f : 1.0f, most = four ? 15.0f : 255.0f;
  const index_t in_word = four ? 8 : 4;
  for (index_t k = 0; k < count; k += in_word, integers += kTileColumns * 4) {
    i32v word = i32v{};
    for (index_t i = 0; i < in_word; ++i) {
      const f32v w = k + i < count ? load(block + (k + i) * kTileColumns) : f32v{};
      const i32v q = to_int(clamp(round(w * inverse) + zero, least, most));
      word = word | q << int(i % 4 * 8 + i / 4 * 4);
    }
    put(integers, rows, v, word);
  }
}

// The largest magnitude of each column, over all of K.
void column_magnitudes(const PackCall& call, const Rows& rows, float* block, float (&magnitudes)[kTileColumns]) {
  const LoadBlock load_block = loader_of(call.source_dtype);
  for (index_t c = 0; c < kTileColumns; ++c) magnitudes[c] = 0.0f;
  for (index_t begin = 0; begin < call.weight->depth; begin += kBlock) {
    const index_t depth = call.weight->depth - begin < kBlock ? call.weight->depth - begin : kBlock;
    load_block(rows, begin, depth, block);
    for (index_t v = 0; v < kVectors; ++v) {
      f32v most = load(magnitudes + v * kLanes);
      for (index_t k = 0; k < depth; ++k) {
        const f32v value = load(block + k * kTileColumns + v * kLanes);
        most = max(max(value, -value), most);
      }
      store(magnitudes + v * kLanes, most);
    }
  }
}

// Quantizes to int8 or int4, with or without zero points.
void fill_integers(const PackCall& call, const Rows& rows, char* tile) {
  const Weight& weight = *call.weight;
  alignas(64) float block[kBlock * kTileColumns];
  alignas(64) float magnitudes[kTileColumns];
  const LoadBlock load_block = loader_of(call.source_dtype);
  const bool grouped = weight.group != kWholeDepth, four = weight.codes == Codes::four;
  const bool zeros = weight.scales == Scales::half_zero;
  column_magnitudes(call, rows, block, magnitudes);
  for (index_t v = 0; v < kVectors; ++v) {
    if (!rows.any[v]) continue;
    const f32v most = load(magnitudes + v * kLanes) * (1.0f / 127.0f);
    put(tile, rows, v, as_bits(grouped ? power_of_two(most) : most));
  }
  const index_t step = grouped ? weight.group : kBlock;  // k with one scale, or a part of them
  for (index_t begin = 0; begin < weight.depth; begin += step) {
    const index_t depth = weight.depth - begin < step ? weight.depth - begin : step;
    char *const group = head_at(weight, tile, begin / weight.block), *const integers = codes_at(weight, tile, begin);
    load_block(rows, begin, depth, block);
    for (index_t v = 0; v < kVectors; ++v) {
      if (!rows.any[v]) continue;
      const float* mine = block + v * kLanes;
      const f32v column_most = load(magnitudes + v * kLanes) * (1.0f / 127.0f);
      f32v scale = column_most, zero = all(float(middle_of(weight.codes)));
      if (four) {
        choose_scale(mine, depth, zeros, scale, zero);
      } else if (grouped) {
        const Extremes found = extremes(mine, depth);
        scale = max(found.most, -found.least) * (1.0f / 127.0f);
      }
      if (grouped) {
        const f32v column = power_of_two(column_most);
        const f32v relative = rounded_to<fp16>(scale / column);
        put(group, rows, v, relative, (fp16*)nullptr);
        scale = relative * column;
        if (zeros) put_bytes(group + kTileColumns * 2, rows, v, to_int(zero));
      }
      store_integers(weight, rows, v, mine, depth, inverse_of(scale), zero, integers);
    }
  }
}

// --- unpacking ---

// Dequantizes the groups of one lane, with the values that the kernels multiply.
class Reader {
 public:
  Reader(const Weight& weight, const char* tile, index_t lane) : weight_(weight), tile_(tile), lane_(lane) {}

  index_t in_group() const { return weight_.group != kWholeDepth ? weight_.group : weight_.depth; }
  // k [begin, begin + count) of one group.
  void read(index_t begin, index_t count, float* out) const {
    if (weight_.values == Values::tables) return read_tables(begin, count, out);
    const index_t block = begin / weight_.block, in_block = begin % weight_.block, group = in_block / in_group();
    const char* const head = tile_ + weight_.tile_head + block * weight_.block_bytes;
    const ScalesOfLane of = scales_of_lane(weight_, head, group, lane_);
    const float column = ((const float*)tile_)[lane_], scale = of.scale * column, minimum = of.minimum * column;
    const unsigned char* const codes = (const unsigned char*)head + weight_.head_bytes;
    const bool has_zero = weight_.scales == Scales::half_zero || weight_.scales == Scales::single_zero;
    const bool has_minimum = shifts(weight_.scales) && !has_zero;
    if (weight_.values != Values::integer) {
      for (index_t i = 0; i < count; ++i)
        out[i] = number_of(weight_.values, code_at(weight_, codes, lane_, in_block + i)) * scale;
      return;
    }
    for (index_t i = 0; i < count; ++i) {
      const float product = (float(code_at(weight_, codes, lane_, in_block + i)) - of.zero) * scale;
      out[i] = has_minimum ? product + minimum : product;
    }
  }

 private:
  void read_tables(index_t begin, index_t count, float* out) const {
    const float* const table = table_at(tile_, lane_);
    for (index_t k = begin; k < begin + count; ++k) {
      std::uint32_t word;
      std::memcpy(&word, line_at(weight_, tile_, k / kTableBlock, lane_) + word_of(k) * 4, sizeof word);
      out[k - begin] = table[word >> shift_of(k) & 15];
    }
    const Outliers& outliers = weight_.outliers;
    const index_t tile = (tile_ - weight_.memory) / weight_.tile_bytes;
    for (index_t k = begin / kOutlierDepth * kOutlierDepth; outliers.begins && k < begin + count; k += kOutlierDepth) {
      const std::uint32_t* const run = outliers.begins + outlier_run(weight_, tile, k, lane_);
      for (std::uint32_t i = run[0]; i < run[1]; ++i) {
        const Outlier its = outliers.numbers[i];
        const index_t at = k + its.k - begin;
        if (its.lane == lane_ && at >= 0 && at < count) out[at] += its.number;
      }
    }
  }

  const Weight& weight_;
  const char* const tile_;
  const index_t lane_;
};

}  // namespace
}  // namespace qt::QT_ISA
