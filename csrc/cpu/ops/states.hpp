// Operations with a fixed-size state per request: short convolutions, selective scans, the gated delta rule.
//
// The tokens of a row are computed in sequence from the row's state. Each element of the state undergoes one fixed sequence of
// operations per token. So the bits of a request depend neither on the batch size nor on the division of its tokens into steps.
// Kernels may process several tokens in one pass over the state; the operations of each element stay the same.
//
// x, y and all other arrays with a row per token have one dtype (bf16, fp16, fp32), rows `stride` elements apart. Parameters
// and states are fp32, except states of convolutions, which are inputs in the dtype of x.
#pragma once

#include "dispatch.hpp"
#include "work.hpp"

namespace qt {

inline constexpr index_t kMaxTaps = 16;         // of a convolution
inline constexpr index_t kMaxStateSize = 256;   // numbers of the state per channel
inline constexpr index_t kUnitColumns = 64;     // channels of a piece of a scan
inline constexpr index_t kConvColumns = 512;    // channels of a piece of a convolution

// A row of the step, with the layout of an int64[4] table.
struct StateRow {
  const char* from;  // states before its first token; null: zeros
  char* to;          // destination of the states after its last token; may be `from`
  index_t token;     // index of the first token in the step
  index_t count;
};

struct Columns {
  const void* numbers = nullptr;
  index_t stride = 0;
};

// A piece of work is a row and one of its units: a range of channels, or of the columns of a head. A row's state begins
// `offset` bytes after its `from` and `to`. It has, for each head (or once), `lines` runs of `columns` elements.
struct StateCall {
  const StateRow* rows = nullptr;
  index_t units = 0;
  index_t head_units = 0;  // units of a head
  index_t unit_columns = kUnitColumns;
  index_t offset = 0;
  index_t lines = 0, columns = 0, element = 0;  // element: bytes
  index_t token_cost = 1;  // of a unit and a token, in multiplications
  Columns x, y;

  index_t line_bytes() const { return columns * element; }
  index_t head_bytes() const { return lines * line_bytes(); }
  index_t state_bytes() const { return units / head_units * head_bytes(); }
};

// y[t] = activation(bias + sum over j of weight[j] * x[t - (taps - 1) + j]), for each channel; rounded before the activation.
// State: the last taps - 1 inputs [taps - 1][channels].
struct CausalConvCall : StateCall {
  index_t channels = 0, taps = 0;
  const float* weight = nullptr;  // [taps][channels], weight of the newest input last
  const float* bias = nullptr;    // [channels], or null
  bool silu = false;
};

// Mamba (Gu and Dao, 2023). For each channel, with d = softplus(dt + bias):
//   state[n] = exp(d a[n]) state[n] + d x b[n];  y = (sum over n of state[n] c[n] + skip x) silu(gate)
struct SelectiveScanCall : StateCall {
  index_t channels = 0, state_size = 0;
  Columns dt, b, c, gate;           // [channels], [state_size], [state_size], [channels]
  const float* a = nullptr;         // [state_size][channels], negative
  const float* dt_bias = nullptr;   // [channels]
  const float* skip = nullptr;      // [channels]
};                                  // state: [state_size][channels]

// Mamba 2 (Dao and Gu, 2024): one a and dt per head, b and c per group of heads.
struct HeadScanCall : StateCall {
  index_t heads = 0, head_dim = 0, groups = 0, state_size = 0;
  Columns dt, b, c, gate;           // [heads], [groups][state_size] twice, [heads][head_dim] or null for none
  const float* a = nullptr;         // [heads], negative
  const float* dt_bias = nullptr;   // [heads]
  const float* skip = nullptr;      // [heads]
  float dt_least = 0, dt_most = 0;  // range to which d is clamped
};                                  // state: [heads][state_size][head_dim]

// Gated delta rule (Yang, Kautz and Hatamizadeh, 2024), with q and k of unit length. For each value head and column v, with
// decay = exp(a softplus(alpha + bias)) and q divided by the square root of key_dim:
//   s[k] = decay s[k];  d = (x - sum over k of s[k] key[k]) sigmoid(beta);  s[k] += key[k] d;  y = sum over k of s[k] q[k]
struct DeltaRuleCall : StateCall {  // x: the values
  index_t heads = 0, head_dim = 0;  // of values
  index_t key_heads = 0, key_dim = 0;
  Columns q, k, alpha, beta;        // [key_heads][key_dim] twice, [heads] twice
  const float* a = nullptr;         // [heads], negative
  const float* dt_bias = nullptr;   // [heads]
};                                  // state: [heads][key_dim][head_dim]

// Indexed by Dtype (bf16, fp16, fp32). Each kernel takes its call and a range of pieces, `row * units + unit`.
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
