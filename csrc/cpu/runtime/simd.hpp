// Vectors of fp32 and the element types of models, for the instruction set of the current compilation.
//
// Every kernel source is compiled once per instruction set (setup.py) into the namespace QT_ISA. Other files use intrinsics
// only in a few measured fast paths. Arithmetic uses explicit `fma`: contraction is off, so two instances of a template round
// alike. All functions are in an unnamed or inline namespace, so the linker cannot merge code for AVX-512 with code for lesser
// processors. For the same reason, kernel sources use no templates of the standard library.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef QT_ISA
#error "compile kernel sources with -DQT_ISA=<name>"
#endif

#define QT_INLINE static inline __attribute__((always_inline))

using index_t = std::int64_t;

namespace qt::QT_ISA {
namespace {

// --- features of the instruction set: layouts and unit shapes depend on these, not on its name ---

#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int kRegisters = 32;  // vector registers
#else
inline constexpr int kRegisters = 16;
#endif

// True if dot_pairs is one instruction.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
inline constexpr bool kDotsPairs = true;
#else
inline constexpr bool kDotsPairs = false;
#endif

// True if dot_bytes is one instruction; and the bias that it subtracts from each unsigned byte: ARM's dot product without
// FEAT_I8MM multiplies bytes of equal signedness only.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_MATMUL_INT8)
inline constexpr bool kDotsBytes = true;
inline constexpr std::int32_t kDotBias = 0;
#elif defined(__ARM_FEATURE_DOTPROD)
inline constexpr bool kDotsBytes = true;
inline constexpr std::int32_t kDotBias = 128;
#else
inline constexpr bool kDotsBytes = false;
inline constexpr std::int32_t kDotBias = 0;
#endif

// Element types in memory: distinct types, so that overloads and templates can select them.
struct bf16 { std::uint16_t bits; };  // the upper half of an fp32
struct fp16 { std::uint16_t bits; };  // IEEE binary16

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

typedef float f32v __attribute__((vector_size(4 * kLanes)));
typedef std::int32_t i32v __attribute__((vector_size(4 * kLanes)));
typedef std::uint32_t u32v __attribute__((vector_size(4 * kLanes)));
typedef std::uint16_t u16v __attribute__((vector_size(4 * kLanes)));

QT_INLINE f32v all(float value) { return value - f32v{}; }
QT_INLINE i32v all(std::int32_t value) { return value - i32v{}; }
QT_INLINE f32v as_float(i32v bits) { return (f32v)bits; }
QT_INLINE i32v as_bits(f32v value) { return (i32v)value; }

// --- arithmetic without operators ---

QT_INLINE f32v fma(f32v a, f32v b, f32v c) {  // a * b + c, rounded once if the processor has FMA
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// Maximum of each lane; the second operand if one is NaN (as on x86).
QT_INLINE f32v max(f32v a, f32v b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

QT_INLINE f32v min(f32v a, f32v b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

// To the nearest integer, ties to even. |value| < 2^22.
QT_INLINE f32v round(f32v value) {
#if defined(__AVX512F__)
  return _mm512_roundscale_ps(value, 8);
#elif defined(__AVX2__)
  return _mm256_round_ps(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
  return vrndnq_f32(value);
#else
  const f32v magic = all(12582912.0f);  // 1.5 * 2^23: the sum has no fractional bits
  return (value + magic) - magic;
#endif
}

// value is integral and in the range of int32.
QT_INLINE i32v to_int(f32v value) { return __builtin_convertvector(value, i32v); }
QT_INLINE f32v to_float(i32v value) { return __builtin_convertvector(value, f32v); }

// Sum and maximum of the lanes, by halves: lane i with i + n/2, then quarters. The order is fixed.
QT_INLINE float sum_of(f32v value) {
  float lanes[kLanes];
  std::memcpy(lanes, &value, sizeof lanes);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

QT_INLINE float max_of(f32v value) {
  float lanes[kLanes];
  std::memcpy(lanes, &value, sizeof lanes);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
}

// Transposes: lane j of vector i becomes lane i of vector j. log2(kLanes) rounds; vectors a power of two apart swap halves.
template <int Apart>
QT_INLINE void swap_halves(i32v& a, i32v& b) {
  i32v low, high;
  for (int j = 0; j < kLanes; ++j) {
    low[j] = j & Apart ? kLanes + j - Apart : j;
    high[j] = j & Apart ? kLanes + j : j + Apart;
  }
#if defined(__clang__)
  i32v c, d;
  for (int j = 0; j < kLanes; ++j) {
    c[j] = low[j] < kLanes ? a[low[j]] : b[low[j] - kLanes];
    d[j] = high[j] < kLanes ? a[high[j]] : b[high[j] - kLanes];
  }
#else
  const i32v c = __builtin_shuffle(a, b, low), d = __builtin_shuffle(a, b, high);
#endif
  a = c;
  b = d;
}

template <int Apart = 1>
QT_INLINE void transpose(i32v (&vectors)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if (!(i & Apart)) swap_halves<Apart>(vectors[i], vectors[i + Apart]);
  if constexpr (Apart * 2 < kLanes) transpose<Apart * 2>(vectors);
}

// e^x within 2 units in the last place: x = n ln 2 + r with |r| <= ln 2 / 2; e^r is a Taylor polynomial of degree 7 (remainder
// below 2^-27), times 2^n. Arguments are clamped to [-87, 88]; NaN stays NaN.
QT_INLINE f32v exponential(f32v x) {
  x = min(all(88.0f), max(all(-87.0f), x));
  const f32v n = round(x * all(1.44269504f));
  f32v r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  f32v p = all(1.0f / 5040);
  p = fma(p, r, all(1.0f / 720));
  p = fma(p, r, all(1.0f / 120));
  p = fma(p, r, all(1.0f / 24));
  p = fma(p, r, all(1.0f / 6));
  p = fma(p, r, all(0.5f));
  p = fma(p, r, all(1.0f));
  p = fma(p, r, all(1.0f));
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, n);
#else
  return p * as_float((to_int(n) + 127) << 23);
#endif
}

// --- memory: full vectors, or the first `count` lanes (other lanes: read as zero, not written) ---

#if defined(__AVX512F__)
QT_INLINE __mmask16 first(index_t count) { return count >= kLanes ? __mmask16(0xFFFF) : __mmask16((1u << count) - 1); }
#endif

QT_INLINE f32v load(const float* from) {
  f32v value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

QT_INLINE void store(float* to, f32v value) { std::memcpy(to, &value, sizeof value); }

QT_INLINE f32v load(const bf16* from) {
#if defined(__AVX512F__)
  return (f32v)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#elif defined(__AVX2__)
  return (f32v)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
#else
  u32v bits;
  for (int i = 0; i < kLanes; ++i) bits[i] = std::uint32_t(from[i].bits) << 16;
  return (f32v)bits;
#endif
}

// One fp32 to bf16, nearest even; NaN stays NaN. Computed on bits, identical on every instruction set except AVX512_BF16, which
// flushes denormals to zero, and AVX512_VNNI, which has integer kernels only.
QT_INLINE std::uint16_t narrow_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return std::uint16_t(bits >> 16 | 0x40);
  return std::uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

#if defined(__AVX512F__)
QT_INLINE __m256i narrow(f32v value) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(value);
#else
#if defined(__AVX512VNNI__)
  const __m512i sign = _mm512_set1_epi32(std::int32_t(0x80000000));
  const __m512i bits = _mm512_mask_and_epi32((__m512i)value, _mm512_fpclass_ps_mask(value, 0x20), (__m512i)value, sign);
#else
  const __m512i bits = (__m512i)value;
#endif
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), quiet));
#endif
}
#elif defined(__AVX2__)
QT_INLINE __m128i narrow(f32v value) {
  const __m256i bits = (__m256i)value;
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256i unordered = (__m256i)_mm256_cmp_ps(value, value, _CMP_UNORD_Q);
  const __m256i chosen = _mm256_blendv_epi8(rounded, quiet, unordered);
  const __m256i packed = _mm256_packus_epi32(chosen, chosen);
  return _mm_unpacklo_epi64(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
}
#endif

QT_INLINE void store(bf16* to, f32v value) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)to, narrow(value));
#elif defined(__AVX2__)
  _mm_storeu_si128((__m128i*)to, narrow(value));
#else
  for (int i = 0; i < kLanes; ++i) to[i].bits = narrow_bits(value[i]);
#endif
}

QT_INLINE f32v load(const fp16* from) {
#if defined(__AVX512F__)
  return (f32v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
  return (f32v)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  // A multiplication changes the exponent's bias and normalizes denormals.
  u32v bits;
  for (int i = 0; i < kLanes; ++i) bits[i] = from[i].bits;
  const u32v magnitude = (bits & 0x7FFF) << 13, sign = (bits & 0x8000) << 16;
  const u32v scaled = (u32v)((f32v)magnitude * all(5.192296858534828e33f));  // 2^112
  return (f32v)((magnitude >= 0x0F800000u ? magnitude | 0x7F800000u : scaled) | sign);
#endif
}

// One fp32 to fp16, nearest even.
QT_INLINE std::uint16_t half_bits(float value) {
#if defined(__F16C__) || defined(__AVX512F__)
  return std::uint16_t(_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(value), 0), 0));
#elif defined(__aarch64__)
  const __fp16 half = __fp16(value);
  std::uint16_t bits;
  std::memcpy(&bits, &half, sizeof bits);
  return bits;
#else
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const std::uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
  if (magnitude >= 0x7F800000u) return std::uint16_t(sign | 0x7C00 | (magnitude > 0x7F800000u ? 0x200 : 0));
  if (magnitude >= 0x477FF000u) return std::uint16_t(sign | 0x7C00);
  if (magnitude >= 0x38800000u) {
    const std::uint32_t rebased = magnitude - 0x38000000u;
    return std::uint16_t(sign | (rebased + 0xFFF + (rebased >> 13 & 1)) >> 13);
  }
  float tiny;
  std::memcpy(&tiny, &magnitude, sizeof tiny);
  tiny += 0.5f;  // the unit in the last place of 0.5 is fp16's smallest denormal
  std::uint32_t shifted;
  std::memcpy(&shifted, &tiny, sizeof shifted);
  return std::uint16_t(sign | (shifted - 0x3F000000u));
#endif
}

