// State-space scans: each token decays the state, adds to it and reads its result from it. Formulas: see states.hpp.
//
// A thread owns a row and up to 64 columns of one head's state (or 64 channels). It takes them by vectors, from first to last
// token. Reduction order: over the state's rows, ascending, one lane for each column. No sum crosses lanes, so the order is the
// same for every instruction set and batch size.
//
// Decode: the state is read and written once a step. Limiter: memory, 8 bytes and 5 FLOPs an element. Prefill: the state stays in
// the L1 cache, and a pass over it computes eight tokens. Limiter: fp32 multiplications; Mamba 1: exponentials. Tokens are
// sequential, without the papers' chunked algorithm. It would be faster from about 64 tokens on, but its sums depend on where a
// row's tokens begin in the step.
#include "simd.hpp"
#include "states.hpp"

namespace qt::QT_ISA {
namespace {

constexpr index_t kTogether = 8;  // tokens of one pass over the state

QT_INLINE f32v sigmoid(f32v x) { return all(1.0f) / (all(1.0f) + exponential(-x)); }
QT_INLINE f32v silu(f32v x) { return x / (all(1.0f) + exponential(-x)); }

// log w for w >= 1: w = 2^e m with m in [0.7, 1.42), log m = 2 atanh((m - 1) / (m + 1)) by its series (relative remainder below
// 3e-9).
QT_INLINE f32v logarithm(f32v w) {
  i32v exponent = (as_bits(w) >> 23) - 127;
  f32v m = as_float((as_bits(w) & 0x007FFFFF) | 0x3F800000);
  const auto high = m > 1.41421356f;
  m = high ? m * 0.5f : m;
  exponent = high ? exponent + 1 : exponent;
  const f32v s = (m - 1.0f) / (m + 1.0f), z = s * s;
  f32v p = all(1.0f / 9);
  p = fma(p, z, all(1.0f / 7));
  p = fma(p, z, all(1.0f / 5));
  p = fma(p, z, all(1.0f / 3));
  p = fma(p, z, all(1.0f));
  const f32v e = to_float(exponent);
  return fma(e, all(0.693359375f), fma(s * 2.0f, p, e * -2.12194440e-4f));
}

// log(1 + e^x); x where both are equal in fp32. The rounding error of 1 + u is corrected to first order.
QT_INLINE f32v softplus(f32v x) {
  const f32v u = exponential(x), w = u + 1.0f;
  const f32v sum = logarithm(w) + (u - (w - 1.0f)) / w;
  return x > 20.0f ? x : sum;
}

template <class Element>
QT_INLINE const Element* row_of(const Columns& columns, index_t token) {
  return (const Element*)columns.numbers + token * columns.stride;
}

// Converts `count` numbers to fp32.
template <class Element>
QT_INLINE void widen(const Element* from, index_t count, float* to) {
  for (index_t i = 0; i < count; i += kLanes) store(to + i, load(from + i, count - i), count - i);
}

// A vector with all lanes valid (known at compile time), or the first `count`.
template <bool IsWhole, class Element>
QT_INLINE f32v read(const Element* from, index_t count) {
  if constexpr (IsWhole) return load(from);
  return load(from, count);
}

template <bool IsWhole, class Element>
QT_INLINE void write(Element* to, f32v value, index_t count) {
  if constexpr (IsWhole) return store(to, value);
  store(to, value, count);
}

QT_INLINE index_t least(index_t a, index_t b) { return a < b ? a : b; }

// --- Mamba 1 ---

// `count` channels from `channel` on, for all tokens of the row.
template <class Element, bool IsWhole>
void scan_channels(const SelectiveScanCall& call, const StateRow& row, index_t channel, index_t count) {
  const index_t size = call.state_size;
  f32v state[kMaxStateSize];
  const float* from = row.from ? (const float*)(row.from + call.offset) + channel : nullptr;
  for (index_t n = 0; n < size; ++n) state[n] = from ? read<IsWhole>(from + n * call.channels, count) : all(0.0f);
  const f32v bias = read<IsWhole>(call.dt_bias + channel, count), skip = read<IsWhole>(call.skip + channel, count);
  float b[kMaxStateSize], c[kMaxStateSize];
  for (index_t token = row.token; token < row.token + row.count; ++token) {
    widen(row_of<Element>(call.b, token), size, b);
    widen(row_of<Element>(call.c, token), size, c);
    const f32v x = read<IsWhole>(row_of<Element>(call.x, token) + channel, count);
    const f32v dt = softplus(read<IsWhole>(row_of<Element>(call.dt, token) + channel, count) + bias), in = dt * x;
    f32v y = all(0.0f);
    for (index_t n = 0; n < size; ++n) {
      const f32v kept = exponential(dt * read<IsWhole>(call.a + n * call.channels + channel, count)) * state[n];
      state[n] = fma(in, all(b[n]), kept);
      y = fma(state[n], all(c[n]), y);
    }
    y = fma(skip, x, y) * silu(read<IsWhole>(row_of<Element>(call.gate, token) + channel, count));
    write<IsWhole>((Element*)call.y.numbers + token * call.y.stride + channel, y, count);
  }
  float* to = (float*)(row.to + call.offset) + channel;
  for (index_t n = 0; n < size; ++n) write<IsWhole>(to + n * call.channels, state[n], count);
}

template <class Element>
void selective_scan(const void* description, index_t begin, index_t end) {
  const SelectiveScanCall& call = *static_cast<const SelectiveScanCall*>(description);
  for (index_t piece = begin; piece < end; ++piece) {
    const index_t first = piece % call.units * kUnitColumns, columns = least(kUnitColumns, call.channels - first);
    for (index_t i = 0; i < columns; i += kLanes)
      (columns - i < kLanes ? scan_channels<Element, false> : scan_channels<Element, true>)(
          call, call.rows[piece / call.units], first + i, columns - i);
  }
}

// --- Mamba 2 ---

// Inputs of some tokens that all columns of a head share.
struct HeadTokens {
  float b[kTogether][kMaxStateSize], c[kTogether][kMaxStateSize];
  float dt[kTogether + kLanes], decay[kTogether + kLanes];
};

template <class Element>
void read_head_tokens(const HeadScanCall& call, index_t head, index_t token, index_t count, HeadTokens& tokens) {
  const index_t group = head / (call.heads / call.groups) * call.state_size;
  for (index_t t = 0; t < count; ++t) {
    widen(row_of<Element>(call.b, token + t) + group, call.state_size, tokens.b[t]);
    widen(row_of<Element>(call.c, token + t) + group, call.state_size, tokens.c[t]);
    widen(row_of<Element>(call.dt, token + t) + head, 1, tokens.dt + t);
  }
  const f32v bias = all(call.dt_bias[head]), a = all(call.a[head]);
  for (index_t t = 0; t < count; t += kLanes) {
    f32v dt = softplus(load(tokens.dt + t, count - t) + bias);
    dt = min(all(call.dt_most), max(all(call.dt_least), dt));
    store(tokens.dt + t, dt);
    store(tokens.decay + t, exponential(dt * a));
  }
}

// Rows [n, n + Rows) of the state of one vector of columns, for some tokens; each adds `in` and accumulates `y`. The state rows
// are in registers, so each shared input is loaded once for all of them.
template <int Rows, bool IsWhole>
QT_INLINE void scan_rows(const HeadScanCall& call, const HeadTokens& shared, index_t num_tokens, const float* from, float* to,
                         index_t n, index_t count, const f32v (&in)[kTogether], f32v (&y)[kTogether]) {
  const index_t next = call.head_dim, place = n * next;
  f32v state[Rows];
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i) state[i] = from ? read<IsWhole>(from + place + i * next, count) : all(0.0f);
  for (index_t t = 0; t < num_tokens; ++t) {
    const f32v decay = all(shared.decay[t]);
    f32v sum = y[t];
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      state[i] = fma(in[t], all(shared.b[t][n + i]), state[i] * decay);
      sum = fma(state[i], all(shared.c[t][n + i]), sum);
    }
    y[t] = sum;
  }
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i) write<IsWhole>(to + place + i * next, state[i], count);
}

