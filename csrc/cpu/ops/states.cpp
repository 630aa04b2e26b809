// C ABI of the operations with a state: single calls, and operations of a program that read and write state blocks.
#include "states.hpp"

#include <algorithm>
#include <vector>

#include "blocks.hpp"
#include "require.hpp"

namespace qt {
namespace {

using Run = StateKernels::Run;

constexpr index_t kCostAtOnce = 32768;  // one take of a thread: some microseconds of work
constexpr index_t kSmallState = 65536;   // in bytes

// Memory that a piece reads first; at the start of a request, the memory that it writes.
Region region_of_unit(const void* description, index_t piece) {
  const StateCall& c = *static_cast<const StateCall*>(description);
  const StateRow& row = c.rows[piece / c.units];
  const index_t head = piece % c.units / c.head_units, first = piece % c.head_units * c.unit_columns;
  const index_t columns = std::min(c.columns - first, c.unit_columns);
  const char* state = (row.from ? row.from : row.to) + c.offset + head * c.head_bytes() + first * c.element;
  return {state, columns * c.element, c.line_bytes(), c.lines};
}

Work work_of(const StateCall& call, Run run, index_t num_rows, const void* description) {
  const bool is_small = call.state_bytes() < kSmallState;  // prefetch of a later work is more useful
  const index_t grain = kCostAtOnce / call.token_cost;
  return {.count = num_rows * call.units, .grain = grain < 1 ? 1 : grain, .run = run, .call = description,
          .region = is_small ? nullptr : region_of_unit,
          .cost = [](const void* each, index_t piece) {
            const StateCall& c = *static_cast<const StateCall*>(each);
            return c.token_cost * c.rows[piece / c.units].count;
          },
          .bytes = 2 * num_rows * call.state_bytes()};
}

// Rows [first, first + count) of the call: one row of the step. Each continues from the state of the one before it.
struct RowChain {
  index_t first, count;
};

// Pieces of chains: `chain * units + unit`.
struct ChainedCall {
  const StateCall* call;
  Run run;
  const RowChain* chains;

  static void run_pieces(const void* description, index_t begin, index_t end) {
    const ChainedCall& c = *static_cast<const ChainedCall*>(description);
    for (index_t piece = begin; piece < end; ++piece) {
      const RowChain& chain = c.chains[piece / c.call->units];
      for (index_t row = chain.first; row < chain.first + chain.count; ++row) {
        const index_t own = row * c.call->units + piece % c.call->units;
        c.run(c.call, own, own + 1);
      }
    }
  }

  static index_t cost(const void* description, index_t piece) {
    const ChainedCall& c = *static_cast<const ChainedCall*>(description);
    const RowChain& chain = c.chains[piece / c.call->units];
    const StateRow &first = c.call->rows[chain.first], &last = c.call->rows[chain.first + chain.count - 1];
    return c.call->token_cost * (last.token + last.count - first.token);
  }
};

template <class Call>
void run_once(Call call, Run run, const StateRow* rows, index_t num_rows) {
  call.rows = rows;
  const Work work = work_of(call, run, num_rows, static_cast<const StateCall*>(&call));
  pool().run(&work, 1);
}

template <class Call>
class StateOp final : public Op {
 public:
  StateOp(const Call& call, Run run, const KvPlace& place) : call_(call), run_(run), place_(place) {}

  Work prepare(const Step& step, index_t) override {
    constexpr index_t kLong = 16;
    rows_.clear(), chains_.clear();
    count_drafts(step);
    for (const bool of_many : {true, false})  // long rows first: the threads finish with small pieces
      for (index_t row = 0; row < step.num_rows; ++row)
        if ((step.row_counts[row] >= kLong) == of_many) add(step, row);
    call_.rows = rows_.data();
    const StateCall* const call = &call_;
    Work work = work_of(call_, run_, index_t(rows_.size()), call);
    if (rows_.size() == chains_.size()) return work;
    chained_ = {call, run_, chains_.data()};
    work.count = index_t(chains_.size()) * call_.units;
    work.run = ChainedCall::run_pieces, work.call = &chained_, work.region = nullptr, work.cost = ChainedCall::cost;
    return work;
  }

 private:
  // Drafts before each row. A row has an output for each draft, and one more.
  void count_drafts(const Step& step) {
    drafts_.assign(1, 0);
    index_t output = 0;
    for (index_t row = 0; row < step.num_rows; ++row) {
      const index_t first = output, end = step.row_offsets[row] + step.row_counts[row];
      while (output < step.num_outputs && step.output_tokens[output] < end) ++output;
      drafts_.push_back(drafts_.back() + std::max(index_t(0), output - first - 1));
    }
  }

  // Adds a row of the step. If it has drafts, the state before each of them is saved.
  void add(const Step& step, index_t row) {
    const index_t first = index_t(rows_.size()), begin = drafts_[std::size_t(row)], end = drafts_[std::size_t(row) + 1];
    StateRow next{state_read(step, row, place_), state_written(step, row, place_), step.row_offsets[row],
                  step.row_counts[row] - (end - begin)};
    char* const written = next.to;
    for (index_t draft = begin; draft < end; ++draft) {
      next.to = draft_state(place_, draft);
      rows_.push_back(next);
      next = {next.to, written, next.token + next.count, 1};
    }
    rows_.push_back(next);
    chains_.push_back({first, index_t(rows_.size()) - first});
  }

