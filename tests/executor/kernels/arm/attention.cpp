// The write of keys and values to the paged cache, and attention over it.
//
// Three requests share one cache in scattered blocks: a decode with a long context, the start of a prompt, and a chunk across the
// border of a partition. Written numbers, including padding, are read back by the documented layout (csrc/cpu/attention/attention.hpp).
// Other chunks and another number of threads must give the same bits.
//
// Bounds. The norm, its weight and the rotation round written numbers by half a unit each. int8 adds half a step of 127, int4
// half a step of 15 and the fp16 rounding of step and minimum. The error of a score is head_dim 2^-24 of the sum of the
// products' magnitudes, plus the cap's or the slope's. The relative error of a weight is twice that, plus 2^-18 for the
// exponential. The error of a sum of n weighted values is n 2^-24 of the sum of their magnitudes.
#include "attention.hpp"
#include "blocks.hpp"
#include "numbers.hpp"

extern "C" {
void qt_attend_in_pairs(int wanted);
index_t qt_kv_block_bytes(int kv_dtype, index_t kv_heads, index_t key_width, index_t value_width, index_t block_size,
                          index_t values_in_keys);
void qt_write_kv(const qt::Step* step, const qt::AttentionLayer* layer, const void* q, index_t q_stride, const void* k,
                 index_t k_stride, const void* v, index_t v_stride, const qt::KvPlace* kv, void* q_out, index_t out_stride);
void qt_attend(const qt::Step* step, const qt::AttentionLayer* layer, const void* q, index_t q_stride, const qt::KvPlace* kv, void* out,
               index_t out_stride);
}

namespace check {
namespace {

constexpr index_t kTile = 16, kBlock = 32, kBlocks = 128, kSlots = 3, kSlotBlocks = 40;
constexpr index_t kHeads = 6, kKvHeads = 2, kGroup = kHeads / kKvHeads;
constexpr float kEps = 1e-5f;

index_t padded(index_t width) { return (width + kTile - 1) / kTile * kTile; }

// Consecutive positions of a slot; their numbers are rows [offset, offset + count) of the matrices.
struct Range {
  std::int64_t slot, start, count, offset;
};

// A step of several ranges.
struct StepOf {
  std::vector<std::int64_t> slots, starts, counts, offsets;
  std::vector<std::int32_t> table;
  qt::Rotation rotation{};
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
    rotation.cosines = cosines.row(0), rotation.sines = sines.row(0);
    step.rotations = &rotation;
  }
  StepOf(const StepOf&) = delete;
  StepOf& operator=(const StepOf&) = delete;
};

struct Setting {
  const char* name;
  index_t width = 48, value_width = 48, rotary = 0, rotary_first = 0;
  bool interleaved = false, norms = false;
  index_t window = 0, chunk = 0;
  float softcap = 0;
  bool alibi = false, sinks = false;
};

class Cache {
 public:
  Cache(Dtype dtype, const Setting& set)
      : dtype_(dtype), key_dim_(padded(set.width)), value_dim_(padded(set.value_width)),
        block_bytes_(qt_kv_block_bytes(int(dtype), kKvHeads, set.width, set.value_width, kBlock, 0)),
        bytes_(kBlocks * block_bytes_, char(0xFF)) {}  // NaN, as a former tenant may have left
  const qt::KvPlace* place() {
    place_ = {bytes_.data(), block_bytes_, 0, 1, 0};
    return &place_;
  }
  const std::vector<char>& bytes() const { return bytes_; }

  // The number, and (int8, int4) its quantization step.
  About key(const StepOf& in, index_t slot, index_t position, index_t head, index_t d) const {
    const char* plane = tile(in, slot, position, head);
    if (dtype_ == Dtype::int4) return of_four_bits(plane, d, position % kTile, kTile, key_dim_, d, position % kTile);
    return number(plane, position % kTile, d, position % kTile, kTile, key_bytes() + value_bytes());
  }
  About value(const StepOf& in, index_t slot, index_t position, index_t head, index_t d) const {
    const char* plane = tile(in, slot, position, head) + key_bytes();
    if (dtype_ == Dtype::int4) return of_four_bits(plane, position % kTile, d, value_dim_, value_dim_, d, position % kTile);
    return number(plane, position % kTile, position % kTile, d, value_dim_, value_bytes() + kTile * 4);
  }