// Some tokens for `count` columns of a head from `column` on. from, to: the head's state, [state_size][head_dim]; from may be
// null.
template <class Element, bool IsWhole>
void scan_columns(const HeadScanCall& call, const HeadTokens& shared, index_t num_tokens, const float* from, float* to,
                  index_t head, index_t token, index_t column, index_t count) {
  constexpr int kRows = kRegisters / 2 - 4;  // state rows at a time: 12 or 4
  const index_t at = head * call.head_dim + column;
  f32v x[kTogether], in[kTogether], y[kTogether];
  for (index_t t = 0; t < num_tokens; ++t) {
    x[t] = read<IsWhole>(row_of<Element>(call.x, token + t) + at, count);
    in[t] = x[t] * all(shared.dt[t]);
    y[t] = all(0.0f);
  }
  if (from) from += column;
  to += column;
  index_t n = 0;
  for (; n + kRows <= call.state_size; n += kRows)
    scan_rows<kRows, IsWhole>(call, shared, num_tokens, from, to, n, count, in, y);
  for (; n < call.state_size; ++n) scan_rows<1, IsWhole>(call, shared, num_tokens, from, to, n, count, in, y);
  for (index_t t = 0; t < num_tokens; ++t) {
    f32v sum = fma(all(call.skip[head]), x[t], y[t]);
    if (call.gate.numbers) sum = sum * silu(read<IsWhole>(row_of<Element>(call.gate, token + t) + at, count));
    write<IsWhole>((Element*)call.y.numbers + (token + t) * call.y.stride + at, sum, count);
  }
}