  Call call_;
  Run run_;
  KvPlace place_;
  std::vector<StateRow> rows_;
  std::vector<RowChain> chains_;
  std::vector<index_t> drafts_;
  ChainedCall chained_;
};

template <class Call>
void append(Program* program, const Call& call, Run run, const KvPlace& place) {
  QT_REQUIRE(place.memory && call.offset >= 0 && call.offset < place.block_bytes, "a state %lld bytes into %lld",
             (long long)call.offset, (long long)place.block_bytes);
  program->append(std::make_unique<StateOp<Call>>(call, run, place));
}

constexpr index_t kExponential = 12;  // in multiplications

index_t units_of(index_t columns, index_t of_unit) { return (columns + of_unit - 1) / of_unit; }

CausalConvCall conv_call(const void* x, index_t x_stride, index_t channels, index_t taps, const float* weight,
                         const float* bias, int silu, void* y, index_t y_stride, index_t offset, int dtype) {
  QT_REQUIRE(channels > 0 && taps > 1 && taps <= kMaxTaps, "%lld taps", (long long)taps);
  CausalConvCall call;
  call.units = call.head_units = units_of(channels, kConvColumns), call.offset = offset;
  call.unit_columns = kConvColumns, call.lines = taps - 1, call.columns = channels;
  call.element = dtype == int(Dtype::fp32) ? 4 : 2;
  call.token_cost = (2 * taps + (silu ? kExponential : 0)) * (channels < kConvColumns ? channels : kConvColumns);
  call.x = {x, x_stride}, call.y = {y, y_stride};
  call.channels = channels, call.taps = taps, call.weight = weight, call.bias = bias, call.silu = silu != 0;
  return call;
}

SelectiveScanCall selective_call(const Columns (&columns)[5], index_t channels, index_t state_size, const float* a,
                                 const float* dt_bias, const float* skip, const Columns& y, index_t offset) {
  QT_REQUIRE(channels > 0 && state_size > 0 && state_size <= kMaxStateSize, "a state of %lld", (long long)state_size);
  SelectiveScanCall call;
  call.units = call.head_units = units_of(channels, kUnitColumns), call.offset = offset;
  call.lines = state_size, call.columns = channels, call.element = sizeof(float);
  call.token_cost = (kExponential + 3) * state_size * (channels < kUnitColumns ? channels : kUnitColumns);
  call.x = columns[0], call.dt = columns[1], call.b = columns[2], call.c = columns[3], call.gate = columns[4], call.y = y;
  call.channels = channels, call.state_size = state_size, call.a = a, call.dt_bias = dt_bias, call.skip = skip;
  return call;
}

HeadScanCall head_call(const Columns (&columns)[5], index_t heads, index_t head_dim, index_t groups, index_t state_size,
                       const float* a, const float* dt_bias, const float* skip, float dt_least, float dt_most,
                       const Columns& y, index_t offset) {
  QT_REQUIRE(heads > 0 && head_dim > 0 && state_size > 0 && state_size <= kMaxStateSize, "a state of %lld",
             (long long)state_size);
  QT_REQUIRE(groups > 0 && heads % groups == 0, "%lld heads in %lld groups", (long long)heads, (long long)groups);
  HeadScanCall call;
  call.head_units = units_of(head_dim, kUnitColumns), call.units = heads * call.head_units, call.offset = offset;
  call.lines = state_size, call.columns = head_dim, call.element = sizeof(float);
  call.token_cost = 3 * state_size * (head_dim < kUnitColumns ? head_dim : kUnitColumns);
  call.x = columns[0], call.dt = columns[1], call.b = columns[2], call.c = columns[3], call.gate = columns[4], call.y = y;
  call.heads = heads, call.head_dim = head_dim, call.groups = groups, call.state_size = state_size;
  call.a = a, call.dt_bias = dt_bias, call.skip = skip, call.dt_least = dt_least, call.dt_most = dt_most;
  return call;
}

DeltaRuleCall delta_call(const Columns (&columns)[5], index_t heads, index_t head_dim, index_t key_heads, index_t key_dim,
                         const float* a, const float* dt_bias, const Columns& y, index_t offset) {
  QT_REQUIRE(heads > 0 && head_dim > 0 && key_dim > 0 && key_dim <= kMaxStateSize, "keys of %lld", (long long)key_dim);
  QT_REQUIRE(key_heads > 0 && heads % key_heads == 0, "%lld heads share %lld", (long long)heads, (long long)key_heads);
  DeltaRuleCall call;
  call.head_units = units_of(head_dim, kUnitColumns), call.units = heads * call.head_units, call.offset = offset;
  call.lines = key_dim, call.columns = head_dim, call.element = sizeof(float);
  call.token_cost = 5 * key_dim * (head_dim < kUnitColumns ? head_dim : kUnitColumns);
  call.q = columns[0], call.k = columns[1], call.x = columns[2], call.alpha = columns[3], call.beta = columns[4], call.y = y;
  call.heads = heads, call.head_dim = head_dim, call.key_heads = key_heads, call.key_dim = key_dim;
  call.a = a, call.dt_bias = dt_bias;
  return call;
}

}  // namespace
}  // namespace qt

