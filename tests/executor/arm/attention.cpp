// The write of keys and values to the paged cache, and attention over it.
//
// Three requests lie in one cache in mixed-up blocks: one with much context draws a token, a prompt begins, a chunk continues
// one across the border of a partition. What was written is read back from the cache by its documented layout
// (csrc/cpu/attention.hpp). Both are done again in other chunks and on another number of threads: the same bits.
//
// Bounds. Written numbers are rounded by the norm, its weight and the rotation, half a unit of their format each; int8 is off
// by half a step of 127. A score is off by head_dim 2^-24 of the sum of the products' magnitudes, and by 2^-20 of its
// parts through the cap or the slope; twice that, and 2^-18 for the exponential of a difference, is what a weight is off by,
// relative to itself; sums of n weighted values by n 2^-24 of the sum of their magnitudes.
#include "numbers.hpp"
#include "blocks.hpp"

extern "C" {
void qt_attend_in_pairs(int wanted);
index_t qt_kv_block_bytes(int kv_dtype, index_t kv_heads, index_t head_dim, index_t block_size);
void qt_write_kv(const qt::Step* step, const void* qkv, index_t qkv_stride, index_t heads, index_t kv_heads, index_t head_dim,
                 index_t rotary, const void* q_norm, const void* k_norm, float eps, const qt::KvPlace* kv, index_t block_size,
                 void* q_out, index_t q_stride, int dtype, int kv_dtype);
void qt_attend(const qt::Step* step, const void* q, index_t q_stride, const qt::KvPlace* kv, index_t heads, index_t kv_heads,
               index_t head_dim, index_t block_size, index_t window, float softcap, const float* alibi_slopes, float scale,
               void* out, index_t out_stride, int dtype, int kv_dtype);
}

namespace check {
namespace {

constexpr index_t kTile = 16, kBlock = 32, kBlocks = 128, kSlots = 3, kSlotBlocks = 40;
constexpr index_t kHeads = 6, kKvHeads = 2, kGroup = kHeads / kKvHeads;
constexpr float kEps = 1e-5f;

// Consecutive positions of a slot, whose numbers are in rows [offset, offset + count) of the matrices.
struct Range {
  std::int64_t slot, start, count, offset;
};

// A step of some ranges.
struct StepOf {
  std::vector<std::int64_t> slots, starts, counts, offsets;
  std::vector<std::int32_t> table;
  qt::Step step{};

  StepOf(const std::vector<Range>& ranges, const Matrix& cosines, const Matrix& sines) : table(kSlots * kSlotBlocks) {
    for (index_t i = 0; i < kSlots * kSlotBlocks; ++i) table[i] = std::int32_t(i * 23 % kBlocks);  // 23 is odd: no block twice
    for (const Range& range : ranges) {
      slots.push_back(range.slot), starts.push_back(range.start);
      counts.push_back(range.count), offsets.push_back(range.offset);
      step.num_tokens = std::max(step.num_tokens, range.offset + range.count);
    }
    step.num_rows = index_t(ranges.size());
    step.row_slots = slots.data(), step.row_starts = starts.data();
    step.row_counts = counts.data(), step.row_offsets = offsets.data();
    step.block_table = table.data(), step.block_table_stride = kSlotBlocks;
    step.cosines = cosines.row(0), step.sines = sines.row(0);
  }
  StepOf(const StepOf&) = delete;
  StepOf& operator=(const StepOf&) = delete;
};

struct Setting {
  const char* name;
  index_t head_dim, rotary;
  bool norms;
  index_t window;
  float softcap;
  bool alibi;
};

class Cache {
 public:
  Cache(Dtype dtype, index_t head_dim)
      : dtype_(dtype), head_dim_(head_dim), block_bytes_(qt_kv_block_bytes(int(dtype), kKvHeads, head_dim, kBlock)),
        bytes_(kBlocks * block_bytes_, char(0xFF)) {}  // NaN, as a former tenant may have left
  const qt::KvPlace* place() {
    place_ = {bytes_.data(), block_bytes_, 0};
    return &place_;
  }
  const std::vector<char>& bytes() const { return bytes_; }

