// Drafts of suffix decoding (Oliaro et al., 2024): the most frequent continuation of the longest match.
//
// Matches come from the request's own tokens, and from the cache of earlier outputs. The probability of a draft is estimated as
// the share of the matches that continue with all drafts up to it.
#include <algorithm>

#include "gram_index.hpp"
#include "require.hpp"

namespace qt {
namespace {

constexpr std::int32_t kEnd = -1;  // marks the end of a cached output
constexpr index_t kMostDrafts = 255;

struct Continuation {
  index_t count;  // of drafts
  double score;   // sum of their probabilities
};

// Writes the most frequent continuation after `num` places, newest first; of equally frequent tokens, that of the newest place. A
// continuation that reaches `limit`, the end of the tokens, repeats the tokens from its place on.
Continuation continue_from(const std::int32_t* tokens, index_t limit, index_t* places, index_t num, index_t most,
                           double min_probability, std::int32_t* drafts) {
  Continuation result = {0, 0.0};
  double probability = 1.0;
  for (; num > 0 && result.count < most; ++result.count) {
    const auto next = [&](index_t place) { return tokens[place + result.count % (limit - place)]; };
    std::int32_t draft = kEnd;
    index_t num_equal = 0;
    for (index_t one = 0; one < num; ++one) {
      const std::int32_t token = next(places[one]);
      const index_t count = std::count_if(places, places + num, [&](index_t place) { return next(place) == token; });
      if (count > num_equal) draft = token, num_equal = count;
    }
    probability *= double(num_equal) / double(num);
    if (draft == kEnd || probability < min_probability) break;
    num = std::remove_if(places, places + num, [&](index_t place) { return next(place) != draft; }) - places;
    drafts[result.count] = draft;
    result.score += probability;
  }
  return result;
}

}  // namespace
}  // namespace qt

// Writes up to `most` drafts after the newest of `num_tokens` tokens of `own`, and returns their number. `cache`: a ring of outputs
// of all scopes; its places up to `oldest` are not valid. Of both sources, the one with the higher score is used.
// max_drafts[length of a match]: drafts, at most. Drafts with a lower probability than `min_probability` are not proposed.
QT_EXPORT index_t qt_suffix_drafts(const qt::GramIndex* own, index_t num_tokens, const qt::GramIndex* cache, std::uint64_t scope,
                                   index_t oldest, const index_t* max_drafts, index_t most, double min_probability,
                                   std::int32_t* drafts) {
  using namespace qt;
  QT_REQUIRE(most <= kMostDrafts && num_tokens <= own->capacity, "%lld drafts after %lld tokens, capacity %lld", (long long)most,
             (long long)num_tokens, (long long)own->capacity);
  const std::int32_t* end = own->tokens + num_tokens;
  const index_t known = std::min(num_tokens, own->max_match);
  index_t found[1 + kMostPlaces];
  index_t num = find_places(*own, end, known, 0, 0, kMostPlaces, found);
  const Continuation first =
      continue_from(own->tokens, num_tokens, found + 1, num, std::min(most, max_drafts[found[0]]), min_probability, drafts);
  if (first.score == double(most)) return first.count;
  num = find_places(*cache, end, known, scope, oldest, kMostPlaces, found);
  const index_t limit = std::min(most, max_drafts[found[0]]);
  if (double(limit) <= first.score) return first.count;  // the sum of so many probabilities is not higher
  for (index_t one = 1; one <= num; ++one) found[one] %= cache->capacity;
  std::int32_t others[kMostDrafts];
  const Continuation second = continue_from(cache->tokens, cache->capacity, found + 1, num, limit, min_probability, others);
  if (second.score <= first.score) return first.count;
  std::copy(others, others + second.count, drafts);
  return second.count;
}