 private:
  index_t size() const { return dtype_ == Dtype::int8 ? 1 : size_of(dtype_); }
  index_t key_bytes() const {
    return dtype_ == Dtype::int4 ? kTile * (key_dim_ / 2 + (key_dim_ + 31) / 32 * 4) : kTile * key_dim_ * size();
  }
  index_t value_bytes() const { return kTile * value_dim_ * size(); }
  const char* tile(const StepOf& in, index_t slot, index_t position, index_t head) const {
    const index_t tiles = kBlock / kTile, tile_bytes = block_bytes_ / kKvHeads / tiles;
    const char* block = bytes_.data() + in.table[slot * kSlotBlocks + position / kBlock] * block_bytes_;
    return block + (head * tiles + position / kTile % tiles) * tile_bytes;
  }
  // [major][width], in bf16 pairs of majors side by side. scales: byte offset of the scales in the plane.
  About number(const char* from, index_t key, index_t major, index_t column, index_t width, index_t scales) const {
    if (dtype_ == Dtype::bf16) return {read(from + ((major / 2 * width + column) * 2 + major % 2) * 2, dtype_), 0};
    if (dtype_ != Dtype::int8) return {read(from + (major * width + column) * size(), dtype_), 0};
    const double step = read(from + scales + key * 4, Dtype::fp32);
    return {step * double(std::int8_t(from[major * width + column])), step};
  }

  // Number d of key or value `key` of a tile: [major / 2][width] bytes, then the factors of each 32 numbers of `dim`.
  About of_four_bits(const char* plane, index_t major, index_t column, index_t width, index_t dim, index_t d, index_t key) const {
    const int code = (unsigned char)plane[major / 2 * width + column] >> major % 2 * 4 & 15;
    const char* factors = plane + kTile * dim / 2 + (d / 32 * 2 * kTile + key) * 2;
    const double step = read(factors, Dtype::fp16), least = read(factors + kTile * 2, Dtype::fp16);
    return {step * code + least, step * 1.02 + std::fabs(least) * 0x1p-10 + 0x1p-23};
  }