QT_INLINE void store(fp16* to, f32v value) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__)
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) to[i].bits = half_bits(value[i]);
#endif
}

template <class Element>
QT_INLINE f32v load(const Element* from, index_t count) {
  if (count >= kLanes) return load(from);
  Element lanes[kLanes] = {};
  std::memcpy(lanes, from, count * sizeof(Element));
  return load(lanes);
}

template <class Element>
QT_INLINE void store(Element* to, f32v value, index_t count) {
  if (count >= kLanes) return store(to, value);
  Element lanes[kLanes];
  store(lanes, value);
  std::memcpy(to, lanes, count * sizeof(Element));
}

#if defined(__AVX512F__)
QT_INLINE f32v load(const float* from, index_t count) { return _mm512_maskz_loadu_ps(first(count), from); }
QT_INLINE void store(float* to, f32v value, index_t count) { _mm512_mask_storeu_ps(to, first(count), value); }
QT_INLINE f32v load(const bf16* from, index_t count) {
  return (f32v)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(count), from)), 16);
}
QT_INLINE void store(bf16* to, f32v value, index_t count) { _mm256_mask_storeu_epi16(to, first(count), narrow(value)); }
#endif

// The value after a store as Element and a load.
template <class Element>
QT_INLINE f32v rounded_to(f32v value) {
  if constexpr (std::is_same_v<Element, float>) {
    return value;
  } else {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<Element, bf16>)
      return (f32v)_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(value)), 16);
