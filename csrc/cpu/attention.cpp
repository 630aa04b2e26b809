// Attention and the write to the cache as operations of a program: what a step's rows mean as pieces of work.
#include "attention.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "blocks.hpp"
#include "require.hpp"
#include "thread_memory.hpp"

namespace qt {
namespace {

constexpr index_t kPiecesPerThread = 4;  // at least, for the threads to finish together
// Of the program's scratch for partitions that are reduced apart: a million tokens of context of 32 heads. A row for which no
// room is left is not cut.
constexpr index_t kPartialsBytes = 32 << 20;

index_t bytes_of(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : dtype == Dtype::int8 ? 1 : 2; }

bool takes(Dtype kv_dtype, index_t kv_heads, index_t head_dim, index_t block_size) {
  return kv_heads > 0 && head_dim > 0 && head_dim % kTileKeys == 0 && head_dim <= kMaxHeadDim && block_size > 0 &&
         block_size % kTileKeys == 0 && kv_dtype != Dtype::int4;
}

PagedKv paged(Dtype dtype, index_t kv_heads, index_t head_dim, index_t block_size) {
  PagedKv kv{};
  kv.dtype = dtype;
  kv.kv_heads = kv_heads;
  kv.head_dim = head_dim;
  kv.block_tiles = block_size / kTileKeys;
  kv.plane_bytes = kTileKeys * head_dim * bytes_of(dtype);
  kv.tile_bytes = 2 * kv.plane_bytes + (dtype == Dtype::int8 ? 2 * kTileKeys * index_t(sizeof(float)) : 0);
  kv.head_bytes = kv.block_tiles * kv.tile_bytes;
  kv.block_bytes = kv_heads * kv.head_bytes;
  return kv;
}

// The cache of a layer at a place, whose blocks may be larger than it needs.
PagedKv paged_at(const KvPlace& place, Dtype dtype, index_t kv_heads, index_t head_dim, index_t block_size) {
  PagedKv kv = paged(dtype, kv_heads, head_dim, block_size);
  QT_REQUIRE(place.block_bytes >= kv.block_bytes && place.block_bytes % 64 == 0,
             "blocks of %lld bytes for keys and values of %lld", (long long)place.block_bytes, (long long)kv.block_bytes);
  kv.memory = place.memory;
  kv.block_bytes = place.block_bytes;
  return kv;
}

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
  AttentionOp(const AttentionCall& call, index_t group, Dtype dtype, index_t max_tokens, const Program* program)
      : call_(call), group_(group), program_(program) {
    const AttentionKernels& kernels = QT_CHOOSE(attention);
    AttentionKernel kernel = (call.kv.dtype == Dtype::int8 ? kernels.attend_bytes : kernels.attend)[int(dtype)];
    if (call.kv.dtype == Dtype::bf16 && kernels.attend_in_pairs.run && pairs_wanted()) kernel = kernels.attend_in_pairs;
    run_ = kernel.run;
    call_.unit_heads = std::min(call.group, kMaxRows);
    call_.kv_head_units = (call.group + call_.unit_heads - 1) / call_.unit_heads;
    call_.group_tokens = std::max(index_t(1), kernel.group_rows / call_.unit_heads);
    const index_t numbers = call_.group_tokens * call_.unit_heads * call.kv.head_dim;
    most_groups_ = std::min(kernel.most_groups, kMaxNumbers / numbers);
    pieces_.reserve(max_tokens);
  }

  Work prepare(const Step& step, index_t threads) override {
    pieces_.clear();
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
    split(most);
    call_.pieces = pieces_.data();
    call_.num_pieces = index_t(pieces_.size());
    Work work{call_.num_pieces * units(), 1, run_, &call_, nullptr, cost_of_item};
    count_bytes(step, work);
    return work;
  }

