// Mixture of experts: scores choose a few gated feed-forward networks for each token.
//
//   scores [T, E] ── route ── ids, weights [T, K]
//                    plan: pairs (token, k) sorted by expert, stably; the two products of each expert are cut
//   x ── gather: rows of an expert side by side ── gate, up ── activation ── down ── sum over k of weight * row
//
// Expert parallelism (ranks.hpp): each rank writes the rows of its experts to shared memory, sorted by expert. After a barrier
// it computes the sums. So a token's sum has the bits of a single process.
//
// The experts with rows are known only while the step runs, so all works between plan and sum are late (work.hpp). Each step
// reads the weights of a chosen expert once (once per panel of rows), and reads no other experts. A row's products depend only
// on the row. A token's sum is in fp32 over k = 0, 1, ...; its bits are independent of the batch size.
#pragma once

#include "dispatch.hpp"
#include "linear.hpp"
#include "work.hpp"

namespace qt {

inline constexpr index_t kMostExperts = 1024;
inline constexpr index_t kMostChosen = 64;

// Function of the scores: softmax over all experts or over the chosen ones, or a sigmoid of each.
// sparse_mixer: a softmax value of each chosen expert, over the experts not chosen before it. Excluded are experts that are
// smaller by more than 2 jitter, relative to the larger magnitude of the two.
enum class Scoring : index_t { softmax = 0, sigmoid = 1, softmax_of_chosen = 2, sparse_mixer = 3 };

// Routing parameters, with the layout of `quintet.executor.backends.cpu.ops.host_experts.CExperts`. Experts are chosen by their
// score plus correction; a tie goes to the lower index. With groups of experts, groups are chosen first, by the sum of their
// `group_best` largest scores; experts of other groups are then excluded.
struct Routing {
  index_t experts, chosen;
  Scoring scoring;
  index_t groups, chosen_groups, group_best;  // groups: 1 for none
  const float* correction;                    // [experts] or null: added for the choice, not in the weight
  index_t renormalise;                        // 1: a token's weights are divided by their sum plus `addend`
  double addend, jitter;
  double scale;                               // factor of every weight, applied last
};

// A layer, with the layout of `quintet.executor.backends.cpu.ops.host_experts.CExperts`. The weights of all experts have one
// shape and format.
struct ExpertsLayer {
  Routing routing;
  index_t scaled_inputs;         // 1: the weight of a choice multiplies the expert's input, not its output
  index_t first, kept;           // this rank's experts are [first, first + kept); other ranks have the rest
  index_t rank, ranks;           // this rank and their number; 0 of 1 without expert parallelism
  index_t places;                // of each rank, for copies of other ranks' experts
  const std::int32_t* copies;    // [ranks][places]: expert id or -1; may change between steps
  const Weight* const* gate_up;  // [kept + places]: paired, [2 width, hidden]
  const Weight* const* down;     // [kept + places]: [hidden, width]
  const void* gate_up_bias;      // [kept + places][2 width] or null, in the dtype of the rows
  const void* down_bias;         // [kept + places][hidden] or null, in the dtype of the rows
  index_t activation, gate_up_inputs, down_inputs;
  double gate_factor, gate_limit;  // of Activation::clamped_swiglu
  std::int64_t* asked;  // [experts + 2] or null: total rows of each expert; of the busiest rank, summed over steps; of all
                        // ranks
};

struct RouteCall {
  const Routing* routing;
  const void* scores;
  index_t stride;
  std::int32_t* ids;  // [T][K], the largest first
  float* weights;     // [T][K]
};

// Copies rows of x next to each other by expert.
struct GatherCall {
  const void* x;
  index_t x_stride, width;
  const std::int32_t* pairs;  // of each row
  index_t chosen;
  const float* factors;  // of pairs, or null: rows are copied unchanged
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
  const void* residual;  // layout of y, may be y; or null
  void* y;
  index_t y_stride;
};

struct ExpertsKernels {
  using Run = void (*)(const void* call, index_t begin, index_t end);
  Run route[3];    // by dtype; over tokens
  Run gather[3];   // over rows
  Run combine[3];  // over tokens
};

QT_DECLARE_KERNELS(ExpertsKernels, experts)

}  // namespace qt
