// Attention and the write to the cache as operations of a program: what a step's rows mean as pieces of work.
#include "attention.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "blocks.hpp"
#include "paged.hpp"
#include "require.hpp"
#include "thread_memory.hpp"

namespace qt {
namespace {

constexpr index_t kPiecesPerThread = 4;  // at least, for the threads to finish together
constexpr index_t kReadRows = 12;        // so many rows are multiplied in the time in which a key is read
constexpr index_t kUnitCost = 1 << 18;   // multiplications of a unit, at least, that shares a KV head with others
// Of the program's scratch for partitions that are reduced apart: a million tokens of context of 32 heads. A row for which no
// room is left is not cut.
constexpr index_t kPartialsBytes = 32 << 20;

// Whether VDPBF16PS multiplies faster than fp32 does. On AMD's Zen 4 and 5 twice as fast; on Intel's processors half as
// fast (measured on Emerald Rapids: one in two cycles); where they have a matrix unit, its kernels take their place. By
// vendor, not by measuring: the same machine must always round alike. -1: not decided yet.
int wants_pairs = -1;

bool pairs_wanted() {
#if defined(__x86_64__)
  if (wants_pairs < 0) {
    __builtin_cpu_init();
    return __builtin_cpu_is("amd");
  }
#endif
  return wants_pairs > 0;
}

class AttentionOp final : public Op {
 public:
  // `program`: whose scratch it uses, which has room for kPartialsBytes.
  AttentionOp(const AttentionCall& call, index_t group, index_t max_tokens, const Program* program)
      : call_(call), group_(group), program_(program) {
    const AttentionKernels& kernels = QT_CHOOSE(attention);
    const auto& of_format = call.kv.dtype == Dtype::int8   ? kernels.attend_bytes
                            : call.kv.dtype == Dtype::int4 ? kernels.attend_fours
                            : call.kv.dtype == kFp8  ? kernels.attend_eighths
                                                           : kernels.attend;
    AttentionKernel kernel = of_format[call.layer.dtype];
    if (call.kv.dtype == Dtype::bf16 && kernels.attend_in_pairs.run && pairs_wanted()) kernel = kernels.attend_in_pairs;
    run_ = kernel.run;
    share_heads(1);
    call_.group_tokens = std::max(index_t(1), kernel.group_rows / call_.unit_heads);
    const index_t numbers = call_.group_tokens * call_.unit_heads * std::max(call.kv.key_dim, call.kv.value_dim);
    most_groups_ = std::min(kernel.most_groups, kMaxNumbers / numbers);
    pieces_.reserve(max_tokens);
  }

  Work prepare(const Step& step, index_t threads) override {
    pieces_.clear();
    share_heads(1);
    index_t keys = 0;  // that are multiplied with one unit's queries
    for (index_t row = 0; row < step.num_rows; ++row)
      for (index_t end = step.row_counts[row], begin; end > 0; end = begin) {
        begin = begin_of(end, 1);
        keys += cost_of(piece_of(step, row, begin, end));
      }
    // What one piece may cost, for the threads to finish together.
    const index_t most =
        threads == 1 ? std::numeric_limits<index_t>::max()
                     : std::max(kPartitionKeys, keys * units() / (threads * kPiecesPerThread));
    call_.unit_after_unit = false;
    for (index_t row = 0; row < step.num_rows; ++row)
      // The last tokens see most, so they come first: the threads end on small pieces.
      for (index_t end = step.row_counts[row], begin; end > 0; end = begin) {
        index_t groups = most_groups_;
        do begin = begin_of(end, groups);
        while (cost_of(piece_of(step, row, begin, end)) > most && --groups);
        pieces_.push_back(piece_of(step, row, begin, end));
        call_.unit_after_unit |= end - begin > call_.group_tokens;
      }
    share_heads(units_for(threads, most));
    split(most);
    call_.pieces = pieces_.data();
    call_.num_pieces = index_t(pieces_.size());
    Work work{call_.num_pieces * units(), 1, run_, &call_, nullptr, cost_of_item};
    count_bytes(step, work);
    return work;
  }

