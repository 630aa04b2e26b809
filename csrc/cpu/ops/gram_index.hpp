// Index of a token buffer by its grams, for speculative decoding without a model.
//
// `quintet.executor.speculation.gram_index` describes the index and owns its arrays. The links of places with the same hash form a
// chain, newest first. A lookup visits at most kMostVisits places and compares at most kMostPlaces of them, so its time does not
// depend on the length of the text.
#pragma once

#include <cstdint>

#include "work.hpp"

namespace qt {

inline constexpr index_t kMostGrams = 8;
inline constexpr index_t kMostPlaces = 8;  // of a lookup: the newest ones; places of other grams with the same hash do not count
inline constexpr index_t kMostVisits = 32;

// With the layout of `quintet.executor.speculation.gram_index.CGramIndex`. The buffer may be a ring: place p is at p % capacity.
struct GramIndex {
  const std::int32_t* tokens;   // [capacity]
  const std::uint64_t* scopes;  // [capacity], or null: there is one scope
  index_t* heads;               // [grams, 1 << (64 - shift)]: the newest place of each hash; 0 for none
  std::uint64_t* links;         // [grams, capacity]: fingerprint of the place's gram, and the distance to the next older place of
                                // its chain in the lower 32 bits, 0 for none
  index_t capacity, max_match, shift, num_grams;
  index_t grams[kMostGrams];  // lengths, ascending
};

// Looks up the `known` tokens before `end`: the longest match among the newest places of the longest gram that occurs. Writes its
// length to found[0], and the places after it to found[1...], newest first. Returns the number of places. The search ends after
// `enough` matches of maximum length. Only places after `oldest` and of this scope count.
index_t find_places(const GramIndex& index, const std::int32_t* end, index_t known, std::uint64_t scope, index_t oldest,
                    index_t enough, index_t* found);

}  // namespace qt
