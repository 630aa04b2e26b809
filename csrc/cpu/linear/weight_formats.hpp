// Formats of packed weights, numbered as in `quintet.executor.backends.cpu.ops.host_linear.WeightFormat`.
//
// Separate from linear.hpp: the loader rejects a library in which a number means another format
// (`quintet.executor.backends.cpu.ops.host_sources`), but accepts one with other kernels for the same formats.
#pragma once

#include "work.hpp"

namespace qt {

// Bits of a stored code. table: 4 bits, the index of one of 16 bytes.
enum class Codes : int { eight, four, table, six, five, three, two };

// Content of a scale block's head for each of 64 columns, and the resulting scale and minimum of a group.
enum class Scales : int {
  column,         // empty: the weight has no groups
  half,           // fp16 scale
  half_zero,      // fp16 scale, then uint8 zero
  half_minimum,   // fp16 scale, then fp16 minimum
  bytes,          // fp16 d; int8 s for each group; scale d s
  bytes_minimum,  // fp16 d, then fp16 e; for each group uint8 s, then uint8 m; scale d s, minimum -e m
  nibbles,        // the same, with s in the low half of a byte and m in the high half
  exponent,       // a power of two: uint8, 127 for 1
  eighth,         // fp8, e4m3
  single,         // fp32 scale
  single_zero,    // fp32 scale, then fp32 zero, which may be fractional
  single_shift,   // internal: fp32 scale and shift for each group (linear_scales.hpp)
};

// Meaning of the codes. All except integers are scaled, then multiplied as floating-point numbers. tables: each column has its
// own table.
enum class Values : int { integer, fp8, nf4, fp4, tables };

// Coded formats, from kFirstForm on; the floating-point formats before them are Dtypes. group 0: chosen by the caller, and a
// scale block is one group.
struct Form {
  Codes codes;
  Scales scales;
  index_t group, block;
  const std::int8_t* table = nullptr;
  Values values = Values::integer;
};
// kUneven: the table of ggml's IQ4. kE2M1: fp4, doubled (OCP Microscaling Formats, 2023, section 5.3.3).
inline constexpr std::int8_t kUneven[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
inline constexpr std::int8_t kE2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
inline constexpr int kFirstForm = int(Dtype::fp32) + 1;
inline constexpr Form kForms[] = {
    {Codes::eight, Scales::half, 0, 0},                          // INT8
    {Codes::four, Scales::half, 0, 0},                           // INT4
    {Codes::four, Scales::half_zero, 0, 0},                      // INT4_ZEROS
    {Codes::eight, Scales::half_zero, 0, 0},                     // INT8_ZEROS
    {Codes::four, Scales::half_minimum, 32, 32},                 // Q4_1
    {Codes::five, Scales::half, 32, 32},                         // Q5_0
    {Codes::five, Scales::half_minimum, 32, 32},                 // Q5_1
    {Codes::two, Scales::nibbles, 16, 256},                      // Q2_K
    {Codes::three, Scales::bytes, 16, 256},                      // Q3_K
    {Codes::four, Scales::bytes_minimum, 32, 256},               // Q4_K
    {Codes::five, Scales::bytes_minimum, 32, 256},               // Q5_K
    {Codes::six, Scales::bytes, 16, 256},                        // Q6_K
    {Codes::table, Scales::half, 32, 32, kUneven},               // IQ4_NL
    {Codes::table, Scales::bytes, 32, 256, kUneven},             // IQ4_XS
    {Codes::table, Scales::exponent, 32, 32, kE2M1},             // MXFP4
    {Codes::table, Scales::eighth, 16, 16, kE2M1},               // NVFP4
    {Codes::eight, Scales::single, 0, 0, nullptr, Values::fp8},  // FP8
    {Codes::four, Scales::single, 0, 0, nullptr, Values::nf4},   // NF4
    {Codes::four, Scales::single, 0, 0, nullptr, Values::fp4},   // FP4
    {Codes::four, Scales::single, 0, 0},                         // INT4_SINGLE
    {Codes::eight, Scales::single, 0, 0},                        // INT8_SINGLE
    {Codes::four, Scales::single_zero, 0, 0},                    // INT4_SINGLE_ZEROS
    {Codes::eight, Scales::single_zero, 0, 0},                   // INT8_SINGLE_ZEROS
    {Codes::four, Scales::column, 0, 128, nullptr, Values::tables},  // TABLES
};

// Numbers of a checkpoint that the packed form cannot represent; see qt_weight_fill_codes.
enum class Problem : std::uint32_t { code = 1, scale = 2 };

}  // namespace qt