 private:
  // Multiplications of a piece of work, were all of its group's keys multiplied.
  static index_t cost_of_item(const void* description, index_t item) {
    constexpr index_t kReadRows = 12;  // so many rows are multiplied in the time in which a key is read
    const AttentionCall& call = *static_cast<const AttentionCall*>(description);
    const index_t units = call.kv.kv_heads * call.kv_head_units;
    const AttentionPiece& piece = call.pieces[call.unit_after_unit ? item % call.num_pieces : item / units];
    const index_t seen = call.window && piece.position >= call.window ? piece.position + 1 - call.window : 0;
    const index_t begin = std::max(seen, piece.first * kPartitionKeys);
    const index_t end = std::min(piece.position + piece.count, piece.last * kPartitionKeys);
    return std::max(kReadRows, piece.count * call.unit_heads) * (end - begin) * 2 * call.kv.head_dim;
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

  index_t seen_from(index_t position) const {
    return call_.window && position >= call_.window ? position + 1 - call_.window : 0;
  }

  // Tokens times keys.
  index_t cost_of(const AttentionPiece& piece) const {
    return (piece.position + piece.count - seen_from(piece.position)) * piece.count;
  }

  // Cuts pieces that cost more than `most` into ranges of partitions. Decides nothing about the result.
  void split(index_t most) {
    const auto cuts_of = [&](const AttentionPiece& piece) {
      const index_t wanted = std::max(index_t(1), most / kPartitionKeys / piece.count);  // partitions
      return piece.count > call_.group_tokens ? 1 : (piece.last - piece.first + wanted - 1) / wanted;
    };
    const index_t whole = index_t(pieces_.size());
    if (index_t(pending_.size()) < whole * units()) pending_.resize(whole * units());
    float* const partials = reinterpret_cast<float*>(program_->scratch());
    index_t floats = 0, counters = 0;
    for (index_t i = 0; i < whole; ++i) {
      AttentionPiece piece = pieces_[i];
      const index_t partitions = piece.last - piece.first, cuts = cuts_of(piece);
      piece.partial_floats = piece.count * call_.unit_heads * (call_.kv.head_dim + 2);
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
  KvWriteOp(const KvWriteCall& call, index_t group, Dtype dtype) : call_(call), group_(group) {
    run_ = (call.kv.dtype == Dtype::int8 ? QT_CHOOSE(kv_write).write_bytes : QT_CHOOSE(kv_write).write)[int(dtype)];
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
    call_.cosines = step.cosines;
    call_.sines = step.sines;
    call_.rope_by_token = step.rope_by_token != 0;
    call_.pieces = pieces_.data();
    constexpr index_t kCost = 8;  // of a number of q, k and v, in multiplications
    Work work{index_t(pieces_.size()), 1, run_, &call_};
    if (work.count > 0)
      work.each_cost = kCost * (call_.heads + 2 * call_.kv.kv_heads) * call_.kv.head_dim * step.num_tokens / work.count;
    return work;
  }

 private:
  KvWriteCall call_;
  index_t group_;  // of layers
  void (*run_)(const void*, index_t, index_t);
  std::vector<KvWritePiece> pieces_;
};

// What the kernels rely on without looking.
void check_heads(index_t heads, index_t kv_heads, index_t head_dim, index_t block_size, int kv_dtype, int dtype) {
  QT_REQUIRE(takes(Dtype(kv_dtype), kv_heads, head_dim, block_size), "%lld heads of %lld numbers in blocks of %lld",
             (long long)kv_heads, (long long)head_dim, (long long)block_size);
  QT_REQUIRE(heads > 0 && heads % kv_heads == 0, "%lld query heads share %lld KV heads", (long long)heads,
             (long long)kv_heads);
  QT_REQUIRE(dtype >= 0 && dtype <= int(Dtype::fp32) && (kv_dtype == dtype || kv_dtype == int(Dtype::int8)),
             "activations of format %d, a cache of %d", dtype, kv_dtype);
}

void run_alone(Op& op, const Step& step) {
  const Work work = op.prepare(step, pool().threads());
  pool().run(&work, 1);
}

AttentionOp attention_of(Program& program, const void* q, index_t q_stride, const KvPlace* kv, index_t heads,
                         index_t kv_heads, index_t head_dim, index_t block_size, index_t window, float softcap,
                         const float* alibi_slopes, float scale, void* out, index_t out_stride, index_t max_tokens, int dtype, int kv_dtype) {
  check_heads(heads, kv_heads, head_dim, block_size, kv_dtype, dtype);
  QT_REQUIRE(window >= 0 && q_stride >= heads * head_dim && out_stride >= heads * head_dim, "window %lld, strides %lld, %lld",
             (long long)window, (long long)q_stride, (long long)out_stride);
  AttentionCall call{};
  call.kv = paged_at(*kv, Dtype(kv_dtype), kv_heads, head_dim, block_size);
  call.q = q;
  call.out = out;
  call.q_stride = q_stride;
  call.out_stride = out_stride;
  call.group = heads / kv_heads;
  call.window = window;
  call.scale = scale;
  call.softcap = softcap;
  call.alibi_slopes = alibi_slopes;
  call.scratch = thread_memory;
  program.reserve(kPartialsBytes);
  return AttentionOp(call, kv->group, Dtype(dtype), max_tokens, &program);
}

KvWriteOp kv_write_of(const void* q, index_t q_stride, const void* k, index_t k_stride, const void* v, index_t v_stride,
                      index_t heads, index_t kv_heads, index_t head_dim, index_t rotary, const void* q_norm,
                      const void* k_norm, float eps, const KvPlace* kv, index_t block_size, void* q_out, index_t out_stride,
                      int dtype, int kv_dtype) {
  check_heads(heads, kv_heads, head_dim, block_size, kv_dtype, dtype);
  QT_REQUIRE(rotary >= 0 && rotary <= head_dim && rotary % 2 == 0, "%lld rotary dimensions of %lld", (long long)rotary,
             (long long)head_dim);
  QT_REQUIRE(q_stride >= heads * head_dim && out_stride >= heads * head_dim && k_stride >= kv_heads * head_dim &&
                 v_stride >= kv_heads * head_dim,
             "strides %lld, %lld, %lld, %lld", (long long)q_stride, (long long)k_stride, (long long)v_stride,
             (long long)out_stride);
  KvWriteCall call{};
  call.kv = paged_at(*kv, Dtype(kv_dtype), kv_heads, head_dim, block_size);
  call.q = q;
  call.k = k;
  call.v = v;
  call.q_out = q_out;
  call.q_stride = q_stride;
  call.k_stride = k_stride;
  call.v_stride = v_stride;
  call.out_stride = out_stride;
  call.heads = heads;
  call.rotary = rotary;
  call.q_norm = q_norm;
  call.k_norm = k_norm;
  call.eps = eps;
  return KvWriteOp(call, kv->group, Dtype(dtype));
}

}  // namespace
}  // namespace qt

// Bytes of a block of one layer; 0 where the kernels do not take such heads: head_dim is a multiple of 16 up to 256, block_size
// a multiple of 16, kv_dtype that of the activations or int8.
QT_EXPORT index_t qt_kv_block_bytes(int kv_dtype, index_t kv_heads, index_t head_dim, index_t block_size) {
  if (!qt::takes(qt::Dtype(kv_dtype), kv_heads, head_dim, block_size)) return 0;
  return qt::paged(qt::Dtype(kv_dtype), kv_heads, head_dim, block_size).block_bytes;
}

// Bytes of a program's scratch that its attention may use, for all layers together.
QT_EXPORT index_t qt_attention_scratch_bytes() { return qt::kPartialsBytes; }

// For tests: whether attention recorded from now on multiplies bf16 with VDPBF16PS where there is such a thing. 0, 1; -1: if
// it is faster.
QT_EXPORT void qt_attend_in_pairs(int wanted) { qt::wants_pairs = wanted; }

// Norms of query and key heads (null: none), rotary positions of the first `rotary` numbers of a head (0: none), keys and
// values into the cache, queries to q_out. q: [T][heads][head_dim], k, v: [T][kv_heads][head_dim], rows as many numbers apart
// as their strides say: places of one row, or rows of their own. q_out: [T][heads][head_dim], rows out_stride apart, may be q
// itself; norms: [head_dim].
QT_EXPORT void qt_program_rope_kv_write(qt::Program* program, const void* q, index_t q_stride, const void* k,
                                        index_t k_stride, const void* v, index_t v_stride, index_t heads, index_t kv_heads,
                                        index_t head_dim, index_t rotary, const void* q_norm, const void* k_norm, float eps,
                                        const qt::KvPlace* kv, index_t block_size, void* q_out, index_t out_stride, int dtype,
                                        int kv_dtype) {
  program->append(std::make_unique<qt::KvWriteOp>(qt::kv_write_of(q, q_stride, k, k_stride, v, v_stride, heads, kv_heads,
                                                                  head_dim, rotary, q_norm, k_norm, eps, kv, block_size,
                                                                  q_out, out_stride, dtype, kv_dtype)));
}

// The same at once.
QT_EXPORT void qt_write_kv(const qt::Step* step, const void* q, index_t q_stride, const void* k, index_t k_stride,
                           const void* v, index_t v_stride, index_t heads, index_t kv_heads, index_t head_dim,
                           index_t rotary, const void* q_norm, const void* k_norm, float eps, const qt::KvPlace* kv, index_t block_size,
                           void* q_out, index_t out_stride, int dtype, int kv_dtype) {
  qt::KvWriteOp op = qt::kv_write_of(q, q_stride, k, k_stride, v, v_stride, heads, kv_heads, head_dim, rotary, q_norm, k_norm,
                                     eps, kv, block_size, q_out, out_stride, dtype, kv_dtype);
  qt::run_alone(op, *step);
}

// Attention of the step's tokens over their rows' keys up to their own positions, which are in the cache already.
// q, out: [T][heads][head_dim], rows q_stride and out_stride numbers apart. window: how many keys a token sees, itself
// included; 0: all. softcap: 0 for none. alibi_slopes: fp32 [heads] or null. max_tokens: of a step.
QT_EXPORT void qt_program_attention(qt::Program* program, const void* q, index_t q_stride, const qt::KvPlace* kv,
                                    index_t heads, index_t kv_heads, index_t head_dim, index_t block_size, index_t window,
                                    float softcap, const float* alibi_slopes, float scale, void* out, index_t out_stride, index_t max_tokens,
                                    int dtype, int kv_dtype) {
  program->append(std::make_unique<qt::AttentionOp>(
      qt::attention_of(*program, q, q_stride, kv, heads, kv_heads, head_dim, block_size, window, softcap, alibi_slopes,
                       scale, out, out_stride, max_tokens, dtype, kv_dtype)));
}

// The same at once.
QT_EXPORT void qt_attend(const qt::Step* step, const void* q, index_t q_stride, const qt::KvPlace* kv, index_t heads,
                         index_t kv_heads, index_t head_dim, index_t block_size, index_t window, float softcap,
                         const float* alibi_slopes, float scale, void* out, index_t out_stride, int dtype, int kv_dtype) {
  qt::Program program;  // for its scratch alone
  qt::AttentionOp op = qt::attention_of(program, q, q_stride, kv, heads, kv_heads, head_dim, block_size, window, softcap,
                                        alibi_slopes, scale, out, out_stride, 0, dtype, kv_dtype);
  qt::run_alone(op, *step);
}