  // What is multiplied, and (int8) the step between its numbers.
  About key(const StepOf& in, index_t slot, index_t position, index_t head, index_t d) const {
    return number(tile(in, slot, position, head), position % kTile, d, position % kTile, kTile, 0);
  }
  About value(const StepOf& in, index_t slot, index_t position, index_t head, index_t d) const {
    const char* plane = tile(in, slot, position, head) + plane_bytes();
    return number(plane, position % kTile, position % kTile, d, head_dim_, 1);
  }

 private:
  index_t size() const { return dtype_ == Dtype::int8 ? 1 : size_of(dtype_); }
  index_t plane_bytes() const { return kTile * head_dim_ * size(); }
  const char* tile(const StepOf& in, index_t slot, index_t position, index_t head) const {
    const index_t tiles = kBlock / kTile, tile_bytes = block_bytes_ / kKvHeads / tiles;
    const char* block = bytes_.data() + in.table[slot * kSlotBlocks + position / kBlock] * block_bytes_;
    return block + (head * tiles + position / kTile % tiles) * tile_bytes;
  }
  // [major][width], in bf16 pairs of majors side by side. plane: of keys (0) or values (1).
  About number(const char* from, index_t key, index_t major, index_t column, index_t width, index_t plane) const {
    if (dtype_ == Dtype::bf16) return {read(from + ((major / 2 * width + column) * 2 + major % 2) * 2, dtype_), 0};
    if (dtype_ != Dtype::int8) return {read(from + (major * width + column) * size(), dtype_), 0};
    const char* scales = from + (plane == 0 ? 2 : 1) * plane_bytes();
    const double step = read(scales + (plane * kTile + key) * 4, Dtype::fp32);
    return {step * double(std::int8_t(from[major * width + column])), step};
  }