#endif
    Element lanes[kLanes];
    store(lanes, value);
    return load(lanes);
  }
}

// --- multiplication of packed numbers ---

// acc + a.low * b.low + a.high * b.high; each lane of a and b is a pair of bf16, the lower index in the low half. If
// kDotsPairs, one instruction with its own roundings; otherwise two fma, low first.
QT_INLINE f32v dot_pairs(f32v acc, i32v a, i32v b) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(acc, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return vbfdotq_f32(acc, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
  const i32v high = all(std::int32_t(0xFFFF0000));
  acc = fma(as_float(a << 16), as_float(b << 16), acc);
  return fma(as_float(a & high), as_float(b & high), acc);
#endif
}

// acc + the sum over four bytes of (a (unsigned) - kDotBias) * b (signed); exact, without saturation.
QT_INLINE i32v dot_bytes(i32v acc, i32v a, i32v b) {
#if defined(__AVX512VNNI__)
  return (i32v)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
  return (i32v)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)b);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return (i32v)vusdotq_s32((int32x4_t)acc, (uint8x16_t)a, (int8x16_t)b);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (i32v)vdotq_s32((int32x4_t)acc, (int8x16_t)(a ^ all(std::int32_t(0x80808080))), (int8x16_t)b);
#else
  for (int shift = 0; shift < 32; shift += 8) acc += (i32v)((u32v)a >> shift & 0xFF) * (b << (24 - shift) >> 24);
  return acc;
