// Several multiplications at once, of weights of one shape and format, each with rows of its own: experts, or heads.
#pragma once

#include <vector>

#include "linear_cut.hpp"

namespace qt {

// Its work's pieces are those of its multiplications, one's after another's. Described anew for every step.
class LinearGroup {
 public:
  // like: a call with what all have in common, its strides among them.
  explicit LinearGroup(const LinearCall& like);

  const Preparation& preparation() const { return preparation_; }
  void clear();
  // One more, of `rows`, on about so many threads. x, y, bias and prepared: of the first of these rows.
  void add(const Weight* weight, index_t rows, index_t threads, const char* x, index_t x_stride, const char* bias, char* y,
           char* prepared);
  // The works, valid until it is cleared: `multiply` follows `prepare`.
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
  std::vector<Known> known_;  // of few rows: the same in every layer and step
  std::vector<LinearCall> calls_;
  Ends items_{0}, prepared_items_{0};  // where each one's begin, and the last one's end
};

}  // namespace qt