// One token for `Vectors` whole vectors of a head's columns, with the operations of scan_columns. It walks the state in memory
// order, as one stream. from, to: as above; from is not null.
template <class Element, int Vectors>
void scan_token(const HeadScanCall& call, const HeadTokens& shared, const float* from, float* to, index_t head, index_t token,
                index_t column) {
  const index_t at = head * call.head_dim + column, next = call.head_dim;
  const f32v dt = all(shared.dt[0]), decay = all(shared.decay[0]);
  f32v x[Vectors], in[Vectors], y[Vectors];
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; ++v) {
    x[v] = load(row_of<Element>(call.x, token) + at + v * kLanes);
    in[v] = x[v] * dt, y[v] = all(0.0f);
  }
  from += column, to += column;
  for (index_t n = 0; n < call.state_size; ++n, from += next, to += next) {
    const f32v b = all(shared.b[0][n]), c = all(shared.c[0][n]);
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) {
      const f32v state = fma(in[v], b, load(from + v * kLanes) * decay);
      y[v] = fma(state, c, y[v]);
      store(to + v * kLanes, state);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; ++v) {
    f32v sum = fma(all(call.skip[head]), x[v], y[v]);
    if (call.gate.numbers) sum = sum * silu(load(row_of<Element>(call.gate, token) + at + v * kLanes));
    store((Element*)call.y.numbers + token * call.y.stride + at + v * kLanes, sum);
  }
}

template <class Element>
void head_scan(const void* description, index_t begin, index_t end) {
  constexpr int kVectors = 4;
  const HeadScanCall& call = *static_cast<const HeadScanCall*>(description);
  HeadTokens shared;
  for (index_t piece = begin; piece < end; ++piece) {
    const StateRow& row = call.rows[piece / call.units];
    const index_t head = piece % call.units / call.head_units, first = piece % call.head_units * kUnitColumns;
    const index_t columns = least(kUnitColumns, call.head_dim - first);
    const index_t place = head * call.state_size * call.head_dim;
    float* to = (float*)(row.to + call.offset) + place;
    const float* from = row.from ? (const float*)(row.from + call.offset) + place : nullptr;
    for (index_t t = 0; t < row.count; t += kTogether, from = to) {
      const index_t num_tokens = least(kTogether, row.count - t);
      read_head_tokens<Element>(call, head, row.token + t, num_tokens, shared);
      index_t i = 0;
      for (; num_tokens == 1 && from && i + kVectors * kLanes <= columns; i += kVectors * kLanes)
        scan_token<Element, kVectors>(call, shared, from, to, head, row.token + t, first + i);
      for (; i < columns; i += kLanes)
        (columns - i < kLanes ? scan_columns<Element, false> : scan_columns<Element, true>)(
            call, shared, num_tokens, from, to, head, row.token + t, first + i, columns - i);
    }
  }
}

