#include "attention_cut.hpp"

#include <algorithm>
#include <limits>

#include "blocks.hpp"

namespace qt {
namespace {

constexpr index_t kPiecesPerThread = 4;  // at least, so that the threads finish together
constexpr index_t kReadRows = 12;        // rows that are multiplied in the time of one read of a key
constexpr index_t kUnitCost = 1 << 18;   // least multiplications of a unit that shares its KV head with others
// Least saving of the busiest thread, in multiplications, for a separate scores work: some 4 microseconds, the cost of one more
// barrier of all threads.
constexpr index_t kApartGain = 1 << 18;
constexpr index_t kApartThreads = 8;  // fewer threads save little: the rest of the step is longer than such a unit
// Most rows of a piece that is divided by keys. Partial results of 256 rows take as many bytes as half of their keys and values in
// bf16; more rows are divided by tokens, and each part reads the keys again.
constexpr index_t kSplitRows = 256;

// True if VDPBF16PS is faster than fp32 FMA. On AMD's Zen 4 and 5 it is twice as fast. On Intel it is half as fast (Emerald
// Rapids: one in two cycles); Intel processors with AMX use the AMX kernels. Chosen by vendor, not by measurement: the same
// machine must always round alike. -1: not decided yet.
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

index_t quotient_up(index_t a, index_t b) { return (a + b - 1) / b; }

struct Range {
  index_t begin, end;
};

// Number of the keys [begin, end) that a piece sees.
index_t keys_seen(const AttentionCall& call, const AttentionPiece& piece, Range keys) {
  const index_t seen = seen_from(call.layer.window, call.layer.chunk, piece.position);
  return std::min(piece.position + piece.count, keys.end) - std::max(seen, keys.begin);
}

// Multiplications of a piece, masked keys of its group included.
index_t cost_of_item(const void* description, index_t item) {
  const AttentionCall& call = *static_cast<const AttentionCall*>(description);
  const index_t units = call.kv.kv_heads * call.kv_head_units;
  const AttentionPiece& piece = call.pieces[call.unit_after_unit ? item % call.num_pieces : item / units];
  return cost_of_number(piece.count * call.unit_heads) * (call.kv.key_dim + call.kv.value_dim) *
         keys_seen(call, piece, {piece.first * kPartitionKeys, piece.last * kPartitionKeys});
}

index_t cost_of_scores(const void* description, index_t item) {
  const AttentionCall& call = *static_cast<const AttentionCall*>(description);
  const ScorePiece& at = call.score_pieces[item / call.kv.kv_heads];
  const AttentionPiece& piece = call.pieces[at.piece];
  return cost_of_number(piece.count * call.unit_heads) * call.kv.key_dim *
         keys_seen(call, piece, {at.tile * kTileKeys, at.end * kTileKeys});
}

index_t cost_of_values(const void* description, index_t item) {
  const AttentionCall& call = *static_cast<const AttentionCall*>(description);
  const index_t parts = quotient_up(call.kv.value_dim, call.part_dim);
  const AttentionPiece& piece = call.pieces[item / (call.kv.kv_heads * parts)];
  return cost_of_number(piece.count * call.unit_heads) *
         std::min(call.part_dim, call.kv.value_dim - item % parts * call.part_dim) *
         keys_seen(call, piece, {piece.first * kPartitionKeys, piece.last * kPartitionKeys});
}

}  // namespace

void want_pairs(int wanted) { wants_pairs = wanted; }

index_t cost_of_number(index_t rows) { return std::max(kReadRows, rows); }

AttentionKernel kernel_of(const AttentionCall& call) {
  const AttentionKernel& in_pairs = QT_CHOOSE(attention).attend_in_pairs;
  if (call.kv.dtype == Dtype::bf16 && in_pairs.run && pairs_wanted()) return in_pairs;
  return QT_CHOOSE_ONE(attention, [&](const AttentionKernels& kernels) -> const AttentionKernel& {
    const auto& of_format = call.kv.dtype == Dtype::int8   ? kernels.attend_bytes
                            : call.kv.dtype == Dtype::int4 ? kernels.attend_fours
                            : call.kv.dtype == Dtype::fp8  ? kernels.attend_eighths
                                                           : kernels.attend;
    return of_format[call.layer.dtype];
  });
}

AttentionCut::AttentionCut(const AttentionCall& call, index_t group, index_t max_tokens, const Program* program)
    : call_(call), group_(group), program_(program), kernel_(kernel_of(call)) {
  may_be_apart_ = call.group <= kFewRows && !call.layer.values_in_keys;
  share_heads(1);
  call_.group_tokens = std::max(index_t(1), kernel_.group_rows / call_.unit_heads);
  const index_t numbers = call_.group_tokens * call_.unit_heads * std::max(call.kv.key_dim, call.kv.value_dim);
  most_groups_ = std::min(kernel_.most_groups, kMaxNumbers / numbers);
  pieces_.reserve(max_tokens);
}

void AttentionCut::describe(const Step& step, index_t threads) {
  pieces_.clear();
  score_pieces_.clear();
  share_heads(1);
  call_.part_dim = call_.kv.value_dim;
  index_t keys = 0;  // keys that are multiplied with one unit's queries
  for (index_t row = 0; row < step.num_rows; ++row)
    for (index_t end = step.row_counts[row], begin; end > 0; end = begin) {
      begin = end * call_.unit_heads > kSplitRows ? begin_of(end, 1) : 0;
      keys += cost_of(piece_of(step, row, begin, end));
    }
  // Cost limit of one piece, so that the threads finish together.
  const index_t most = threads == 1 ? std::numeric_limits<index_t>::max()
                                    : std::max(kPartitionKeys, keys * units() / (threads * kPiecesPerThread));
  call_.unit_after_unit = false;
  for (index_t row = 0; row < step.num_rows; ++row)
    // The last tokens of a row see the most keys, so they come first; the threads finish with small pieces.
    for (index_t end = step.row_counts[row], begin; end > 0; end = begin) {
      index_t groups = most_groups_;
      do begin = begin_of(end, groups);
      while (!is_small(piece_of(step, row, begin, end), most) && --groups);
      pieces_.push_back(piece_of(step, row, begin, end));
      call_.unit_after_unit |= end - begin > call_.group_tokens;
    }
  share_heads(units_for(threads, most));
  const index_t floats = may_be_apart_ && threads >= kApartThreads ? take_apart(threads, most) : 0;
  split(most, floats);
  call_.pieces = pieces_.data();
  call_.num_pieces = index_t(pieces_.size());
  call_.score_pieces = score_pieces_.data();
  count_bytes(step);
}

Work AttentionCut::scores() const {
  if (score_pieces_.empty()) return {};
  Work work{index_t(score_pieces_.size()) * units(), 1, kernel_.scores, &call_, nullptr, cost_of_scores};
  work.bytes = bytes_ * call_.kv.key_bytes / call_.kv.tile_bytes;
  work.bytes_again = bytes_again_ * call_.kv.key_bytes / call_.kv.tile_bytes;
  return work;
}

Work AttentionCut::rest() const {
  Work work{call_.num_pieces * units(), 1, kernel_.run, &call_, nullptr, cost_of_item};
  const Work before = scores();
  if (before.count > 0) work.count *= parts(), work.run = kernel_.values, work.cost = cost_of_values;
  work.bytes = bytes_ - before.bytes;
  work.bytes_again = bytes_again_ - before.bytes_again;
  return work;
}

// Each unit reads the keys and values of a piece once. Further pieces of the same row read them again.
void AttentionCut::count_bytes(const Step& step) {
  const index_t key_bytes = call_.kv.tile_bytes / kTileKeys * units();
  bytes_ = 0;
  for (const AttentionPiece& piece : pieces_)
    bytes_ += key_bytes * keys_seen(call_, piece, {piece.first * kPartitionKeys, piece.last * kPartitionKeys});
  bytes_again_ = bytes_;
  for (index_t row = 0; row < step.num_rows; ++row)
    bytes_again_ -= call_.kv.tile_bytes / kTileKeys * call_.kv.kv_heads *
                    (step.row_starts[row] + step.row_counts[row] - seen_from(step.row_starts[row]));
}

// First token of the last `groups` groups in a row's tokens [0, end).
index_t AttentionCut::begin_of(index_t end, index_t groups) const {
  return std::max(index_t(0), (end - 1) / call_.group_tokens + 1 - groups) * call_.group_tokens;
}

// Piece of the tokens [begin, end) of a row.
AttentionPiece AttentionCut::piece_of(const Step& step, index_t row, index_t begin, index_t end) const {
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

// Tokens times keys.
index_t AttentionCut::cost_of(const AttentionPiece& piece) const {
  return (piece.position + piece.count - seen_from(piece.position)) * piece.count;
}

// Divides a KV head's query heads into at most `units` units, or into the minimum number of units.
void AttentionCut::share_heads(index_t units) {
  units = std::clamp(units, quotient_up(call_.group, kMaxRows), call_.group);
  call_.unit_heads = quotient_up(call_.group, units);
  call_.kv_head_units = quotient_up(call_.group, call_.unit_heads);
}

// Number of units of a KV head. Several units pay off if threads would be idle and multiplications outweigh the repeated reads
// of the keys.
index_t AttentionCut::units_for(index_t threads, index_t most) const {
  index_t parts = 0, cost = 0;
  for (const AttentionPiece& piece : pieces_) {
    const index_t cuts = cuts_of(piece, most);
    parts += cuts, cost = std::max(cost, cost_of(piece) / cuts);
  }
  const index_t multiplications = cost * call_.group * (call_.kv.key_dim + call_.kv.value_dim);
  return std::min(threads / std::max(index_t(1), parts * call_.kv.kv_heads), multiplications / kUnitCost);
}

// Number of partition ranges of a piece with the cost limit `most`.
index_t AttentionCut::cuts_of(const AttentionPiece& piece, index_t most) const {
  const index_t wanted = std::max(index_t(1), most / kPartitionKeys / piece.count);  // partitions
  return piece.count * call_.unit_heads > kSplitRows ? 1 : quotient_up(piece.last - piece.first, wanted);
}

// Keys of the longest of these ranges.
index_t AttentionCut::keys_of_cut(const AttentionPiece& piece, index_t most) const {
  const index_t all = piece.position + piece.count - seen_from(piece.position);
  return std::min(all, quotient_up(piece.last - piece.first, cuts_of(piece, most)) * kPartitionKeys);
}

// True if the threads finish together with pieces of this size. Ranges of partitions may cost twice the limit: parts by tokens
// would cost less, but read the keys again.
bool AttentionCut::is_small(const AttentionPiece& piece, index_t most) const {
  const index_t limit = cuts_of(piece, most) > 1 ? 2 * most : most;
  return keys_of_cut(piece, most) * piece.count <= limit;
}

// The cheapest division into separate score and value works, for pieces of at most kFewRows rows. Among equal costs, the one
// with the largest pieces.
AttentionCut::Apart AttentionCut::best_apart(index_t threads, index_t most) const {
  const index_t kv_heads = call_.kv.kv_heads;
  index_t tiles = 0, cuts = 0, rows = 0, values = 0;  // values: cost per number of the most expensive piece
  for (const AttentionPiece& piece : pieces_) {
    tiles += (piece.position + piece.count - 1) / kTileKeys + 1 - seen_from(piece.position) / kTileKeys;
    cuts += cuts_of(piece, most);
    rows = std::max(rows, piece.count * call_.group);
    values = std::max(values, cost_of_number(piece.count * call_.group) * keys_of_cut(piece, most));
  }
  const index_t tiles_each = quotient_up(tiles * kv_heads, threads);
  const index_t of_scores = tiles_each * kTileKeys * cost_of_number(rows) * call_.kv.key_dim;
  Apart best{tiles_each, 0, std::numeric_limits<index_t>::max()};
  for (index_t part_dim = call_.kv.value_dim; part_dim > 0; part_dim -= kTileKeys) {
    const index_t items = cuts * kv_heads * quotient_up(call_.kv.value_dim, part_dim);
    const index_t cost = of_scores + quotient_up(items, threads) * part_dim * values;
    if (cost < best.cost) best.part_dim = part_dim, best.cost = cost;
  }
  return best;
}

// Separates the scores if there are fewer units than threads and the saving exceeds the cost of a barrier. Returns the scratch
// floats of the scores; 0: not separated.
index_t AttentionCut::take_apart(index_t threads, index_t most) {
  index_t items = 0, cost = 0;
  for (const AttentionPiece& piece : pieces_) {
    if (piece.count * call_.group > kFewRows) return 0;
    items += cuts_of(piece, most) * units();
    cost = std::max(cost, cost_of_number(piece.count * call_.unit_heads) * keys_of_cut(piece, most));
  }
  if (items == 0 || items >= threads) return 0;
  const Apart apart = best_apart(threads, most);
  if (cost * (call_.kv.key_dim + call_.kv.value_dim) - apart.cost < kApartGain) return 0;
  index_t floats = 0;
  for (AttentionPiece& piece : pieces_) {
    const index_t first = piece.first * kPartitionTiles, end = (piece.position + piece.count - 1) / kTileKeys + 1;
    piece.chunk_scores = piece.count * call_.group * kChunkKeys;
    piece.unit_scores = quotient_up((end - first) * kTileKeys, kChunkKeys) * piece.chunk_scores;
    piece.scores = reinterpret_cast<float*>(program_->scratch()) + floats;
    floats += call_.kv.kv_heads * piece.unit_scores;
  }
  if (floats * index_t(sizeof(float)) > kPartialsBytes) return 0;
  share_heads(1);
  call_.part_dim = apart.part_dim;
  for (index_t i = 0; i < index_t(pieces_.size()); ++i) {
    const AttentionPiece& piece = pieces_[i];
    const index_t first = seen_from(piece.position) / kTileKeys, end = (piece.position + piece.count - 1) / kTileKeys + 1;
    const index_t tiles = end - first, ranges = quotient_up(tiles, apart.tiles);
    for (index_t range = 0; range < ranges; ++range)
      score_pieces_.push_back({i, first + tiles * range / ranges, first + tiles * (range + 1) / ranges});
  }
  return floats;
}

// Divides pieces above the cost limit `most` into ranges of partitions. floats: scratch already in use.
void AttentionCut::split(index_t most, index_t floats) {
  const index_t whole = index_t(pieces_.size()), places = units() * parts();
  if (index_t(pending_.size()) < whole * places) pending_.resize(whole * places);
  float* const partials = reinterpret_cast<float*>(program_->scratch());
  index_t counters = 0;
  for (index_t i = 0; i < whole; ++i) {
    AttentionPiece piece = pieces_[i];
    const index_t partitions = piece.last - piece.first, cuts = cuts_of(piece, most);
    piece.partial_floats = piece.count * call_.unit_heads * (call_.part_dim + 2);
    const index_t wanted = places * partitions * piece.partial_floats;
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
    for (index_t place = 0; place < places; ++place) pending_[counters + place] = std::uint32_t(cuts);
    floats += wanted;
    counters += places;
  }
}

}  // namespace qt