using qt::Columns;
using qt::KvPlace;
using qt::Program;
using qt::StateRow;

// Each operation has two forms: a call over `num_rows` rows with state addresses (rows), and an operation of a program for a
// layer with states at `place`. `offset`: byte offset of this operation's state in the layer's state. See states.hpp for shapes
// and formats, `quintet.executor.backends.cpu.program.graph_builder` for the caller of programs.

QT_EXPORT void qt_op_causal_conv(const StateRow* rows, index_t num_rows, index_t offset, const void* x, index_t x_stride,
                                 index_t channels, index_t taps, const float* weight, const float* bias, int silu, void* y,
                                 index_t y_stride, int dtype) {
  qt::run_once(qt::conv_call(x, x_stride, channels, taps, weight, bias, silu, y, y_stride, offset, dtype),
               QT_CHOOSE(causal_conv).causal_conv[dtype], rows, num_rows);
}

QT_EXPORT void qt_program_causal_conv(Program* program, const KvPlace* place, index_t offset, const void* x,
                                      index_t x_stride, index_t channels, index_t taps, const float* weight,
                                      const float* bias, int silu, void* y, index_t y_stride, int dtype) {
  qt::append(program, qt::conv_call(x, x_stride, channels, taps, weight, bias, silu, y, y_stride, offset, dtype),
             QT_CHOOSE(causal_conv).causal_conv[dtype], *place);
}

// columns: x, dt, b, c, gate.
QT_EXPORT void qt_op_selective_scan(const StateRow* rows, index_t num_rows, index_t offset, const Columns (&columns)[5],
                                    index_t channels, index_t state_size, const float* a, const float* dt_bias,
                                    const float* skip, void* y, index_t y_stride, int dtype) {
  qt::run_once(qt::selective_call(columns, channels, state_size, a, dt_bias, skip, {y, y_stride}, offset),
               QT_CHOOSE(states).selective_scan[dtype], rows, num_rows);
}

QT_EXPORT void qt_program_selective_scan(Program* program, const KvPlace* place, index_t offset,
                                         const Columns (&columns)[5], index_t channels, index_t state_size, const float* a,
                                         const float* dt_bias, const float* skip, void* y, index_t y_stride, int dtype) {
  qt::append(program, qt::selective_call(columns, channels, state_size, a, dt_bias, skip, {y, y_stride}, offset),
             QT_CHOOSE(states).selective_scan[dtype], *place);
}

// columns: x, dt, b, c, gate (null: none).
QT_EXPORT void qt_op_head_scan(const StateRow* rows, index_t num_rows, index_t offset, const Columns (&columns)[5],
                               index_t heads, index_t head_dim, index_t groups, index_t state_size, const float* a,
                               const float* dt_bias, const float* skip, float dt_least, float dt_most, void* y,
                               index_t y_stride, int dtype) {
  qt::run_once(qt::head_call(columns, heads, head_dim, groups, state_size, a, dt_bias, skip, dt_least, dt_most, {y, y_stride},
                             offset),
               QT_CHOOSE(states).head_scan[dtype], rows, num_rows);
}

QT_EXPORT void qt_program_head_scan(Program* program, const KvPlace* place, index_t offset,
                                    const Columns (&columns)[5], index_t heads, index_t head_dim, index_t groups,
                                    index_t state_size, const float* a, const float* dt_bias, const float* skip,
                                    float dt_least, float dt_most, void* y, index_t y_stride, int dtype) {
  qt::append(program,
             qt::head_call(columns, heads, head_dim, groups, state_size, a, dt_bias, skip, dt_least, dt_most, {y, y_stride},
                           offset),
             QT_CHOOSE(states).head_scan[dtype], *place);
}

// columns: q, k, v, alpha, beta.
QT_EXPORT void qt_op_delta_rule(const StateRow* rows, index_t num_rows, index_t offset, const Columns (&columns)[5],
                                index_t heads, index_t head_dim, index_t key_heads, index_t key_dim, const float* a,
                                const float* dt_bias, void* y, index_t y_stride, int dtype) {
  qt::run_once(qt::delta_call(columns, heads, head_dim, key_heads, key_dim, a, dt_bias, {y, y_stride}, offset),
               QT_CHOOSE(states).delta_rule[dtype], rows, num_rows);
}

QT_EXPORT void qt_program_delta_rule(Program* program, const KvPlace* place, index_t offset,
                                     const Columns (&columns)[5], index_t heads, index_t head_dim, index_t key_heads,
                                     index_t key_dim, const float* a, const float* dt_bias, void* y, index_t y_stride,
                                     int dtype) {
  qt::append(program, qt::delta_call(columns, heads, head_dim, key_heads, key_dim, a, dt_bias, {y, y_stride}, offset),
             QT_CHOOSE(states).delta_rule[dtype], *place);
}
