// Operations with a state of fixed size per request: short convolutions, selective scans, the gated delta rule.
//
// A row's tokens are computed one after the other from the state that it is given, each element of the state by one fixed
// sequence of operations a token: a request has the same bits however its tokens are cut into steps, and whatever stands
// beside it. Kernels may take several tokens in one pass over the state; what each element goes through stays the same.
//
// x, y and whatever else has a row per token are of one format (bf16, fp16, fp32), rows `stride` numbers apart; parameters
// are fp32, and so are states, but for those of convolutions, which are inputs and have their format. Knows no layer.
#pragma once

#include "dispatch.hpp"
#include "work.hpp"

namespace qt {

inline constexpr index_t kMaxTaps = 16;         // of a convolution
inline constexpr index_t kMaxStateSize = 256;   // numbers of the state of each channel
inline constexpr index_t kUnitColumns = 64;     // channels of a piece of a scan
inline constexpr index_t kConvColumns = 512;    // channels of a piece of a convolution

// A row of the step: laid out like the int64[4] of `quintet.executor.backends.cpu.ops.host_states`.
struct StateRow {
  const char* from;  // its states before its first token; null: zeros
  char* to;          // where they go after its last one; may be `from`
  index_t token;     // the first one's index in the step
  index_t count;
};

struct Columns {
  const void* numbers = nullptr;
  index_t stride = 0;
};

// A piece of work is a row and one of its units: a range of channels, or of the columns of a head. States of a row lie
// `offset` bytes after its `from` and `to`: of each head (or of the only one there is) `lines` runs of `columns` elements.
struct StateCall {
  const StateRow* rows = nullptr;
  index_t units = 0;
  index_t head_units = 0;  // units of a head
  index_t unit_columns = kUnitColumns;
  index_t offset = 0;
  index_t lines = 0, columns = 0, element = 0;  // bytes of an element
  index_t token_cost = 1;  // of a unit and a token, in multiplications
  Columns x, y;

  index_t line_bytes() const { return columns * element; }
  index_t head_bytes() const { return lines * line_bytes(); }
  index_t state_bytes() const { return units / head_units * head_bytes(); }
};

// y[t] = activation(bias + sum over j of weight[j] * x[t - (taps - 1) + j]), each channel by itself; rounded before the
// activation. The state: the last taps - 1 inputs [taps - 1][channels].
struct CausalConvCall : StateCall {
  index_t channels = 0, taps = 0;
  const float* weight = nullptr;  // [taps][channels], that of the newest input last
  const float* bias = nullptr;    // [channels], or null
  bool silu = false;
};

// Mamba (Gu and Dao, 2023). Of each channel, with d = softplus(dt + bias):
//   state[n] = exp(d a[n]) state[n] + d x b[n];  y = (sum over n of state[n] c[n] + skip x) silu(gate)
struct SelectiveScanCall : StateCall {
  index_t channels = 0, state_size = 0;
  Columns dt, b, c, gate;           // [channels], [state_size], [state_size], [channels]
  const float* a = nullptr;         // [state_size][channels], negative
  const float* dt_bias = nullptr;   // [channels]
  const float* skip = nullptr;      // [channels]
};                                  // state: [state_size][channels]

// Mamba 2 (Dao and Gu, 2024): a and dt belong to a head, b and c to a group of heads.
struct HeadScanCall : StateCall {
  index_t heads = 0, head_dim = 0, groups = 0, state_size = 0;
  Columns dt, b, c, gate;           // [heads], [groups][state_size] twice, [heads][head_dim] or null for none
  const float* a = nullptr;         // [heads], negative
  const float* dt_bias = nullptr;   // [heads]
  const float* skip = nullptr;      // [heads]
  float dt_least = 0, dt_most = 0;  // d is kept within
};                                  // state: [heads][state_size][head_dim]

// Gated delta rule (Yang, Kautz and Hatamizadeh, 2024), with q and k of unit length. Of each value head and column v, with
// decay = exp(a softplus(alpha + bias)), q divided by the square root of key_dim:
//   s[k] = decay s[k];  d = (x - sum over k of s[k] key[k]) sigmoid(beta);  s[k] += key[k] d;  y = sum over k of s[k] q[k]
struct DeltaRuleCall : StateCall {  // x: the values
  index_t heads = 0, head_dim = 0;  // of values
  index_t key_heads = 0, key_dim = 0;
  Columns q, k, alpha, beta;        // [key_heads][key_dim] twice, [heads] twice
  const float* a = nullptr;         // [heads], negative
  const float* dt_bias = nullptr;   // [heads]
};                                  // state: [heads][key_dim][head_dim]

// Indexed by Dtype (bf16, fp16, fp32). Each takes its call and a range of pieces, `row * units + unit`.
struct StateKernels {
  using Run = void (*)(const void* call, index_t begin, index_t end);
  Run selective_scan[3];
  Run head_scan[3];
  Run delta_rule[3];
};

struct CausalConvKernels {
  void (*causal_conv[3])(const void* call, index_t begin, index_t end);
};

QT_DECLARE_KERNELS(StateKernels, states)
QT_DECLARE_KERNELS(CausalConvKernels, causal_conv)

}  // namespace qt
