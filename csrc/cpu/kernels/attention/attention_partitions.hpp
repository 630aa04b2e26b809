// Last stage of attention: merges partition states in ascending order and writes the results.
#pragma once

#include "attention_softmax.hpp"

namespace qt::QT_ISA {
namespace {

// Merged or single partition state: sums [rows][value_dim], largest scores and normalizers of the rows.
struct Partial {
  float *sums, *most, *normalizer;
};

QT_INLINE Partial partial_at(float* memory, index_t rows, index_t value_dim) {
  return {memory, memory + rows * value_dim, memory + rows * (value_dim + 1)};
}

// The state at the end of a partition. The lanes of each normalizer are summed to `normalizer` [kMaxRows].
template <class Word>
Partial partial_of(Group<Word>& group, float* normalizer) {
  for (index_t r = 0; r < group.rows; r += kLanes) {
    f32v lanes[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) lanes[i] = load(group.normalizer + (r + i) * kLanes);
    store(normalizer + r, fold_each(lanes, [](f32v a, f32v b) { return a + b; }));
  }
  return {group.sums, group.most, normalizer};
}

void copy(index_t rows, index_t value_dim, Partial from, Partial to) {
  for (index_t r = 0; r < rows; ++r) to.most[r] = from.most[r], to.normalizer[r] = from.normalizer[r];
  for (index_t i = 0; i < rows * value_dim; i += kLanes) store(to.sums + i, load(from.sums + i));
}

// total = merge(total, part), where `part` is the next partition. If a row saw no key of one of them, the bits of the other are
// kept.
void merge(index_t rows, index_t value_dim, Partial part, Partial total) {
  for (index_t r = 0; r < rows; r += kLanes) {
    const index_t count = rows - r < kLanes ? rows - r : kLanes;
    const f32v mine = load(total.most + r, count), theirs = load(part.most + r, count);
    const f32v most = max(mine, theirs), less = most > all(kNothing) ? most : all(0.0f);
    const f32v keep_mine = power_of_two(mine - less), keep_theirs = power_of_two(theirs - less);
    store(total.most + r, most, count);
    const f32v normalizer = fma(load(part.normalizer + r, count), keep_theirs, load(total.normalizer + r, count) * keep_mine);
    store(total.normalizer + r, normalizer, count);
    float factors[2][kLanes];
    store(factors[0], keep_mine);
    store(factors[1], keep_theirs);
    for (index_t i = 0; i < count; ++i) {
      const f32v first = all(factors[0][i]), second = all(factors[1][i]);
      float* sums = total.sums + (r + i) * value_dim;
      const float* more = part.sums + (r + i) * value_dim;
      for (index_t d = 0; d < value_dim; d += kLanes) store(sums + d, fma(load(more + d), second, load(sums + d) * first));
    }
  }
}

// Factors of the rows' sums, [kMaxRows]: the value scale of an fp8 cache / normalizer. The normalizer includes the head's
// attention sink, a score without a value (Xiao et al., "Efficient streaming language models with attention sinks", 2024, section
// 3.2).
template <class Word>
void shares_of(const AttentionCall& call, const Group<Word>& group, index_t first_head, Partial total, float* shares) {
  const float* scales = call.layer.value_scales;
  const f32v scale = all(scales ? scales[first_head / call.group] : 1.0f);
  index_t head = 0;
  for (index_t r = 0; r < group.rows; r += kLanes) {
    const index_t count = group.rows - r < kLanes ? group.rows - r : kLanes;
    const f32v normalizer = load(total.normalizer + r, count);
    if (!call.layer.sinks) {
      store(shares + r, scale / normalizer);
      continue;
    }
    float sinks[kLanes] = {};
    for (index_t i = 0; i < count; ++i, head = head + 1 < group.heads ? head + 1 : 0)
      sinks[i] = call.layer.sinks[first_head + head] * kLog2E;
    const f32v most = load(total.most + r, count), sink = load(sinks), larger = max(most, sink);
    const f32v kept = power_of_two(most - larger);
    store(shares + r, kept * scale / fma(normalizer, kept, power_of_two(sink - larger)));
  }
}

// A group's state of a partition in `partials` (AttentionPiece).
template <class Word>
QT_INLINE Partial stored_partial(const AttentionPiece& piece, index_t partition, float* partials, index_t value_dim,
                                 const Group<Word>& group) {
  float* const memory = partials + (partition - piece.all_first) * piece.partial_floats;
  return partial_at(memory + group.first_row * (value_dim + 2), group.rows, value_dim);
}

// Ends a partition of a group. `partials`: buffer for the state until all pieces of these tokens are complete; null: merges it
// directly.
template <class Word>
void end_partition(const AttentionPiece& piece, index_t partition, float* partials, index_t value_dim, Group<Word>& group) {
  float normalizer[kMaxRows];
  const Partial part = partial_of(group, normalizer), total = partial_at(group.total, group.rows, value_dim);
  if (partials)
    copy(group.rows, value_dim, part, stored_partial(piece, partition, partials, value_dim, group));
  else if (partition == piece.first)
    copy(group.rows, value_dim, part, total);
  else
    merge(group.rows, value_dim, part, total);
  clear(group, value_dim);
}

// Marks a piece as complete after its partitions are stored. The last piece merges the partitions of all pieces, for each group;
// the others return false.
template <class Word>
bool join(const AttentionPiece& piece, float* partials, std::uint32_t* pending, index_t value_dim, Group<Word>* groups,
          index_t num_groups) {
  if (__atomic_sub_fetch(pending, 1, __ATOMIC_ACQ_REL) != 0) return false;
  for (index_t g = 0; g < num_groups; ++g) {
    const Partial total = partial_at(groups[g].total, groups[g].rows, value_dim);
    for (index_t i = piece.all_first; i < piece.all_last; ++i) {
      const Partial part = stored_partial(piece, i, partials, value_dim, groups[g]);
      if (i == piece.all_first)
        copy(groups[g].rows, value_dim, part, total);
      else
        merge(groups[g].rows, value_dim, part, total);
    }
  }
  return true;
}

// Stores a group's results: dimensions [first, first + value_dim) of each head, without the zero padding of the head.
template <class Element, class Word>
void finish(const AttentionCall& call, const Group<Word>& group, index_t first_head, index_t first, index_t value_dim) {
  const Partial total = partial_at(group.total, group.rows, value_dim);
  const index_t width = call.layer.value_width, count = width - first < value_dim ? width - first : value_dim;
  const index_t whole = count / kLanes * kLanes;
  alignas(64) float shares[kMaxRows];
  shares_of(call, group, first_head, total, shares);
  const float *sums = total.sums, *row_share = shares;
  for (index_t token = 0; token < group.tokens; ++token) {
    Element* out = (Element*)call.out + (group.token + token) * call.out_stride + first_head * width + first;
    for (index_t head = 0; head < group.heads; ++head) {
      const f32v share = all(*row_share++);
      for (index_t d = 0; d < whole; d += kLanes) store(out + d, fma(load(sums + d), share, all(0.0f)));
      if (whole < count) store(out + whole, fma(load(sums + whole), share, all(0.0f)), count - whole);
      sums += value_dim;
      out += width;
    }
  }
}

}  // namespace
}  // namespace qt::QT_ISA
