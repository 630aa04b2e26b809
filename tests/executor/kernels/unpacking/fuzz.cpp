// Pack arbitrary file contents into weights of every format and size, and read them back, under the address and
// undefined-behaviour sanitizers. Every array is a separate allocation that ends with its last byte.
//
//   fuzz SEED SECONDS          prints how many weights were packed, and how many of the format that had the fewest
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <random>

#include "linear.hpp"

extern "C" {
index_t qt_weight_bytes(int format, index_t columns, index_t depth, index_t group, int paired);
qt::Weight* qt_weight_new(int format, index_t columns, index_t depth, index_t group, int paired, index_t leaves,
                          index_t cut_columns, void* memory);
void qt_weight_delete(qt::Weight* weight);
void qt_weight_fill(qt::Weight* weight, const void* source, int source_dtype, index_t stride, index_t first, index_t count);
int qt_weight_fill_codes(qt::Weight* weight, const void* codes, int is_signed, index_t stride, const void* scales,
                         int scale_dtype, index_t scale_stride, index_t scale_group, const float* factors, const void* zeros,
                         index_t zero_stride, index_t first, index_t count);
int qt_weight_fill_tables(qt::Weight* weight, const void* codes, index_t stride, const float* tables, index_t first,
                          index_t count);
index_t qt_weight_outlier_bytes(index_t columns, index_t depth, int paired, index_t most);
void qt_weight_set_outliers(qt::Weight* weight, void* memory, index_t most);
int qt_weight_fill_outliers(qt::Weight* weight, index_t first, index_t count, const std::int64_t* begins,
                            const std::int64_t* inputs, const float* numbers);
void qt_weight_fill_blocks(qt::Weight* weight, const void* blocks, index_t stride, index_t first, index_t count);
void qt_weight_read(const qt::Weight* weight, index_t first, index_t count, float* out);
}

namespace {

// By a format's code: numbers and bytes of a GGUF block, and other sources that may fill it.
struct Format {
  index_t numbers, bytes;
  bool floats, codes;
  index_t zero_bytes;  // of a group; 0: there are no zeros
  bool scale_bytes;
};
constexpr Format kFormats[] = {
    {0, 0, true, false, 0, false},      // bf16
    {0, 0, true, false, 0, false},      // fp16
    {0, 0, true, false, 0, false},      // fp32
    {32, 34, true, true, 0, false},     // int8, Q8_0
    {32, 18, true, true, 0, false},     // int4, Q4_0
    {0, 0, false, true, 1, false},      // int4 with zeros
    {0, 0, false, true, 1, false},      // int8 with zeros
    {32, 20, false, false, 0, false},   // Q4_1
    {32, 22, false, false, 0, false},   // Q5_0
    {32, 24, false, false, 0, false},   // Q5_1
    {256, 84, false, false, 0, false},  // Q2_K
    {256, 110, false, false, 0, false}, // Q3_K
    {256, 144, false, false, 0, false}, // Q4_K
    {256, 176, false, false, 0, false}, // Q5_K
    {256, 210, false, false, 0, false}, // Q6_K
    {32, 18, false, false, 0, false},   // IQ4_NL
    {256, 136, false, false, 0, false}, // IQ4_XS
    {32, 17, false, true, 0, true},     // MXFP4
    {0, 0, false, true, 0, true},       // NVFP4
    {0, 0, false, true, 0, false},      // fp8
    {0, 0, false, true, 0, false},      // nf4
    {0, 0, false, true, 0, false},      // fp4
    {0, 0, false, true, 0, false},      // int4 again, scales in fp32
    {0, 0, false, true, 0, false},      // int8 again
    {0, 0, false, true, 4, false},      // int4, zeros in fp32 too
    {0, 0, false, true, 4, false},      // int8, the same
    {0, 0, false, false, 0, false},     // tables
};
constexpr int kFormatCount = int(std::size(kFormats));
static_assert(kFormatCount == QT_NUM_FORMATS, "a format of WeightFormat has no row here");
constexpr index_t kInt8 = 3, kInt4Single = 22, kTables = 26, kSizes[] = {2, 2, 4};  // of floats

class Fuzzer {
 public:
  explicit Fuzzer(std::uint64_t seed) : random_(seed) {}