  Dtype dtype_;
  index_t key_dim_, value_dim_, block_bytes_;
  std::vector<char> bytes_;
  qt::KvPlace place_{};
};

// A head of queries or keys after its norm and rotation.
std::vector<About> turned(const Setting& set, const Matrix& qkv, index_t row, index_t at, const Matrix& norm,
                          const Matrix& cosines, const Matrix& sines, index_t position) {
  const double unit = half_unit(qkv.dtype);
  std::vector<About> x(set.width), y;
  double squares = 0;
  for (index_t d = 0; d < set.width; ++d) x[d] = {qkv.at(row, at + d), 0}, squares += x[d].value * x[d].value;
  const double scale = 1 / std::sqrt(squares / double(set.width) + double(kEps));
  for (index_t d = 0; set.norms && d < set.width; ++d) {
    x[d].value *= scale * norm.at(0, d);
    x[d].slack = std::fabs(x[d].value) * (2.01 * unit + double(set.width) * 0x1p-24) + 0x1p-24;
  }
  y = x;
  for (index_t i = 0; i < set.rotary; ++i) {
    const index_t half = set.rotary / 2, pair = set.interleaved ? i / 2 : i % half, apart = set.interleaved ? 1 : half;
    const bool is_first = set.interleaved ? i % 2 == 0 : i < half;
    const index_t at = set.rotary_first + i, other = is_first ? at + apart : at - apart;
    const double cosine = cosines.at(position, pair), sine = sines.at(position, pair) * (is_first ? -1 : 1);
    const double a = x[at].value * cosine, b = x[other].value * sine;
    const double rounding = unit * std::fabs(a + b) * 1.01 + 0x1p-23 * (std::fabs(a) + std::fabs(b)) + 0x1p-25;
    y[at] = {a + b, x[at].slack + x[other].slack + rounding};
  }
  return y;
}

struct World {
  const Setting& set;
  Dtype dtype, kv_dtype;
  Matrix q_norm, k_norm, cosines, sines, qkv;
};

double slope_of(index_t head) { return std::ldexp(1, -int(head) - 1); }
double sink_of(index_t head) { return double(head) - 2; }

// Return the layer that the kernels receive. Slopes and sinks: [kHeads].
qt::AttentionLayer layer_of(const World& w, float* slopes, float* sinks) {
  for (index_t head = 0; head < kHeads; ++head) slopes[head] = float(slope_of(head)), sinks[head] = float(sink_of(head));
  qt::AttentionLayer layer{};
  layer.heads = kHeads, layer.kv_heads = kKvHeads;
  layer.key_width = w.set.width, layer.value_width = w.set.value_width, layer.block_size = kBlock;
  layer.window = w.set.window, layer.chunk = w.set.chunk;
  layer.rotary = w.set.rotary, layer.rotary_first = w.set.rotary_first, layer.interleaved = w.set.interleaved;
  layer.alibi_slopes = w.set.alibi ? slopes : nullptr, layer.sinks = w.set.sinks ? sinks : nullptr;
  if (w.set.norms) layer.q_norm = w.q_norm.row(0), layer.k_norm = w.k_norm.row(0), layer.eps = kEps;
  layer.scale = float(1 / std::sqrt(double(w.set.width))), layer.softcap = w.set.softcap;
  layer.dtype = int(w.dtype), layer.kv_dtype = int(w.kv_dtype), layer.period = 1;
  return layer;
}

void write_all(const World& w, const StepOf& step, Matrix& q, Cache& cache) {
  float slopes[kHeads], sinks[kHeads];
  const qt::AttentionLayer layer = layer_of(w, slopes, sinks);
  const char* from = (const char*)w.qkv.row(0);
  const index_t keys = kHeads * w.set.width * size_of(w.dtype), values = keys + kKvHeads * w.set.width * size_of(w.dtype);
  qt_write_kv(&step.step, &layer, from, w.qkv.width, from + keys, w.qkv.width, from + values, w.qkv.width, cache.place(),
              q.row(0), q.width);
}

void check_writing(Findings& findings, const World& w, const std::vector<Range>& ranges, const StepOf& step, const Matrix& q,
                   const Cache& cache) {
  const index_t dim = w.set.width, stored = padded(dim), wide = w.set.value_width;
  for (const Range& range : ranges)
    for (index_t i = 0; i < range.count; ++i) {
      const index_t row = range.offset + i, position = range.start + i;
      for (index_t head = 0; head < kHeads + kKvHeads; ++head) {
        const bool query = head < kHeads;
        const std::vector<About> exact =
            turned(w.set, w.qkv, row, head * dim, query ? w.q_norm : w.k_norm, w.cosines, w.sines, position);
        for (index_t d = 0; d < dim; ++d) {
          const About got = query ? About{q.at(row, head * stored + d), 0} 
                                  : cache.key(step, range.slot, position, head - kHeads, d);
          findings.near(got.value, exact[d].value, exact[d].slack + 0.501 * got.slack, row, head * dim + d);
        }
      }
      for (index_t head = 0; head < kKvHeads; ++head)
        for (index_t d = 0; d < (w.kv_dtype == Dtype::int4 ? wide : padded(wide)); ++d) {
          const About got = cache.value(step, range.slot, position, head, d);
          const double given = d < wide ? w.qkv.at(row, (kHeads + kKvHeads) * dim + head * wide + d) : 0;
          findings.near(got.value, given, 0.501 * got.slack, row, d);
        }
    }
}

// The matrix unit multiplies weights rounded to bf16; other instruction sets are configured not to.
bool rounds_weights(Dtype dtype) { return dtype == Dtype::bf16 && std::strncmp(qt_isa(), "amx", 3) == 0; }

void attend(const World& w, const StepOf& step, const Matrix& q, Cache& cache, Matrix& out) {
  float slopes[kHeads], sinks[kHeads];
  const qt::AttentionLayer layer = layer_of(w, slopes, sinks);
  qt_attend(&step.step, &layer, q.row(0), q.width, cache.place(), out.row(0), out.width);
}

// One head of one token.
void check_head(Findings& findings, const World& w, const StepOf& step, const Cache& cache, index_t slot, index_t position,
                index_t row, index_t head, const Matrix& q, const Matrix& out) {
  const index_t dim = w.set.width, stored = padded(dim), wide = w.set.value_width;
  const index_t first = w.set.chunk    ? position / w.set.chunk * w.set.chunk
                        : w.set.window ? std::max(index_t(0), position + 1 - w.set.window)
                                       : 0;
  std::vector<double> scores;
  double error = 0, most = -1e30, normalizer = 0;
  for (index_t key = first; key <= position; ++key) {
    double score = 0, magnitude = 0;
    for (index_t d = 0; d < dim; ++d) {
      const double term = q.at(row, head * stored + d) * cache.key(step, slot, key, head / kGroup, d).value;
      score += term, magnitude += std::fabs(term);
    }
    const double scale = 1 / std::sqrt(double(dim)), bias = w.set.alibi ? slope_of(head) * double(key - position) : 0;
    score *= scale;
    error = std::max(error, (magnitude * double(dim) * 0x1p-24) * scale + 0x1p-20 * (w.set.softcap - bias));
    if (w.set.softcap > 0) score = w.set.softcap * std::tanh(score / w.set.softcap);
    scores.push_back(score + bias);
    most = std::max(most, scores.back());
  }
  if (w.set.sinks) most = std::max(most, sink_of(head)), normalizer = std::exp(sink_of(head) - most);
  for (double& score : scores) normalizer += score = std::exp(score - most);
  const double of_weights = rounds_weights(w.dtype) ? 2 * half_unit(Dtype::bf16) : 0;  // each, and their sum
  const double off = 2 * (2 * error + 0x1p-18) + double(scores.size()) * 0x1p-24 + of_weights;
  for (index_t d = 0; d < wide; ++d) {
    double sum = 0, magnitude = 0;
    for (index_t i = 0; i < index_t(scores.size()); ++i) {
      const double term = scores[i] * cache.value(step, slot, first + i, head / kGroup, d).value / normalizer;
      sum += term, magnitude += std::fabs(term);
    }
    const double slack = magnitude * off;
    findings.near(out.at(row, head * wide + d), sum, slack + half_unit(w.dtype) * (std::fabs(sum) + slack) + 0x1p-25, row, d);
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
  const index_t tokens = 1707, width = kHeads * padded(set.width);
  Noise noise(set.width + index_t(dtype));
  World w{set, dtype, kv_dtype, noise.matrix(dtype, 1, set.width, 0.2, 1), noise.matrix(dtype, 1, set.width, 0.2, 1),
          Matrix(dtype, 1101, set.rotary), Matrix(dtype, 1101, set.rotary),
          noise.matrix(dtype, tokens, (kHeads + kKvHeads) * set.width + kKvHeads * set.value_width)};
  for (index_t position = 0; position < 1101; ++position)
    for (index_t i = 0; i < set.rotary; ++i) {
      const index_t half = set.rotary / 2;
      const double angle = double(position) * std::pow(1e4, -double(i % half) / double(half));
      w.cosines.set(position, i, std::cos(angle));
      w.sines.set(position, i, std::sin(angle));
    }

  Matrix q(dtype, tokens, width);
  Cache cache(kv_dtype, set);
  const StepOf writing(written, w.cosines, w.sines);
  qt_set_threads(3, 0);
  write_all(w, writing, q, cache);
  findings.begin(name + ", written");
  check_writing(findings, w, written, writing, q, cache);
  findings.begin(name + ", written in chunks");
  Matrix again(dtype, tokens, width);
  Cache other(kv_dtype, set);
  for (const Range& part : cut(written, 37)) {
    const StepOf step({part}, w.cosines, w.sines);
    write_all(w, step, again, other);
  }
  findings.same(other.bytes().data(), cache.bytes().data(), index_t(cache.bytes().size()), 0);
  findings.same(again.row(0), q.row(0), tokens * q.row_bytes(), 0);

  const std::vector<Range> asked = {{0, 1100, 1, 1100}, {1, 0, 75, 1101}, {2, 500, 31, 1676}};
  Matrix out(dtype, tokens, kHeads * set.value_width);
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
    Matrix parts(dtype, tokens, kHeads * set.value_width);
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
  const Setting plain = {.name = "plain", .rotary = 48, .norms = true},
                windowed = {.name = "in a window", .width = 64, .value_width = 64, .rotary = 32, .window = 300},
                capped = {.name = "capped", .width = 32, .value_width = 32, .rotary = 16, .norms = true, .softcap = 5},
                sloped = {.name = "with slopes", .width = 16, .value_width = 16, .window = 100, .alibi = true},
                sunken = {.name = "with sinks, in chunks", .width = 40, .value_width = 24, .rotary = 12, .rotary_first = 28,
                          .interleaved = true, .norms = true, .chunk = 250, .sinks = true};
  qt_attend_in_pairs(0);  // ARM has no such products; where they are, weights are rounded to bf16, beyond these bounds
  for (Dtype dtype : kFloats)
    for (Dtype kv_dtype : {dtype, Dtype::int8, Dtype::int4}) check_setting(findings, plain, dtype, kv_dtype);
  check_setting(findings, windowed, Dtype::bf16, Dtype::bf16);
  check_setting(findings, capped, Dtype::fp16, Dtype::int8);
  check_setting(findings, sloped, Dtype::fp32, Dtype::fp32);
  check_setting(findings, sunken, Dtype::bf16, Dtype::bf16);
  check_setting(findings, sunken, Dtype::fp16, Dtype::int8);
  check_setting(findings, sunken, Dtype::fp32, Dtype::int4);
}

}  // namespace check
