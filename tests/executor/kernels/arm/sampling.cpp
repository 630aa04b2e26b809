// Draws and log-probabilities.
//
// Allowed tokens are computed in fp64 by the definition: division by the temperature, then min-p, top-k, top-p. Over many
// positions, token counts must match the probabilities within five standard deviations. Random numbers depend only on seed and
// position, so runs are deterministic. One row and many, one thread and several must give the same tokens.
//
// Bounds. A log-probability is rounded to fp32 (2^-24 of it) and has the error of a sum of exponentials, 2^-20. Top-p may
// keep one token more or less where the mass is within 1e-5 of its border: such draws are accepted.
#include <numeric>

#include "numbers.hpp"
#include "program.hpp"
#include "sampling.hpp"

extern "C" {
void qt_draw(const void* logits, index_t stride, int dtype, index_t vocab_size, const std::int64_t* rows, index_t count,
             const qt::DrawSettings* settings, const std::int64_t* slots, const std::int64_t* positions, const qt::Masks* masks,
             std::int32_t* tokens);
void qt_logprobs(const void* logits, index_t stride, int dtype, index_t vocab_size, const std::int64_t* rows, index_t count,
                 const std::int32_t* own, index_t num_top, std::int32_t* ids, float* values, std::int32_t* ranks,
                 double* normalizers);
qt::Program* qt_program_new();
void qt_program_delete(qt::Program* program);
void qt_program_run(qt::Program* program, const qt::Step* step, index_t begin, index_t end);
void qt_program_draw(qt::Program* program, const void* logits, index_t stride, int dtype, index_t vocab_size);
index_t qt_fill_step(qt::Step* step, const std::int32_t* slots, const std::int32_t* starts, const std::int32_t* counts,
                     const std::uint8_t* samples, index_t num_rows);
}

