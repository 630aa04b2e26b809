// Number formats of kernels: bf16, fp16, fp8 (e4m3fn) and float; packs of 16 bytes; pairs for matrix instructions. A format is
// a struct of bits without arithmetic: kernels compute in float and round explicitly, so a GPU and the emulator give the same
// results. Uses no header of the CUDA toolkit, so that NVRTC works without one. Included by device.cuh, never first.
#pragma once

namespace quintet {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};
// Sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, 0x7f and 0xff are NaN, the largest number is 448.
struct fp8 {
  uint8_t bits;
};

constexpr float FP8_MAX = 448.0f;

namespace software {

// An e4m3 number shifted to the fields of an fp16 is the number divided by 256; the product with 256 is exact.
__device__ __forceinline__ uint16_t fp8_to_fp16_over_256(uint32_t bits) {
  return uint16_t(((bits & 0x80u) << 8) | ((bits & 0x7fu) << 7));
}

// Rounds to nearest even with saturation; NaN stays NaN. For processors without the instruction.
__device__ __forceinline__ uint8_t float_to_fp8(float x) {
  uint32_t word = __float_as_uint(x);
  uint32_t sign = (word >> 24) & 0x80u;
  uint32_t magnitude = word & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint8_t(sign | 0x7fu);
  if (magnitude >= 0x43e00000u) return uint8_t(sign | 0x7eu);  // 448 and more, infinity too
  if (magnitude < 0x3c800000u) {  // below 2^-6: multiples of 2^-9; adding 2^14 leaves them in the last bits
    float shifted = __uint_as_float(magnitude) + 16384.0f;
    return uint8_t(sign | (__float_as_uint(shifted) - __float_as_uint(16384.0f)));
  }
  uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return uint8_t(sign | ((rounded - (120u << 23)) >> 20));
}

}  // namespace software

#ifdef QT_EMULATED

__device__ __forceinline__ float fp16_bits_to_float(uint16_t bits) { return emulation::fp16_to_float(bits); }
__device__ __forceinline__ uint16_t float_to_fp16_bits(float x) { return emulation::float_to_fp16(x); }
__device__ __forceinline__ uint16_t float_to_bf16_bits(float x) { return emulation::float_to_bf16(x); }
__device__ __forceinline__ uint32_t fp16_bits_pair(float low, float high) {
  return uint32_t(float_to_fp16_bits(low)) | (uint32_t(float_to_fp16_bits(high)) << 16);
}
__device__ __forceinline__ uint32_t bf16_bits_pair(float low, float high) {
  return uint32_t(float_to_bf16_bits(low)) | (uint32_t(float_to_bf16_bits(high)) << 16);
}

#else

__device__ __forceinline__ float fp16_bits_to_float(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
__device__ __forceinline__ uint16_t float_to_fp16_bits(float x) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
__device__ __forceinline__ uint16_t float_to_bf16_bits(float x) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
// The instruction takes the upper half first.
__device__ __forceinline__ uint32_t fp16_bits_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ uint32_t bf16_bits_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

#endif

#if !defined(QT_EMULATED) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define QT_FP8_INSTRUCTIONS 1
#endif

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
__device__ __forceinline__ float to_float(fp16 x) { return fp16_bits_to_float(x.bits); }

// Two fp8 numbers (the lower byte first) as two fp16 in one word: exact.
__device__ __forceinline__ uint32_t fp8_pair_to_fp16_pair(uint16_t pair) {
#ifdef QT_FP8_INSTRUCTIONS
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  return halves;
#else
  uint32_t low = pair & 0xffu, high = pair >> 8;
  float a = fp16_bits_to_float(software::fp8_to_fp16_over_256(low)) * 256.0f;
  float b = fp16_bits_to_float(software::fp8_to_fp16_over_256(high)) * 256.0f;
  uint32_t halves = fp16_bits_pair(a, b);
  if ((low & 0x7fu) == 0x7fu) halves |= 0x7fffu;
  if ((high & 0x7fu) == 0x7fu) halves |= 0x7fff0000u;
  return halves;
#endif
}

__device__ __forceinline__ float to_float(fp8 x) {
  return fp16_bits_to_float(uint16_t(fp8_pair_to_fp16_pair(x.bits) & 0xffffu));
}

// Two numbers as fp8, the first in the lower byte.
__device__ __forceinline__ uint16_t fp8_bits_pair(float low, float high) {
#ifdef QT_FP8_INSTRUCTIONS
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return uint16_t(uint32_t(software::float_to_fp8(low)) | (uint32_t(software::float_to_fp8(high)) << 8));
#endif
}

template <class T>
struct Format;
template <>
struct Format<float> {
  static __device__ __forceinline__ float round(float x) { return x; }
};
template <>
struct Format<bf16> {
#ifndef QT_EMULATED
  static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
  }
#endif
  static __device__ __forceinline__ bf16 round(float x) { return bf16{float_to_bf16_bits(x)}; }
  static __device__ __forceinline__ uint32_t pair(float low, float high) { return bf16_bits_pair(low, high); }
  static __device__ __forceinline__ uint32_t widen(uint16_t two) {
    uint32_t halves = fp8_pair_to_fp16_pair(two);
    return bf16_bits_pair(fp16_bits_to_float(uint16_t(halves & 0xffffu)), fp16_bits_to_float(uint16_t(halves >> 16)));
  }
};
template <>
struct Format<fp16> {
#ifndef QT_EMULATED
  static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
  }