 private:
  // Multiplications of a piece, were all of its group's keys multiplied.
  static index_t cost_of_item(const void* description, index_t item) {
    const AttentionCall& call = *static_cast<const AttentionCall*>(description);
    const index_t units = call.kv.kv_heads * call.kv_head_units;
    const AttentionPiece& piece = call.pieces[call.unit_after_unit ? item % call.num_pieces : item / units];
    const index_t seen = qt::seen_from(call.layer.window, call.layer.chunk, piece.position);
    const index_t begin = std::max(seen, piece.first * kPartitionKeys);
    const index_t end = std::min(piece.position + piece.count, piece.last * kPartitionKeys);
    return std::max(kReadRows, piece.count * call.unit_heads) * (end - begin) * (call.kv.key_dim + call.kv.value_dim);
  }

  // A piece's own keys and values are read once by each unit, and by each further piece of the same row that sees them.
  void count_bytes(const Step& step, Work& work) const {
    const index_t key_bytes = call_.kv.tile_bytes / kTileKeys * units();
    for (const AttentionPiece& piece : pieces_) {
      const index_t begin = std::max(seen_from(piece.position), piece.first * kPartitionKeys);
      work.bytes += key_bytes * (std::min(piece.position + piece.count, piece.last * kPartitionKeys) - begin);
    }
    work.bytes_again = work.bytes;
    for (index_t row = 0; row < step.num_rows; ++row)
      work.bytes_again -= call_.kv.tile_bytes / kTileKeys * call_.kv.kv_heads *
                          (step.row_starts[row] + step.row_counts[row] - seen_from(step.row_starts[row]));
  }

  index_t units() const { return call_.kv.kv_heads * call_.kv_head_units; }

  // Where the last `groups` groups of a row's tokens [0, end) begin.
  index_t begin_of(index_t end, index_t groups) const {
    return std::max(index_t(0), (end - 1) / call_.group_tokens + 1 - groups) * call_.group_tokens;
  }

  // The tokens [begin, end) of a row.
  AttentionPiece piece_of(const Step& step, index_t row, index_t begin, index_t end) const {
    const index_t position = step.row_starts[row] + begin;
    AttentionPiece piece{};
    piece.blocks = blocks_of(step, row, group_);
    piece.token = step.row_offsets[row] + begin;
    piece.count = end - begin;
    piece.position = position;
    piece.first = piece.all_first = seen_from(position) / kPartitionKeys;
    piece.last = piece.all_last = (position + piece.count - 1) / kPartitionKeys + 1;
    return piece;
  }

  index_t seen_from(index_t position) const { return qt::seen_from(call_.layer.window, call_.layer.chunk, position); }

  // Tokens times keys.
  index_t cost_of(const AttentionPiece& piece) const {
    return (piece.position + piece.count - seen_from(piece.position)) * piece.count;
  }

  // Cuts a KV head's query heads into at most so many units, or the fewest that there can be.
  void share_heads(index_t units) {
    units = std::clamp(units, (call_.group + kMaxRows - 1) / kMaxRows, call_.group);
    call_.unit_heads = (call_.group + units - 1) / units;
    call_.kv_head_units = (call_.group + call_.unit_heads - 1) / call_.unit_heads;
  }

  // Into how many units a KV head's query heads are cut: into several where threads would have nothing to do, and multiplying
  // takes longer than what each unit does anew, to read the keys. Decides nothing about the result.
  index_t units_for(index_t threads, index_t most) const {
    index_t parts = 0, cost = 0;
    for (const AttentionPiece& piece : pieces_) {
      const index_t cuts = cuts_of(piece, most);
      parts += cuts, cost = std::max(cost, cost_of(piece) / cuts);
    }
    const index_t multiplications = cost * call_.group * (call_.kv.key_dim + call_.kv.value_dim);
    return std::min(threads / std::max(index_t(1), parts * call_.kv.kv_heads), multiplications / kUnitCost);
  }

  // Into how many ranges of partitions a piece is cut that may cost `most`.
  index_t cuts_of(const AttentionPiece& piece, index_t most) const {
    const index_t wanted = std::max(index_t(1), most / kPartitionKeys / piece.count);  // partitions
    return piece.count > call_.group_tokens ? 1 : (piece.last - piece.first + wanted - 1) / wanted;
  }