  // False: the arguments are invalid.
  bool once() {
    const int format = int(below(kFormatCount));
    const Format& of = kFormats[format];
    constexpr index_t kGroups[] = {0, 0, 0, 16, 32, 64, 128};
    const index_t group = kGroups[below(7)], columns = 1 + below(below(3) ? 150 : 20);
    const index_t steps[] = {1, 16, 32, 128, 256}, step = steps[below(5)];
    const index_t depth = step * (1 + below(700 / step + 1));
    const bool paired = columns % 2 == 0 && below(2);
    const index_t bytes = qt_weight_bytes(format, columns, depth, group, paired);
    if (bytes == 0) return false;
    const index_t most = format == kTables ? below(3) * below(500) : 0;
    const index_t all_bytes = bytes + qt_weight_outlier_bytes(columns, depth, paired, most);
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, all_bytes)) std::abort();
    std::memset(memory, 0, all_bytes);
    qt::Weight* weight = qt_weight_new(format, columns, depth, group, paired, 1, columns, memory);
    if (!weight) std::abort();
    if (most > 0) qt_weight_set_outliers(weight, (char*)memory + bytes, most);
    const index_t first = below(columns), count = 1 + below(columns - first);
    const bool has_blocks = of.numbers && depth % of.numbers == 0 && (format > kInt8 + 1 || group == of.numbers);
    bool filled = true;
    if (format == kTables)
      for (index_t times = 1 + below(3); times > 0; --times) fill_tables(weight, columns, depth);
    else if (has_blocks && (!of.codes || below(2)))
      fill_blocks(weight, depth / of.numbers * of.bytes, first, count);
    else if (of.codes && (!of.floats || below(2)))
      filled = fill_codes(weight, format, depth, first, count);
    else if (of.floats)
      fill_floats(weight, depth, first, count);
    float* out = (float*)std::malloc(columns * depth * sizeof(float));
    qt_weight_read(weight, 0, columns, out);
    std::free(out);
    qt_weight_delete(weight);
    std::free(memory);
    counts_[format] += filled;
    return filled;
  }

  long fewest() const { return *std::min_element(std::begin(counts_), std::end(counts_)); }

 private:
  index_t below(index_t end) { return index_t(random_() % std::uint64_t(end)); }

  // Noise, one repeated byte, or noise with extreme floats.
  char* bytes(index_t count) {
    char* made = (char*)std::malloc(count);
    const index_t kind = below(4);
    const char alike[] = {0, char(0xFF), 0x7F, char(0x80), 0x7C};
    const char byte = alike[below(sizeof alike)];
    for (index_t i = 0; i < count; ++i) made[i] = kind == 0 || (kind == 1 && below(4) == 0) ? byte : char(random_());
    return made;
  }

  void fill_blocks(qt::Weight* weight, index_t row_bytes, index_t first, index_t count) {
    const index_t stride = row_bytes + (below(2) ? 2 * below(20) : 0);
    char* rows = bytes((count - 1) * stride + row_bytes);
    qt_weight_fill_blocks(weight, rows, stride, first, count);
    std::free(rows);
  }

  bool fill_codes(qt::Weight* weight, int format, index_t depth, index_t first, index_t count) {
    const Format& of = kFormats[format];
    const index_t group = weight->group > depth || weight->group <= 0 ? depth : weight->group;
    if (of.scale_bytes && depth % group) return false;  // refused before
    const index_t scale_group = of.scale_bytes || group == depth ? group : group * (1 + below(3));
    const index_t groups = (depth + scale_group - 1) / scale_group;
    const int dtype = of.scale_bytes ? int(kInt8) : int(below(3));
    char* codes = bytes(count * depth);
    if (below(2))  // most of them as they should be
      for (index_t i = 0; i < count * depth; ++i) codes[i] &= 15;
    char* scales = bytes(count * groups * (of.scale_bytes ? 1 : kSizes[dtype]));
    char* zeros = of.zero_bytes && below(4) ? bytes(count * groups * of.zero_bytes) : nullptr;
    char* factors = of.scale_bytes && below(2) ? bytes(count * 4) : nullptr;
    const bool is_integer = !of.scale_bytes && (format <= kInt8 + 1 || format >= kInt4Single);
    const bool is_signed = is_integer && !of.zero_bytes && below(2);
    qt_weight_fill_codes(weight, codes, is_signed, depth, scales, dtype, groups, scale_group, (const float*)factors, zeros,
                         zeros ? groups : 0, first, count);
    for (char* each : {codes, scales, zeros, factors}) std::free(each);
    return true;
  }

  // Some columns with outliers, a few of which are out of range.
  void fill_tables(qt::Weight* weight, index_t columns, index_t depth) {
    const index_t first = below(columns), count = 1 + below(columns - first);
    char* codes = bytes(count * depth);
    if (below(2))
      for (index_t i = 0; i < count * depth; ++i) codes[i] &= 15;
    char* tables = bytes(count * 16 * 4);
    qt_weight_fill_tables(weight, codes, depth, (const float*)tables, first, count);
    std::int64_t* begins = (std::int64_t*)std::malloc((count + 1) * sizeof(std::int64_t));
    begins[0] = 0;
    for (index_t i = 0; i < count; ++i) begins[i + 1] = begins[i] + below(4) * below(3);
    std::int64_t* inputs = (std::int64_t*)std::malloc(begins[count] * sizeof(std::int64_t));
    const bool wrong = below(4) == 0;
    for (index_t i = 0; i < begins[count]; ++i) inputs[i] = wrong ? below(depth + 2) - 1 : below(depth);
    char* numbers = bytes(begins[count] * 4);
    qt_weight_fill_outliers(weight, first, count, begins, inputs, (const float*)numbers);
    for (void* each : {(void*)codes, (void*)tables, (void*)begins, (void*)inputs, (void*)numbers}) std::free(each);
  }

  void fill_floats(qt::Weight* weight, index_t depth, index_t first, index_t count) {
    const int dtype = int(below(3));
    char* numbers = bytes(count * depth * kSizes[dtype]);
    qt_weight_fill(weight, numbers, dtype, depth, first, count);
    std::free(numbers);
  }

  std::mt19937_64 random_;
  long counts_[kFormatCount] = {};
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  Fuzzer fuzzer(std::strtoull(argv[1], nullptr, 10));
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(index_t(std::atof(argv[2]) * 1000));
  long packed = 0;
  while (std::chrono::steady_clock::now() < end) packed += fuzzer.once();
  std::printf("%ld %ld\n", packed, fuzzer.fewest());
}