#endif
  static __device__ __forceinline__ fp16 round(float x) { return fp16{float_to_fp16_bits(x)}; }
  static __device__ __forceinline__ uint32_t pair(float low, float high) { return fp16_bits_pair(low, high); }
  static __device__ __forceinline__ uint32_t widen(uint16_t two) { return fp8_pair_to_fp16_pair(two); }
};
template <>
struct Format<fp8> {
  static __device__ __forceinline__ fp8 round(float x) { return fp8{uint8_t(fp8_bits_pair(x, 0.0f) & 0xffu)}; }
};

// Rounds to nearest even; fp8 saturates at 448, fp16 overflows to infinity.
template <class T>
__device__ __forceinline__ T from_float(float x) {
  return Format<T>::round(x);
}

// Two 16-bit numbers in a word, in the fragment layout of matrix instructions: the first in the lower half.
template <class T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  return Format<T>::pair(low, high);
}

// a * b + c of two pairs of the 16-bit format T, each rounded once; subnormal numbers are kept.
template <class T>
__device__ __forceinline__ uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
#ifdef QT_EMULATED
  auto half = [](uint32_t pair, int i) { return to_float(T{uint16_t(pair >> (16 * i))}); };
  // Rounds twice if float cannot hold the result; kernels pass only operands for which it can.
  return pack_pair<T>(fmaf(half(a, 0), half(b, 0), half(c, 0)), fmaf(half(a, 1), half(b, 1), half(c, 1)));
#else
  return Format<T>::fma(a, b, c);
#endif
}

// Two fp8 numbers (the lower byte first) as a pair of the 16-bit format T; exact, because T holds every e4m3 number.
template <class T>
__device__ __forceinline__ uint32_t widen_fp8_pair(uint16_t two) {
  return Format<T>::widen(two);
}

// Sixteen bytes of T in registers. Index it with constants (unrolled loops) only; otherwise it is in local memory.
template <class T>
struct Pack {
  static constexpr int SIZE = 16 / int(sizeof(T));
  static constexpr int PER_WORD = 4 / int(sizeof(T));
  static constexpr int BITS = 8 * int(sizeof(T));
  static constexpr uint32_t MASK = (1u << BITS) - 1u;
  uint32_t words[4];

  __device__ __forceinline__ uint32_t bits(int i) const {
    return (words[i / PER_WORD] >> (BITS * (i % PER_WORD))) & MASK;
  }
  __device__ __forceinline__ float get(int i) const {
    T x;
    x.bits = static_cast<decltype(x.bits)>(bits(i));
    return to_float(x);
  }
  __device__ __forceinline__ void set(int i, float value) {
    int shift = BITS * (i % PER_WORD);
    uint32_t& word = words[i / PER_WORD];
    word = (word & ~(MASK << shift)) | (uint32_t(from_float<T>(value).bits) << shift);
  }
};
template <>
struct Pack<float> {
  static constexpr int SIZE = 4;
  uint32_t words[4];

  __device__ __forceinline__ float get(int i) const { return __uint_as_float(words[i]); }
  __device__ __forceinline__ void set(int i, float value) { words[i] = __float_as_uint(value); }
};

// The address must be a multiple of 16 bytes.
template <class T>
__device__ __forceinline__ Pack<T> load_pack(const T* address) {
  uint4 quad = *reinterpret_cast<const uint4*>(address);
  return Pack<T>{{quad.x, quad.y, quad.z, quad.w}};
}
template <class T>
__device__ __forceinline__ void store_pack(T* address, const Pack<T>& pack) {
  *reinterpret_cast<uint4*>(address) = make_uint4(pack.words[0], pack.words[1], pack.words[2], pack.words[3]);
}
// Sixteen bytes from another load (`load_stream_16`, shared memory).
template <class T>
__device__ __forceinline__ Pack<T> as_pack(uint4 quad) {
  return Pack<T>{{quad.x, quad.y, quad.z, quad.w}};
}
template <class T>
__device__ __forceinline__ Pack<T> zero_pack() {
  return Pack<T>{{0u, 0u, 0u, 0u}};
}

}  // namespace quintet
