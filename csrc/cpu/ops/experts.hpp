// A layer of experts: each token goes through a few of many gated feed-forwards, whichever its scores choose.
//
//   scores [T, E] ── route ── ids, weights [T, K]
//                    plan: pairs (token, k) sorted by expert, stably; each expert's two multiplications cut
//   x ── gather: an expert's rows side by side ── gate, up ── activation ── down ── sum over k of weight * row
//
// Where ranks (ranks.hpp) have whole experts, each leaves its experts' rows in memory that all share, sorted by expert, meets the
// others, and sums: so a token's sum is that of one process, whichever rank has made its rows.
//
// Which experts have rows is known only when the step runs, so all between plan and sum are late works (work.hpp). An expert's
// weights are read once a step (once per panel of rows, as of every linear layer); what no token chose is not touched. A row's
// multiplications depend on the row alone, and a token's sum goes over k = 0, 1, ... in fp32: the same bits in every batch.
#pragma once

#include "dispatch.hpp"
#include "linear.hpp"
#include "work.hpp"

namespace qt {

inline constexpr index_t kMostExperts = 1024;
inline constexpr index_t kMostChosen = 64;

// What a score becomes: softmax over all experts or over the chosen, or each one's logistic function.
// sparse_mixer: of each that is chosen its share of a softmax over those not chosen before it that are less by at most 2 jitter of
// the larger magnitude of the two.
enum class Scoring : index_t { softmax = 0, sigmoid = 1, softmax_of_chosen = 2, sparse_mixer = 3 };

// How tokens choose, laid out like `quintet.executor.backends.cpu.ops.host_experts.CRouting`. The largest are chosen, of equal ones those
// with the lower number: experts by their score plus correction, and before them, where there are groups, groups by the sum of
// their `group_best` largest; others' experts are then not to be had.
struct Routing {
  index_t experts, chosen;
  Scoring scoring;
  index_t groups, chosen_groups, group_best;  // groups: 1 for none
  const float* correction;                    // [experts] or null: added for choosing, not in the weight
  index_t renormalise;                        // whether a token's weights are divided by their sum and `addend`
  double addend, jitter;
  double scale;                               // of every weight, last
};

// A layer, laid out like `quintet.executor.backends.cpu.ops.host_experts.CExperts`. All experts' weights have one shape and format.
struct ExpertsLayer {
  Routing routing;
  index_t scaled_inputs;         // whether the weight of a choice multiplies what goes in, not what comes out
  index_t first, kept;           // experts [first, first + kept) are at home here; other ranks have the others
  index_t rank, ranks;           // the rank of this home, of how many: 0 of 1 where all are here
  index_t places;                // of each rank for copies of experts that are at home elsewhere
  const std::int32_t* copies;    // [ranks][places]: which expert lies there, or -1; may be others in the next step
  const Weight* const* gate_up;  // [kept + places]: paired, [2 width, hidden]
  const Weight* const* down;     // [kept + places]: [hidden, width]
  const void* gate_up_bias;      // [kept + places][2 width] or null, in the rows' format
  const void* down_bias;         // [kept + places][hidden] or null, likewise
  index_t activation, gate_up_inputs, down_inputs;
  double gate_factor, gate_limit;  // of Activation::clamped_swiglu
  std::int64_t* asked;  // [experts + 2] or null: work so far, in rows, of each expert; the busiest rank's in each step; all ranks'
};

struct RouteCall {
  const Routing* routing;
  const void* scores;
  index_t stride;
  std::int32_t* ids;  // [T][K], the largest first
  float* weights;     // [T][K]
};

// Rows of x to where their experts find them.
struct GatherCall {
  const void* x;
  index_t x_stride, width;
  const std::int32_t* pairs;  // of each row
  index_t chosen;
  const float* factors;  // of pairs, or null: rows are copied as they are
  void* y;
  index_t y_stride;
};

// y[t] = sum over k of weights[t][k] * x[rows[t][k]], rounded; then (+ residual[t]), rounded again. weights null: all 1.
struct CombineCall {
  const void* x;
  index_t x_stride, width;
  const std::int32_t* rows;
  index_t chosen;
  const float* weights;
  const void* residual;  // laid out like y, may be y; or null
  void* y;
  index_t y_stride;
};

struct ExpertsKernels {
  using Run = void (*)(const void* call, index_t begin, index_t end);
  Run route[3];    // by format; of tokens
  Run gather[3];   // of rows
  Run combine[3];  // of tokens
};

QT_DECLARE_KERNELS(ExpertsKernels, experts)

}  // namespace qt