  Dtype dtype_;
  index_t head_dim_, block_bytes_;
  std::vector<char> bytes_;
  qt::KvPlace place_{};
};

// A head of qkv after its norm and rotation.
std::vector<About> turned(const Setting& set, const Matrix& qkv, index_t row, index_t at, const Matrix& norm,
                          const Matrix& cosines, const Matrix& sines, index_t position) {
  const double unit = half_unit(qkv.dtype);
  std::vector<About> x(set.head_dim), y;
  double squares = 0;
  for (index_t d = 0; d < set.head_dim; ++d) x[d] = {qkv.at(row, at + d), 0}, squares += x[d].value * x[d].value;
  const double scale = 1 / std::sqrt(squares / double(set.head_dim) + double(kEps));
  for (index_t d = 0; set.norms && d < set.head_dim; ++d) {
    x[d].value *= scale * norm.at(0, d);
    x[d].slack = std::fabs(x[d].value) * (2.01 * unit + double(set.head_dim) * 0x1p-24) + 0x1p-24;
  }
  y = x;
  for (index_t i = 0; i < set.rotary; ++i) {
    const index_t half = set.rotary / 2, other = i < half ? i + half : i - half;
    const double cosine = cosines.at(position, i), sine = sines.at(position, i) * (i < half ? -1 : 1);
    const double a = x[i].value * cosine, b = x[other].value * sine;
    y[i].value = a + b;
    y[i].slack = x[i].slack + x[other].slack + unit * std::fabs(a + b) * 1.01 + 0x1p-23 * (std::fabs(a) + std::fabs(b)) + 0x1p-25;
  }
  return y;
}

struct World {
  const Setting& set;
  Dtype dtype, kv_dtype;
  Matrix q_norm, k_norm, cosines, sines, qkv;
};

void write_all(const World& w, const StepOf& step, Matrix& q, Cache& cache) {
  qt_write_kv(&step.step, w.qkv.row(0), w.qkv.width, kHeads, kKvHeads, w.set.head_dim, w.set.rotary,
              w.set.norms ? w.q_norm.row(0) : nullptr, w.set.norms ? w.k_norm.row(0) : nullptr, kEps, cache.place(), kBlock,
              q.row(0), q.width, int(w.dtype), int(w.kv_dtype));
}

void check_writing(Findings& findings, const World& w, const std::vector<Range>& ranges, const StepOf& step, const Matrix& q,
                   const Cache& cache) {
  const index_t dim = w.set.head_dim;
  for (const Range& range : ranges)
    for (index_t i = 0; i < range.count; ++i) {
      const index_t row = range.offset + i, position = range.start + i;
      for (index_t head = 0; head < kHeads + kKvHeads; ++head) {
        const bool query = head < kHeads;
        const std::vector<About> exact =
            turned(w.set, w.qkv, row, head * dim, query ? w.q_norm : w.k_norm, w.cosines, w.sines, position);
        for (index_t d = 0; d < dim; ++d) {
          const About got = query ? About{q.at(row, head * dim + d), 0} : cache.key(step, range.slot, position, head - kHeads, d);
          findings.near(got.value, exact[d].value, exact[d].slack + 0.501 * got.slack, row, head * dim + d);
        }
      }
      for (index_t head = 0; head < kKvHeads; ++head)
        for (index_t d = 0; d < dim; ++d) {
          const About got = cache.value(step, range.slot, position, head, d);
          findings.near(got.value, w.qkv.at(row, (kHeads + kKvHeads + head) * dim + d), 0.501 * got.slack, row, d);
        }
    }
}

// The matrix unit multiplies weights that were rounded to bf16; other instruction sets are asked not to.
bool rounds_weights(Dtype dtype) { return dtype == Dtype::bf16 && std::strncmp(qt_isa(), "amx", 3) == 0; }

double slope_of(index_t head) { return std::ldexp(1, -int(head) - 1); }

void attend(const World& w, const StepOf& step, const Matrix& q, Cache& cache, Matrix& out) {
  float slopes[kHeads];
  for (index_t head = 0; head < kHeads; ++head) slopes[head] = float(slope_of(head));
  qt_attend(&step.step, q.row(0), q.width, cache.place(), kHeads, kKvHeads, w.set.head_dim, kBlock, w.set.window,
            w.set.softcap, w.set.alibi ? slopes : nullptr, float(1 / std::sqrt(double(w.set.head_dim))), out.row(0), out.width,
            int(w.dtype), int(w.kv_dtype));
}

// One token's head.
void check_head(Findings& findings, const World& w, const StepOf& step, const Cache& cache, index_t slot, index_t position,
                index_t row, index_t head, const Matrix& q, const Matrix& out) {
  const index_t dim = w.set.head_dim, first = w.set.window ? std::max(index_t(0), position + 1 - w.set.window) : 0;
  std::vector<double> scores;
  double error = 0, most = -1e30, normalizer = 0;
  for (index_t key = first; key <= position; ++key) {
    double score = 0, magnitude = 0;
    for (index_t d = 0; d < dim; ++d) {
      const double term = q.at(row, head * dim + d) * cache.key(step, slot, key, head / kGroup, d).value;
      score += term, magnitude += std::fabs(term);
    }
    const double scale = 1 / std::sqrt(double(dim)), bias = w.set.alibi ? slope_of(head) * double(key - position) : 0;
    score *= scale;
    error = std::max(error, (magnitude * double(dim) * 0x1p-24) * scale + 0x1p-20 * (w.set.softcap - bias));
    if (w.set.softcap > 0) score = w.set.softcap * std::tanh(score / w.set.softcap);
    scores.push_back(score + bias);
    most = std::max(most, scores.back());
  }
  for (double& score : scores) normalizer += score = std::exp(score - most);
  const double of_weights = rounds_weights(w.dtype) ? 2 * half_unit(Dtype::bf16) : 0;  // each, and their sum
  const double off = 2 * (2 * error + 0x1p-18) + double(scores.size()) * 0x1p-24 + of_weights;
  for (index_t d = 0; d < dim; ++d) {
    double sum = 0, magnitude = 0;
    for (index_t i = 0; i < index_t(scores.size()); ++i) {
      const double term = scores[i] * cache.value(step, slot, first + i, head / kGroup, d).value / normalizer;
      sum += term, magnitude += std::fabs(term);
    }
    const double slack = magnitude * off;
    findings.near(out.at(row, head * dim + d), sum, slack + half_unit(w.dtype) * (std::fabs(sum) + slack) + 0x1p-25, row, d);
  }
}

// Ranges cut into chunks of at most `most` positions.
std::vector<Range> cut(const std::vector<Range>& ranges, index_t most) {
  std::vector<Range> parts;
  for (const Range& range : ranges)
    for (index_t at = 0; at < range.count; at += most)
      parts.push_back({range.slot, range.start + at, std::min<std::int64_t>(most, range.count - at), range.offset + at});
  return parts;
}

void check_setting(Findings& findings, const Setting& set, Dtype dtype, Dtype kv_dtype) {
  const std::string name = std::string("attention ") + set.name + ", " + kNames[int(dtype)] + " over " + kNames[int(kv_dtype)];
  const std::vector<Range> written = {{0, 0, 1101, 0}, {1, 0, 75, 1101}, {2, 0, 531, 1176}};
  const index_t tokens = 1707, width = kHeads * set.head_dim;
  Noise noise(set.head_dim + index_t(dtype));
  World w{set, dtype, kv_dtype, noise.matrix(dtype, 1, set.head_dim, 0.2, 1), noise.matrix(dtype, 1, set.head_dim, 0.2, 1),
          Matrix(dtype, 1101, set.rotary), Matrix(dtype, 1101, set.rotary),
          noise.matrix(dtype, tokens, (kHeads + 2 * kKvHeads) * set.head_dim)};
  for (index_t position = 0; position < 1101; ++position)
    for (index_t i = 0; i < set.rotary; ++i) {
      const index_t half = set.rotary / 2;
      const double angle = double(position) * std::pow(1e4, -double(i % half) / double(half));
      w.cosines.set(position, i, std::cos(angle));
      w.sines.set(position, i, std::sin(angle));
    }

  Matrix q(dtype, tokens, width);
  Cache cache(kv_dtype, set.head_dim);
  const StepOf writing(written, w.cosines, w.sines);
  qt_set_threads(3, 0);
  write_all(w, writing, q, cache);
  findings.begin(name + ", written");
  check_writing(findings, w, written, writing, q, cache);
  findings.begin(name + ", written in chunks");
  Matrix again(dtype, tokens, width);
  Cache other(kv_dtype, set.head_dim);
  for (const Range& part : cut(written, 37)) {
    const StepOf step({part}, w.cosines, w.sines);
    write_all(w, step, again, other);
  }
  findings.same(other.bytes().data(), cache.bytes().data(), index_t(cache.bytes().size()), 0);
  findings.same(again.row(0), q.row(0), tokens * q.row_bytes(), 0);

  const std::vector<Range> asked = {{0, 1100, 1, 1100}, {1, 0, 75, 1101}, {2, 500, 31, 1676}};
  Matrix out(dtype, tokens, width);
  const StepOf together(asked, w.cosines, w.sines);
  attend(w, together, q, cache, out);
  findings.begin(name);
  for (const Range& range : asked)
    for (index_t i = 0; i < range.count; i += range.count > 1 ? 5 : 1)
      for (index_t head = 0; head < kHeads; head += 2)
        check_head(findings, w, together, cache, range.slot, range.start + i, range.offset + i, head, q, out);
  for (index_t most : {1, 11}) {
    findings.begin(name + ", chunks of " + std::to_string(most));
    qt_set_threads(most == 1 ? 1 : 2, 0);
    Matrix parts(dtype, tokens, width);
    for (const Range& part : cut(asked, most)) {
      const StepOf step({part}, w.cosines, w.sines);
      attend(w, step, q, cache, parts);
    }
    for (const Range& range : asked)
      for (index_t row = range.offset; row < range.offset + range.count; ++row)
        findings.same(parts.row(row), out.row(row), out.row_bytes(), row);
  }
}

}  // namespace

void check_attention(Findings& findings) {
  const Setting plain = {"plain", 48, 48, true, 0, 0, false}, windowed = {"in a window", 64, 32, false, 300, 0, false},
                capped = {"capped", 32, 16, true, 0, 5, false}, sloped = {"with slopes", 16, 0, false, 100, 0, true};
  qt_attend_in_pairs(0);  // ARM has no such products; where they are, weights are rounded to bf16, beyond these bounds
  for (Dtype dtype : kFloats)
    for (Dtype kv_dtype : {dtype, Dtype::int8}) check_setting(findings, plain, dtype, kv_dtype);
  check_setting(findings, windowed, Dtype::bf16, Dtype::bf16);
  check_setting(findings, capped, Dtype::fp16, Dtype::int8);
  check_setting(findings, sloped, Dtype::fp32, Dtype::fp32);
}

}  // namespace check