// --- gated delta rule ---

// x / |x| * factor.
template <class Element>
void unit_length(const Element* x, index_t width, float factor, float* y) {
  f32v squares = all(0.0f);
  for (index_t i = 0; i < width; i += kLanes) {
    const f32v value = load(x + i, width - i);
    squares = fma(value, value, squares);
  }
  const f32v scale = all(factor / __builtin_sqrtf(sum_of(squares) + 1e-6f));
  for (index_t i = 0; i < width; i += kLanes) store(y + i, load(x + i, width - i) * scale, width - i);
}

// Inputs of a token that all columns of a head share.
struct DeltaToken {
  float q[kMaxStateSize], k[kMaxStateSize];
  float decay, beta;
};

template <class Element>
void read_delta_token(const DeltaRuleCall& call, index_t head, index_t token, DeltaToken& read) {
  const index_t key = head / (call.heads / call.key_heads) * call.key_dim;
  unit_length(row_of<Element>(call.q, token) + key, call.key_dim, 1.0f / __builtin_sqrtf(float(call.key_dim)), read.q);
  unit_length(row_of<Element>(call.k, token) + key, call.key_dim, 1.0f, read.k);
  const f32v alpha = load(row_of<Element>(call.alpha, token) + head, 1) + all(call.dt_bias[head]);
  read.decay = exponential(all(call.a[head]) * softplus(alpha))[0];
  read.beta = sigmoid(load(row_of<Element>(call.beta, token) + head, 1))[0];
}

// Columns of a head's state to read and write; `next` is the row stride.
struct DeltaColumns {
  const float* from;  // null: zeros
  float* to;
  index_t next;
  const float* ahead;  // prefetched while the columns are written
};

// Prediction of the state for a key: the sum over the state's rows, ascending.
template <int Vectors>
void ask(index_t key_dim, const DeltaToken& token, const DeltaColumns& state, index_t count, f32v (&said)[Vectors]) {
  constexpr bool IsWhole = Vectors > 1;
  f32v sums[Vectors];
  for (int v = 0; v < Vectors; ++v) sums[v] = all(0.0f);
  const float* from = state.from;
  const index_t next = state.next;
  for (index_t k = 0; from && k < key_dim; ++k, from += next) {
    const f32v key = all(token.k[k]);
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) sums[v] = fma(read<IsWhole>(from + v * kLanes, count - v * kLanes), key, sums[v]);
  }
  for (int v = 0; v < Vectors; ++v) said[v] = sums[v];
}

// One token for `count` columns in `Vectors` vectors, the first of which is column `at` of the values. said: in, the prediction
// of the old state for this token's key; out, that of the new state for the next token's key. Prefill thus passes over the state
// once a token, with the operations of decode.
template <class Element, int Vectors, bool IsFollowed>
void delta_token(const DeltaRuleCall& call, const DeltaToken& token, const DeltaToken& following, const DeltaColumns& state,
                 index_t index, index_t at, index_t count, f32v (&said)[Vectors]) {
  constexpr bool IsWhole = Vectors > 1;
  const f32v decay = all(token.decay);
  f32v delta[Vectors], y[Vectors], next_said[Vectors];
  for (int v = 0; v < Vectors; ++v) {
    const f32v value = read<IsWhole>(row_of<Element>(call.x, index) + at + v * kLanes, count - v * kLanes);
    delta[v] = (value - said[v] * decay) * all(token.beta);
    next_said[v] = y[v] = all(0.0f);
  }
  // Local copies: otherwise the compiler assumes that stores alias the struct members.
  const float *from = state.from, *ahead = state.ahead;
  float* to = state.to;
  const index_t next = state.next, step = from ? next : 0, key_dim = call.key_dim;
  const bool is_fresh = !from;
  for (index_t k = 0; k < key_dim; ++k, from += step, to += next, ahead += next) {
    const f32v key = all(token.k[k]), query = all(token.q[k]), next_key = all(IsFollowed ? following.k[k] : 0.0f);
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) {
      const index_t left = count - v * kLanes;
      const f32v kept = is_fresh ? all(0.0f) : read<IsWhole>(from + v * kLanes, left) * decay;
      const f32v after = fma(delta[v], key, kept);
      y[v] = fma(after, query, y[v]);
      if constexpr (IsFollowed) next_said[v] = fma(after, next_key, next_said[v]);
      write<IsWhole>(to + v * kLanes, after, left);
      __builtin_prefetch(ahead + v * kLanes, 0, 2);
    }
  }
  for (int v = 0; v < Vectors; ++v) {
    said[v] = next_said[v];
    write<IsWhole>((Element*)call.y.numbers + index * call.y.stride + at + v * kLanes, y[v], count - v * kLanes);
  }
}

