// Outliers of a weight of tables: numbers added to single weights. They hold a checkpoint's sparse outliers and its unquantized
// rows.
//
// They lie after the weight's tiles in the caller's memory, in runs (linear.hpp). A run is sorted by k, then by lane; entries
// of one element keep their input order. Kernels multiply the outliers with x after the table values, in that order
// (kernels/linear/linear_tables.cpp).
#include <algorithm>
#include <vector>

#include "linear.hpp"
#include "require.hpp"

namespace qt {
namespace {

struct Placed {
  index_t run;
  Outlier outlier;
};

bool comes_before(const Placed& a, const Placed& b) {
  if (a.run != b.run) return a.run < b.run;
  return a.outlier.k != b.outlier.k ? a.outlier.k < b.outlier.k : a.outlier.lane < b.outlier.lane;
}

index_t runs_of(index_t tiles, index_t depth) {
  return tiles * ((depth + kOutlierDepth - 1) / kOutlierDepth) * (kTileColumns / kOutlierColumns);
}

index_t begins_bytes(index_t runs) { return ((runs + 1) * index_t(sizeof(std::uint32_t)) + 63) / 64 * 64; }

// All outliers except those of columns [first, first + count), in order.
std::vector<Placed> without_columns(const Weight& weight, index_t first, index_t count) {
  std::vector<bool> replaced(std::size_t(weight.tiles * kTileColumns));
  for (index_t column = first; column < first + count; ++column) {
    index_t tile, lane;
    tile_and_lane(weight, column, tile, lane);
    replaced[std::size_t(tile * kTileColumns + lane)] = true;
  }
  const Outliers& outliers = weight.outliers;
  const index_t runs = runs_of(weight.tiles, weight.depth), in_tile = runs / weight.tiles;
  std::vector<Placed> kept;
  for (index_t run = 0; run < runs; ++run)
    for (std::uint32_t i = outliers.begins[run]; i < outliers.begins[run + 1]; ++i) {
      const Outlier its = outliers.numbers[i];
      if (!replaced[std::size_t(run / in_tile * kTileColumns + its.lane)]) kept.push_back({run, its});
    }
  return kept;
}

}  // namespace
}  // namespace qt

// Returns the bytes for at most `most` outliers of a weight [columns, depth], in addition to qt_weight_bytes; 0 for none, or
// for too many.
QT_EXPORT index_t qt_weight_outlier_bytes(index_t columns, index_t depth, int paired, index_t most) {
  if (columns < 1 || depth < 1 || most < 1 || most > index_t(UINT32_MAX)) return 0;
  const index_t in_tile = paired ? qt::kPairedColumns : qt::kTileColumns, places = paired ? columns / 2 : columns;
  const index_t runs = qt::runs_of((places + in_tile - 1) / in_tile, depth);
  return qt::begins_bytes(runs) + (most * index_t(sizeof(qt::Outlier)) + 63) / 64 * 64;
}

// Sets the outlier memory of a weight of tables, once, before its first use. memory: qt_weight_outlier_bytes for `most`
// outliers, 64-byte aligned, owned by the caller; zeros, or filled earlier.
QT_EXPORT void qt_weight_set_outliers(qt::Weight* weight, void* memory, index_t most) {
  QT_REQUIRE(weight->values == qt::Values::tables && weight->leaves == 1, "outliers of a weight in %lld leaves, or without tables",
             (long long)weight->leaves);
  const index_t begins = qt::begins_bytes(qt::runs_of(weight->tiles, weight->depth));
  weight->outliers.begins = static_cast<std::uint32_t*>(memory);
  weight->outliers.numbers = reinterpret_cast<qt::Outlier*>(static_cast<char*>(memory) + begins);
  weight->outliers.most = most;
  weight->outliers.bytes = qt_weight_outlier_bytes(weight->columns, weight->depth, weight->paired, most);
}

// Replaces all outliers of columns [first, first + count). Column first + i has entries begins[i] to begins[i + 1], with k
// `inputs` and values `numbers`; entries of one element are all added. Returns 1; returns 0 without a change if the memory is
// too small or a k is out of range.
QT_EXPORT int qt_weight_fill_outliers(qt::Weight* weight, index_t first, index_t count, const std::int64_t* begins,
                                      const std::int64_t* inputs, const float* numbers) {
  qt::Outliers& outliers = weight->outliers;
  if (!outliers.begins) return count == 0 || begins[count] == begins[0];
  std::vector<qt::Placed> all = qt::without_columns(*weight, first, count);
  const std::ptrdiff_t kept = std::ptrdiff_t(all.size());
  for (index_t i = 0; i < count; ++i) {
    index_t tile, lane;
    qt::tile_and_lane(*weight, first + i, tile, lane);
    for (index_t at = begins[i]; at < begins[i + 1]; ++at) {
      if (inputs[at] < 0 || inputs[at] >= weight->depth) return 0;
      const std::uint16_t k = std::uint16_t(inputs[at] % qt::kOutlierDepth);
      all.push_back({qt::outlier_run(*weight, tile, inputs[at], lane), {k, std::uint16_t(lane), numbers[at]}});
    }
  }
  if (index_t(all.size()) > outliers.most) return 0;
  std::stable_sort(all.begin() + kept, all.end(), qt::comes_before);
  std::inplace_merge(all.begin(), all.begin() + kept, all.end(), qt::comes_before);
  const index_t runs = qt::runs_of(weight->tiles, weight->depth);
  index_t run = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (; run <= all[i].run; ++run) outliers.begins[run] = std::uint32_t(i);
    outliers.numbers[i] = all[i].outlier;
  }
  for (; run <= runs; ++run) outliers.begins[run] = std::uint32_t(all.size());
  return 1;
}