  // Cuts pieces that cost more than `most` into ranges of partitions. Decides nothing about the result.
  void split(index_t most) {
    const index_t whole = index_t(pieces_.size());
    if (index_t(pending_.size()) < whole * units()) pending_.resize(whole * units());
    float* const partials = reinterpret_cast<float*>(program_->scratch());
    index_t floats = 0, counters = 0;
    for (index_t i = 0; i < whole; ++i) {
      AttentionPiece piece = pieces_[i];
      const index_t partitions = piece.last - piece.first, cuts = cuts_of(piece, most);
      piece.partial_floats = piece.count * call_.unit_heads * (call_.kv.value_dim + 2);
      const index_t wanted = units() * partitions * piece.partial_floats;
      if (cuts == 1 || (floats + wanted) * index_t(sizeof(float)) > kPartialsBytes) continue;
      for (index_t cut = 0; cut < cuts; ++cut) {
        AttentionPiece part = piece;
        part.first = piece.first + partitions * cut / cuts;
        part.last = piece.first + partitions * (cut + 1) / cuts;
        part.partials = partials + floats;
        part.pending = pending_.data() + counters;
        if (cut == 0)
          pieces_[i] = part;
        else
          pieces_.push_back(part);
      }
      for (index_t unit = 0; unit < units(); ++unit) pending_[counters + unit] = std::uint32_t(cuts);
      floats += wanted;
      counters += units();
    }
  }

  AttentionCall call_;
  index_t group_;  // of layers
  const Program* program_;
  void (*run_)(const void*, index_t, index_t);
  index_t most_groups_;
  std::vector<AttentionPiece> pieces_;
  std::vector<std::uint32_t> pending_;
};

class KvWriteOp final : public Op {
 public:
  KvWriteOp(const KvWriteCall& call, index_t group) : call_(call), group_(group) {
    const KvWriteKernels& kernels = QT_CHOOSE(kv_write);
    const auto& of_format = call.kv.dtype == Dtype::int8   ? kernels.write_bytes
                            : call.kv.dtype == Dtype::int4 ? kernels.write_fours
                            : call.kv.dtype == kFp8  ? kernels.write_eighths
                                                           : kernels.write;
    run_ = of_format[call.layer.dtype];
  }

  Work prepare(const Step& step, index_t) override {
    pieces_.clear();
    for (index_t row = 0; row < step.num_rows; ++row) {
      const index_t begin = step.row_starts[row], end = begin + step.row_counts[row];
      for (index_t position = begin; position < end;) {
        const index_t next = std::min(end, (position / kTileKeys + 1) * kTileKeys);
        const std::int32_t* blocks = blocks_of(step, row, group_);
        pieces_.push_back({blocks, step.row_offsets[row] + position - begin, next - position, position});
        position = next;
      }
    }
    if (call_.layer.rotary > 0) call_.rotation = step.rotations[call_.layer.rope];
    call_.pieces = pieces_.data();
    constexpr index_t kCost = 8;  // of a number of q, k and v, in multiplications
    Work work{index_t(pieces_.size()), 1, run_, &call_};
    if (work.count > 0)
      work.each_cost = kCost * step.num_tokens *
                       ((call_.layer.heads + call_.kv.kv_heads) * call_.kv.key_dim + call_.kv.kv_heads * call_.kv.value_dim) /
                       work.count;
    return work;
  }