// All tokens of a row for `Vectors` vectors of columns; with several vectors all lanes are valid. Prefill copies the columns to a
// contiguous buffer: rows of a state are a power of two apart and would share cache sets.
template <class Element, int Vectors>
void delta_columns(const DeltaRuleCall& call, const StateRow& row, DeltaColumns state, index_t head, index_t column,
                   index_t count) {
  constexpr index_t kWidth = Vectors * kLanes;
  const index_t columns = least(count, kWidth), at = head * call.head_dim + column;
  float near[kMaxStateSize * kWidth];
  DeltaToken tokens[2];
  f32v said[Vectors];
  float* const to = state.to;
  if (row.count > 1) {
    for (index_t k = 0; state.from && k < call.key_dim; ++k)
      for (index_t i = 0; i < columns; ++i) near[k * kWidth + i] = state.from[k * state.next + i];
    state = {state.from ? near : nullptr, near, kWidth, near};
  }
  read_delta_token<Element>(call, head, row.token, tokens[0]);
  ask<Vectors>(call.key_dim, tokens[0], state, columns, said);
  for (index_t t = 0; t < row.count; ++t, state.from = state.to) {
    const DeltaToken &read = tokens[t % 2], &following = tokens[(t + 1) % 2];
    const bool is_followed = t + 1 < row.count;
    if (is_followed) read_delta_token<Element>(call, head, row.token + t + 1, tokens[(t + 1) % 2]);
    (is_followed ? delta_token<Element, Vectors, true> : delta_token<Element, Vectors, false>)(
        call, read, following, state, row.token + t, at, columns, said);
  }
  if (row.count > 1)
    for (index_t k = 0; k < call.key_dim; ++k)
      for (index_t i = 0; i < columns; ++i) to[k * call.head_dim + i] = near[k * kWidth + i];
}

template <class Element>
void delta_rule(const void* description, index_t begin, index_t end) {
  const DeltaRuleCall& call = *static_cast<const DeltaRuleCall*>(description);
  for (index_t piece = begin; piece < end; ++piece) {
    const StateRow& row = call.rows[piece / call.units];
    const index_t head = piece % call.units / call.head_units, first = piece % call.head_units * kUnitColumns;
    const index_t columns = least(kUnitColumns, call.head_dim - first);
    const index_t place = call.offset + head * call.key_dim * call.head_dim * index_t(sizeof(float));
    for (index_t i = 0; i < columns;) {
      const float* from = row.from ? (const float*)(row.from + place) + first + i : nullptr;
      // Prefetch the next columns: the adjacent ones, or the first of the next head.
      const bool is_last = first + columns == call.head_dim;
      float* to = (float*)(row.to + place) + first + i;
      const float* ahead = (from ? from : to) + (is_last ? call.key_dim * call.head_dim - first : columns);
      const DeltaColumns state{from, to, call.head_dim, ahead};
      const bool wide = columns - i >= 4 * kLanes;
      (wide ? delta_columns<Element, 4> : delta_columns<Element, 1>)(call, row, state, head, first + i, columns - i);
      i += (wide ? 4 : 1) * kLanes;
    }
  }
}

}  // namespace

extern const StateKernels states;
const StateKernels states = {
    .selective_scan = {selective_scan<bf16>, selective_scan<fp16>, selective_scan<float>},
    .head_scan = {head_scan<bf16>, head_scan<fp16>, head_scan<float>},
    .delta_rule = {delta_rule<bf16>, delta_rule<fp16>, delta_rule<float>},
};

}  // namespace qt::QT_ISA