#endif
}

// Forces the value to be computed here, in a register; otherwise the compiler reorders integer sums and spills registers.
QT_INLINE void keep_order(i32v& value) {
#if defined(__x86_64__)
  asm("" : "+v"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#endif
}

// Load that keeps program order, so that hardware prefetchers detect a sequential read.
QT_INLINE i32v load_in_order(const void* from) {
  i32v bits;
  std::memcpy(&bits, from, sizeof bits);
#if defined(__x86_64__)
  asm volatile("" : "+v"(bits));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(bits));
#endif
  return bits;
}

// acc + a.low * b.low + a.high * b.high, each lane of a and b a pair of signed 16-bit numbers; exact.
QT_INLINE i32v multiply_pairs(i32v acc, i32v a, i32v b) {
#if defined(__AVX512BW__)
  acc += (i32v)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  acc += (i32v)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  acc += (i32v)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  acc += (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
  keep_order(acc);
  return acc;
}

QT_INLINE i32v load_bits(const void* from) {
  i32v bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}

// Table lookup for each byte of `indices`, all below 16. table: 16 bytes, repeated to fill the vector.
QT_INLINE i32v look_up(i32v table, i32v indices) {
#if defined(__AVX512BW__)
  return (i32v)_mm512_shuffle_epi8((__m512i)table, (__m512i)indices);
#elif defined(__AVX2__)
  return (i32v)_mm256_shuffle_epi8((__m256i)table, (__m256i)indices);
#elif defined(__aarch64__)
  return (i32v)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)indices);
#else
  unsigned char from[16], bytes[4 * kLanes];
  std::memcpy(from, &table, sizeof from);
  std::memcpy(bytes, &indices, sizeof bytes);
  for (int i = 0; i < 4 * kLanes; ++i) bytes[i] = from[bytes[i]];
  std::memcpy(&indices, bytes, sizeof bytes);
  return indices;
#endif
}

// Lookup in a table of 16 floats, one index per lane.
QT_INLINE f32v look_up(const float* table, i32v indices) {
#if defined(__AVX512F__)
  return _mm512_permutexvar_ps((__m512i)indices, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
  return _mm256_i32gather_ps(table, (__m256i)indices, 4);
#else
  f32v values;
  for (int i = 0; i < kLanes; ++i) values[i] = table[indices[i]];
  return values;
#endif
}

// Loads bytes as 32-bit integers, one per lane.
QT_INLINE i32v load_bytes(const char* from) {
#if defined(__AVX512F__)
  return (i32v)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (i32v)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  i32v values;
  for (int i = 0; i < kLanes; ++i) values[i] = (unsigned char)from[i];
  return values;
#endif
}

// Broadcasts one 32-bit word of memory (a pair of bf16, four bytes) to every lane.
QT_INLINE i32v spread_word(const void* from) {
  std::int32_t word;
  std::memcpy(&word, from, sizeof word);
  return all(word);
}

}  // namespace
}  // namespace qt::QT_ISA