namespace check {
namespace {

constexpr index_t kVocab = 8219, kRows = 5;
constexpr index_t kDraws = 200;
constexpr double kBorder = 1e-5;

// Ids, the largest logit first, the lower id first among equals.
std::vector<std::int32_t> sorted(const Matrix& logits, index_t row) {
  std::vector<std::int32_t> ids(kVocab);
  std::vector<double> values(kVocab);
  std::iota(ids.begin(), ids.end(), 0);
  for (index_t i = 0; i < kVocab; ++i) values[i] = logits.at(row, i);
  std::stable_sort(ids.begin(), ids.end(), [&](std::int32_t a, std::int32_t b) { return values[a] > values[b]; });
  return ids;
}

// Probabilities of allowed tokens, by id; negative for tokens that only the tolerance at the border allows.
std::vector<double> shares_of(const Matrix& logits, index_t row, const qt::DrawSettings& settings) {
  const std::vector<std::int32_t> order = sorted(logits, row);
  std::vector<double> shares(kVocab);
  // By definition, quotients are rounded to fp32 before they are compared.
  const auto quotient = [&](index_t place) { return float(logits.at(row, order[place])) / settings.temperature; };
  const float most = quotient(0);
  float floor = most + settings.log_min_p;
  if (settings.top_k > 0 && settings.top_k < kVocab) floor = std::max(floor, quotient(settings.top_k - 1));
  double total = 0, mass = 0;
  for (index_t i = 0; i < kVocab && quotient(i) >= floor; ++i) total += std::exp(double(quotient(i)) - double(most));
  float surely = floor;
  for (index_t i = 0; i < kVocab && quotient(i) >= floor && settings.top_p < 1; ++i) {
    if (mass >= settings.top_p - kBorder && surely == floor) surely = quotient(std::max(index_t(0), i - 1));
    if (mass >= settings.top_p + kBorder) {
      floor = quotient(i - 1);
      break;
    }
    mass += std::exp(double(quotient(i)) - double(most)) / total;
  }
  surely = std::max(surely, floor);
  total = 0;
  for (index_t i = 0; i < kVocab && quotient(i) >= floor; ++i) total += std::exp(double(quotient(i)) - double(most));
  for (index_t i = 0; i < kVocab && quotient(i) >= floor; ++i) {
    const double share = std::exp(double(quotient(i)) - double(most)) / total;
    shares[order[i]] = quotient(i) >= surely ? share : -share;
  }
  return shares;
}

void check_draws(Findings& findings, const Matrix& logits, const std::string& name, qt::DrawSettings settings) {
  findings.begin("draws, " + name + ", " + kNames[int(logits.dtype)]);
  const int code = int(logits.dtype);
  std::vector<std::int64_t> rows(kDraws), slots(kDraws), positions(kDraws);
  std::vector<std::int32_t> tokens(kDraws), again(kDraws);
  for (index_t i = 0; i < kDraws; ++i) rows[i] = i % 2, positions[i] = i;
  qt_set_threads(3, 0);
  qt_draw(logits.row(0), kVocab, code, kVocab, rows.data(), kDraws, &settings, slots.data(), positions.data(), nullptr,
          tokens.data());
  qt_set_threads(1, 0);
  for (index_t i = 0; i < kDraws; i += 7) {
    qt_draw(logits.row(rows[i]), kVocab, code, kVocab, nullptr, 1, &settings, slots.data(), positions.data() + i,
            nullptr, again.data() + i);
    findings.is(again[i] == tokens[i], i);
  }
  for (index_t row = 0; row < 2; ++row) {
    const std::vector<double> shares = shares_of(logits, row, settings);
    std::vector<index_t> counts(kVocab);
    for (index_t i = row; i < kDraws; i += 2) {
      const bool known = tokens[i] >= 0 && tokens[i] < kVocab;
      findings.is(known && shares[tokens[i]] != 0, i);
      if (known) ++counts[tokens[i]];
    }
    for (index_t i = 0; i < kVocab; ++i) {
      const double draws = double(kDraws) / 2, share = shares[i];
      if (share * draws >= 12) findings.is(counts[i] > 0, row);  // not so with a chance of e^-12 at most
      if (share * draws >= 10)                                   // where counts are nearly normal
        findings.near(double(counts[i]), share * draws, 5 * std::sqrt(draws * share * (1 - share)), row, i);
    }
  }
}

void check_greedy(Findings& findings, const Matrix& logits) {
  findings.begin(std::string("greedy, ") + kNames[int(logits.dtype)]);
  std::int32_t tokens[kRows];
  for (int threads : {1, 3}) {
    qt_set_threads(threads, 0);
    qt_draw(logits.row(0), kVocab, int(logits.dtype), kVocab, nullptr, kRows, nullptr, nullptr, nullptr, nullptr, tokens);
    for (index_t row = 0; row < kRows; ++row) findings.is(tokens[row] == sorted(logits, row)[0], row);
  }
}

// Greedy rows with a NaN take the first of them; rows that draw take token 0; their log-probabilities are NaN.
void check_nan(Findings& findings, Matrix logits) {
  findings.begin(std::string("NaN among logits, ") + kNames[int(logits.dtype)]);
  const std::int64_t slot = 0, position = 3;
  const qt::DrawSettings settings = {1, -INFINITY, 0, 0.9, 1};
  const std::int32_t own = 5;
  std::int32_t token, ids[3], rank;
  float values[3];
  double normalizer;
  logits.set(0, 6000, NAN), logits.set(0, 4321, NAN);
  qt_draw(logits.row(0), kVocab, int(logits.dtype), kVocab, nullptr, 1, nullptr, nullptr, nullptr, nullptr, &token);
  findings.is(token == 4321, 0);
  qt_draw(logits.row(0), kVocab, int(logits.dtype), kVocab, nullptr, 1, &settings, &slot, &position, nullptr, &token);
  findings.is(token == 0, 1);
  qt_logprobs(logits.row(0), kVocab, int(logits.dtype), kVocab, nullptr, 1, &own, 2, ids, values, &rank, &normalizer);
  findings.is(std::isnan(values[0]) && std::isnan(values[2]) && std::isnan(normalizer), 2);
}

void check_logprobs(Findings& findings, const Matrix& logits) {
  constexpr index_t kTop = 20, kEach = kTop + 1;
  findings.begin(std::string("log-probabilities, ") + kNames[int(logits.dtype)]);
  std::int32_t own[kRows], ids[kRows * kEach], ranks[kRows];
  float values[kRows * kEach];
  double normalizers[kRows];
  for (index_t row = 0; row < kRows; ++row) own[row] = std::int32_t(row * 997);
  for (int threads : {3, 1}) {
    qt_set_threads(threads, 0);
    qt_logprobs(logits.row(0), kVocab, int(logits.dtype), kVocab, nullptr, kRows, own, kTop, ids, values, ranks, normalizers);
    for (index_t row = 0; row < kRows; ++row) {
      const std::vector<std::int32_t> order = sorted(logits, row);
      const double most = logits.at(row, order[0]);
      double total = 0;
      index_t rank = 1;
      for (index_t i = 0; i < kVocab; ++i) {
        total += std::exp(logits.at(row, i) - most);
        rank += logits.at(row, i) > logits.at(row, own[row]);
      }
      const double normalizer = most + std::log(total);
      findings.near(normalizers[row], normalizer, 0x1p-20, row, 0);
      findings.is(ranks[row] == rank, row);
      for (index_t i = 0; i < kEach; ++i) {
        const std::int32_t id = i ? order[i - 1] : own[row];
        const double exact = logits.at(row, id) - normalizer;
        findings.is(ids[row * kEach + i] == id, row);
        findings.near(values[row * kEach + i], exact, 0x1p-20 + 0x1p-24 * std::fabs(exact), row, i);
      }
      std::int32_t one_ids[kEach], one_rank;
      float one_values[kEach];
      double one_normalizer;
      qt_logprobs(logits.row(row), kVocab, int(logits.dtype), kVocab, nullptr, 1, own + row, kTop, one_ids, one_values, &one_rank,
                  &one_normalizer);
      findings.same(one_values, values + row * kEach, sizeof one_values, row);
      findings.same(&one_normalizer, normalizers + row, sizeof one_normalizer, row);
    }
  }
}

// A program that draws for two rows on three threads, which search the largest logits together: the tokens of qt_draw.
void check_program(Findings& findings, const Matrix& logits) {
  constexpr index_t kSlots = 4, kLength = 16;
  findings.begin(std::string("drawn in a program, ") + kNames[int(logits.dtype)]);
  std::int32_t token_ids[8] = {}, slot_tokens[kSlots * kLength] = {}, drawn[2] = {}, expected[2];
  std::int64_t positions[8], row_slots[2], row_starts[2], row_counts[2], row_offsets[2], output_tokens[2], output_slots[2],
      output_positions[2];
  std::vector<qt::DrawSettings> settings(kSlots, {0.9f, -INFINITY, 0, 0.95, 21});
  settings[1].temperature = 0;
  for (index_t i = 0; i < kSlots * kLength; ++i) slot_tokens[i] = std::int32_t(i);
  qt::Step step{};
  step.max_tokens = 8, step.max_rows = 2, step.num_slots = kSlots;
  step.token_ids = token_ids, step.positions = positions;
  step.row_slots = row_slots, step.row_starts = row_starts, step.row_counts = row_counts, step.row_offsets = row_offsets;
  step.output_tokens = output_tokens, step.output_slots = output_slots, step.output_positions = output_positions;
  step.slot_tokens = slot_tokens, step.slot_tokens_stride = kLength, step.settings = settings.data(), step.drawn = drawn;
  const std::int32_t slots[] = {3, 1}, starts[] = {4, 9}, counts[] = {5, 1};
  const std::uint8_t samples[] = {1, 1};
  findings.is(qt_fill_step(&step, slots, starts, counts, samples, 2) == 10, 0);
  findings.is(step.num_tokens == 6 && step.num_outputs == 2 && token_ids[5] == kLength + 9 && positions[4] == 8, 1);

  qt::Program* program = qt_program_new();
  qt_program_draw(program, logits.row(0), kVocab, int(logits.dtype), kVocab);
  for (int threads : {3, 1}) {
    qt_set_threads(threads, 0);
    qt_program_run(program, &step, 0, 2);
    qt_draw(logits.row(0), kVocab, int(logits.dtype), kVocab, nullptr, 2, settings.data(), output_slots, output_positions,
            nullptr, expected);
    findings.same(drawn, expected, sizeof drawn, threads);
    findings.is(slot_tokens[3 * kLength + 9] == drawn[0] && slot_tokens[kLength + 10] == drawn[1], threads);
  }
  qt_program_delete(program);
}

}  // namespace

void check_sampling(Findings& findings) {
  const float none = -INFINITY, tenth = float(std::log(0.1));
  for (Dtype dtype : kFloats) {
    Noise noise(17);
    Matrix logits = noise.matrix(dtype, kRows, kVocab, 3);
    for (index_t row = 0; row < kRows; ++row) {  // two large ones in one block of 128, and two that are equal
      logits.set(row, 1234 + row, 14), logits.set(row, 1200, 12);
      logits.set(row, 77, 13), logits.set(row, 5000, 14);
    }
    check_greedy(findings, logits);
    check_logprobs(findings, logits);
    check_program(findings, logits);
    check_nan(findings, logits);
    check_draws(findings, logits, "plain", {1, none, 0, 1, 1});
    check_draws(findings, logits, "cold", {0.3f, none, 0, 1, 2});
    check_draws(findings, logits, "top-k", {20, none, 7, 1, 3});
    check_draws(findings, logits, "top-p", {0.7f, none, 0, 0.8, 4});
    check_draws(findings, logits, "wide top-p", {1.9f, none, 0, 0.99, 5});
    check_draws(findings, logits, "min-p", {3, tenth, 0, 1, 6});
    check_draws(findings, logits, "all", {1.3f, tenth, 15, 0.9, 7});
  }
}

}  // namespace check