 private:
  KvWriteCall call_;
  index_t group_;  // of layers
  void (*run_)(const void*, index_t, index_t);
  std::vector<KvWritePiece> pieces_;
};

// What the kernels rely on without looking.
void check(const AttentionLayer& layer) {
  QT_REQUIRE(takes(Dtype(layer.kv_dtype), layer.kv_heads, layer.key_width, layer.value_width, layer.block_size,
                   layer.values_in_keys),
             "%lld heads of %lld and %lld numbers in blocks of %lld", (long long)layer.kv_heads, (long long)layer.key_width,
             (long long)layer.value_width, (long long)layer.block_size);
  QT_REQUIRE(layer.heads > 0 && layer.heads % layer.kv_heads == 0, "%lld query heads share %lld KV heads",
             (long long)layer.heads, (long long)layer.kv_heads);
  QT_REQUIRE(layer.dtype >= 0 && layer.dtype <= int(Dtype::fp32) &&
                 (layer.kv_dtype == layer.dtype || layer.kv_dtype == int(Dtype::int8) || layer.kv_dtype == int(Dtype::int4) ||
                  layer.kv_dtype == int(kFp8)),
             "activations of format %d, a cache of %d", layer.dtype, layer.kv_dtype);
  QT_REQUIRE(layer.key_scale > 0.0f && layer.value_scale > 0.0f &&
                 (layer.kv_dtype == int(kFp8) || (layer.key_scale == 1.0f && layer.value_scale == 1.0f)),
             "scales of keys and values %g and %g for a cache of format %d", double(layer.key_scale), double(layer.value_scale),
             layer.kv_dtype);
  QT_REQUIRE(layer.window >= 0 && layer.chunk >= 0 && (layer.window == 0 || layer.chunk == 0), "window %lld, chunk %lld",
             (long long)layer.window, (long long)layer.chunk);
  QT_REQUIRE(layer.rotary >= 0 && layer.rotary % 2 == 0 && layer.rotary_first >= 0 && layer.rope >= 0 &&
                 layer.rotary_first + layer.rotary <= layer.key_width,
             "%lld rotary dimensions from %lld on of %lld, by rotation %lld", (long long)layer.rotary,
             (long long)layer.rotary_first, (long long)layer.key_width, (long long)layer.rope);
  QT_REQUIRE(!layer.values_in_keys || layer.value_scale == layer.key_scale, "scales %g and %g of one number",
             double(layer.key_scale), double(layer.value_scale));
  QT_REQUIRE(!layer.values_in_keys || (layer.value_width <= layer.key_width && !layer.k_norm &&
                                       (layer.rotary == 0 || layer.rotary_first >= layer.value_width)),
             "values of %lld numbers that keys of %lld, rotated from %lld on, begin with", (long long)layer.value_width,
             (long long)layer.key_width, (long long)layer.rotary_first);
  QT_REQUIRE(layer.growth == 0.0f || layer.period > 0, "growth %g by %lld positions after %lld",
             double(layer.growth), (long long)layer.period, (long long)layer.shift);
}

// The cache of a layer at a place, whose blocks may be larger than it needs.
PagedKv paged_at(const KvPlace& place, const AttentionLayer& layer) {
  PagedKv kv = paged(Dtype(layer.kv_dtype), layer.kv_heads, layer.key_width, layer.value_width, layer.block_size,
                     layer.values_in_keys);
  QT_REQUIRE(place.block_bytes >= kv.block_bytes && place.block_bytes % 64 == 0,
             "blocks of %lld bytes for keys and values of %lld", (long long)place.block_bytes, (long long)kv.block_bytes);
  kv.memory = place.memory;
  kv.block_bytes = place.block_bytes;
  return kv;
}

void run_alone(Op& op, const Step& step) {
  const Work work = op.prepare(step, pool().threads());
  pool().run(&work, 1);
}

AttentionOp attention_of(Program& program, const AttentionLayer& layer, const void* q, index_t q_stride, const KvPlace* kv,
                         void* out, index_t out_stride, index_t max_tokens) {
  check(layer);
  AttentionCall call{};
  call.kv = paged_at(*kv, layer);
  call.layer = layer;
  call.layer.scale *= layer.key_scale;
  call.q = q;
  call.out = out;
  call.q_stride = q_stride;
  call.out_stride = out_stride;
  call.group = layer.heads / layer.kv_heads;
  call.scratch = thread_memory;
  QT_REQUIRE(q_stride >= layer.heads * call.kv.key_dim && out_stride >= layer.heads * layer.value_width, "strides %lld, %lld",
             (long long)q_stride, (long long)out_stride);
  program.reserve(kPartialsBytes);
  return AttentionOp(call, kv->group, max_tokens, &program);
}

KvWriteOp kv_write_of(const AttentionLayer& layer, const void* q, index_t q_stride, const void* k, index_t k_stride,
                      const void* v, index_t v_stride, const KvPlace* kv, void* q_out, index_t out_stride) {
  check(layer);
  KvWriteCall call{};
  call.kv = paged_at(*kv, layer);
  call.layer = layer;
  call.q = q;
  call.k = k;
  call.v = v;
  call.q_out = q_out;
  call.q_stride = q_stride;
  call.k_stride = k_stride;
  call.v_stride = v_stride;
  call.out_stride = out_stride;
  QT_REQUIRE(q_stride >= layer.heads * layer.key_width && out_stride >= layer.heads * call.kv.key_dim &&
                 k_stride >= layer.kv_heads * layer.key_width && v_stride >= layer.kv_heads * layer.value_width,
             "strides %lld, %lld, %lld, %lld", (long long)q_stride, (long long)k_stride, (long long)v_stride,
             (long long)out_stride);
  return KvWriteOp(call, kv->group);
}

}  // namespace
}  // namespace qt

