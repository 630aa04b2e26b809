#include "gram_index.hpp"

#include <algorithm>

#include "require.hpp"

namespace qt {
namespace {

constexpr std::uint64_t kBase = 0x9E3779B97F4A7C15, kMix = 0xBF58476D1CE4E5B9;  // of the polynomial; before its upper bits are taken
constexpr std::uint64_t kDistance = 0xFFFFFFFF, kFingerprint = 0x7FFFFFFF;
constexpr int kDistanceBits = 32;

// Extends the hash of a gram by the token before it.
std::uint64_t extend(std::uint64_t hash, std::int32_t token) { return hash * kBase + std::uint64_t(token) + 1; }

index_t num_heads(const GramIndex& index) { return index_t(1) << (64 - index.shift); }

// Returns the number of equal tokens before `at` and before `end`.
index_t match_length(const GramIndex& index, index_t at, const std::int32_t* end, index_t known) {
  const index_t most = std::min({at, known, index.max_match});
  index_t length = 0;
  while (length < most && index.tokens[at - 1 - length] == end[-1 - length]) ++length;
  return length;
}

}  // namespace

index_t find_places(const GramIndex& index, const std::int32_t* end, index_t known, std::uint64_t scope, index_t oldest,
                    index_t enough, index_t* found) {
  std::uint64_t hashes[kMostGrams], hash = 0;
  index_t num_levels = 0, length = 0;
  for (; num_levels < index.num_grams && index.grams[num_levels] <= known; ++num_levels) {
    for (; length < index.grams[num_levels]; ++length) hash = extend(hash, end[-1 - length]);
    hashes[num_levels] = (hash ^ scope) * kMix;
  }
  for (index_t level = num_levels - 1; level >= 0; --level) {
    const std::uint64_t mixed = hashes[level], *const links = index.links + level * index.capacity;
    index_t place = index.heads[level * num_heads(index) + index_t(mixed >> index.shift)];
    index_t longest = 0, num_compared = 0, num_places = 0;
    for (index_t visit = 0; visit < kMostVisits && place > oldest; ++visit) {
      const index_t at = place % index.capacity;
      if (links[at] >> kDistanceBits == (mixed & kFingerprint) && (!index.scopes || index.scopes[at] == scope)) {
        const index_t equal = match_length(index, at, end, known);
        if (equal > longest && equal >= index.grams[level]) longest = equal, num_places = 0;
        if (equal == longest && longest > 0) found[1 + num_places++] = place;
        if (++num_compared == kMostPlaces || (equal == index.max_match && num_places >= enough)) break;
      }
      const index_t distance = index_t(links[at] & kDistance);
      if (distance == 0) break;
      place -= distance;
    }
    if (num_places > 0) {
      found[0] = longest;
      return num_places;
    }
  }
  found[0] = 0;
  return 0;
}

}  // namespace qt

// Returns the size of `GramIndex`.
QT_EXPORT index_t qt_gram_index_bytes() { return sizeof(qt::GramIndex); }

// Adds the places `begin` to `end - 1` of a text that starts at place `start`. No gram is longer than the text before it. The
// places do not wrap around the end of the buffer. Places up to `oldest` are no longer valid.
QT_EXPORT void qt_gram_add(const qt::GramIndex* index, index_t begin, index_t end, index_t start, std::uint64_t scope,
                           index_t oldest) {
  using namespace qt;
  QT_REQUIRE(begin > start && end - start <= index->capacity, "places %lld to %lld of a text from %lld on, capacity %lld",
             (long long)begin, (long long)end, (long long)start, (long long)index->capacity);
  for (index_t place = begin; place < end; ++place) {
    const index_t at = place % index->capacity;
    std::uint64_t hash = 0;
    index_t length = 0;
    for (index_t level = 0; level < index->num_grams && index->grams[level] <= place - start; ++level) {
      for (; length < index->grams[level]; ++length) hash = extend(hash, index->tokens[at - 1 - length]);
      const std::uint64_t mixed = (hash ^ scope) * kMix;
      index_t& head = index->heads[level * num_heads(*index) + index_t(mixed >> index->shift)];
      const std::uint64_t distance = head > oldest ? std::uint64_t(place - head) : 0;
      index->links[level * index->capacity + at] = (mixed & kFingerprint) << kDistanceBits | distance;
      head = place;
    }
  }
}

// See qt::find_places.
QT_EXPORT index_t qt_gram_find(const qt::GramIndex* index, const std::int32_t* end, index_t known, std::uint64_t scope,
                               index_t oldest, index_t enough, index_t* found) {
  return qt::find_places(*index, end, known, scope, oldest, enough, found);
}
