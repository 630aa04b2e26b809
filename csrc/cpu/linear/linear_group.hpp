// Several matrix products as one work: weights of one shape and format, each with its own rows (experts, heads).
#pragma once

#include <vector>

#include "linear_cut.hpp"

namespace qt {

// The pieces of the work are those of its products, one product after another. Described again for every step.
class LinearGroup {
 public:
  // like: a call with the fields that all products share, strides included. With a residual, each product is added to its y.
  explicit LinearGroup(const LinearCall& like);

  const Preparation& preparation() const { return preparation_; }
  void clear();
  // Adds a product of `rows` rows, cut for about `threads` threads. x, y, bias and prepared: of the first of these rows.
  void add(const Weight* weight, index_t rows, index_t threads, const char* x, index_t x_stride, const char* bias, char* y,
           char* prepared);
  // The works, valid until clear(): `multiply` follows `prepare`.
  Work prepare() const;
  Work multiply(index_t threads) const;

 private:
  using Ends = std::vector<index_t>;
  struct Known {
    index_t threads = 0;
    Cut cut{};
  };

  static index_t call_of(const Ends& ends, index_t item);
  template <auto ends_of, bool multiplies>
  static void run(const void* described, index_t begin, index_t end);
  static Region region(const void* described, index_t item);
  static index_t cost(const void* described, index_t item);
  Cut cut_of(const Weight& weight, index_t rows, index_t threads);

  LinearCall like_;
  const LinearKernels& kernels_;
  Preparation preparation_;
  std::vector<Known> known_;  // cuts of few rows: the same in every layer and step
  std::vector<LinearCall> calls_;
  Ends items_{0}, prepared_items_{0};  // first item of each product, and the end
};

}  // namespace qt