// Bytes of a block of one layer; 0 where the kernels do not take such heads: key_width up to 576, value_width up to 512,
// block_size a multiple of 16, kv_dtype that of the activations, int8, int4 or fp8. values_in_keys: 0, 1, see
// AttentionLayer; not of int4.
QT_EXPORT index_t qt_kv_block_bytes(int kv_dtype, index_t kv_heads, index_t key_width, index_t value_width,
                                    index_t block_size, index_t values_in_keys) {
  if (!qt::takes(qt::Dtype(kv_dtype), kv_heads, key_width, value_width, block_size, values_in_keys)) return 0;
  return qt::paged(qt::Dtype(kv_dtype), kv_heads, key_width, value_width, block_size, values_in_keys).block_bytes;
}

// Numbers of a query head in qt_program_rope_kv_write's q_out.
QT_EXPORT index_t qt_query_width(index_t key_width) { return qt::padded(key_width); }

QT_EXPORT index_t qt_attention_layer_bytes() { return sizeof(qt::AttentionLayer); }

// Bytes of a program's scratch that its attention may use, for all layers together.
QT_EXPORT index_t qt_attention_scratch_bytes() { return qt::kPartialsBytes; }

// For tests: whether attention recorded from now on multiplies bf16 with VDPBF16PS where there is such a thing. 0, 1; -1: if
// it is faster.
QT_EXPORT void qt_attend_in_pairs(int wanted) { qt::wants_pairs = wanted; }

// Norms of query and key heads, their rotation, keys and values into the cache, queries to q_out. q: [T][heads][key_width],
// k: [T][kv_heads][key_width], v: [T][kv_heads][value_width], rows as many numbers apart as their strides say: places of one
// row, or rows of their own. q_out: [T][heads][qt_query_width(key_width)], rows out_stride apart, with zeros behind a head's
// numbers; it overlaps none of the others.
QT_EXPORT void qt_program_rope_kv_write(qt::Program* program, const qt::AttentionLayer* layer, const void* q, index_t q_stride,
                                        const void* k, index_t k_stride, const void* v, index_t v_stride,
                                        const qt::KvPlace* kv, void* q_out, index_t out_stride) {
  program->append(std::make_unique<qt::KvWriteOp>(
      qt::kv_write_of(*layer, q, q_stride, k, k_stride, v, v_stride, kv, q_out, out_stride)));
}

// The same at once.
QT_EXPORT void qt_write_kv(const qt::Step* step, const qt::AttentionLayer* layer, const void* q, index_t q_stride, const void* k,
                           index_t k_stride, const void* v, index_t v_stride, const qt::KvPlace* kv, void* q_out,
                           index_t out_stride) {
  qt::KvWriteOp op = qt::kv_write_of(*layer, q, q_stride, k, k_stride, v, v_stride, kv, q_out, out_stride);
  qt::run_alone(op, *step);
}

// Attention of the step's tokens over their rows' keys up to their own positions, which are in the cache already.
// q: what qt_program_rope_kv_write made; out: [T][heads][value_width]; rows q_stride and out_stride numbers apart.
// max_tokens: of a step.
QT_EXPORT void qt_program_attention(qt::Program* program, const qt::AttentionLayer* layer, const void* q, index_t q_stride,
                                    const qt::KvPlace* kv, void* out, index_t out_stride, index_t max_tokens) {
  program->append(std::make_unique<qt::AttentionOp>(
      qt::attention_of(*program, *layer, q, q_stride, kv, out, out_stride, max_tokens)));
}

// The same at once.
QT_EXPORT void qt_attend(const qt::Step* step, const qt::AttentionLayer* layer, const void* q, index_t q_stride,
                         const qt::KvPlace* kv, void* out, index_t out_stride) {
  qt::Program program;  // for its scratch alone
  qt::AttentionOp op = qt::attention_of(program, *layer, q, q_stride, kv, out, out_stride, 0);
  qt::run_alone(op, *step);
}
