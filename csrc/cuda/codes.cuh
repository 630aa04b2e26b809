// Exact conversion of 4-bit and 8-bit codes to pairs of a 16-bit format T, for matrix instructions. One or two instructions per
// code.
//
// Integers: the code is placed in the low bits of a larger number with a last bit worth 1 (1024 in fp16, 128 in bf16). The
// larger number and the zero point are then subtracted (Kim, Henry, Fahim, Awadalla, Who Says Elephants Can't Run, 2022,
// section 3; Frantar, Castro, Chen, Hoefler, Alistarh, MARLIN, 2024, section 3.4). Floats: the fields are shifted to those of
// T; a multiplication by a power of two corrects the exponent bias.
//
// For 16 k of a tile of 16 columns, a lane's codes are fragments of two products of 8 columns, t = 0 and 1:
//   4 bits: one word; fragment h of product t is the pair of bits 8 t + 4 h and 16 above
//   8 bits: two words; the fragments of product t are its lower and its upper bytes
// linear_coded.cu defines the order of the words in memory.
#pragma once

namespace quintet {

template <class T>
struct LargePair;  // two large numbers with an integer in the last bits, and two ones
template <>
struct LargePair<fp16> {
  static constexpr uint32_t BITS = 0x64006400u, ONES = 0x3c003c00u;  // 1024 + n, n < 1024
};
template <>
struct LargePair<bf16> {
  static constexpr uint32_t BITS = 0x43004300u, ONES = 0x3f803f80u;  // 128 + n, n < 128
};

constexpr uint32_t SIGNS = 0x80008000u;

// Each code type has BITS (of a code), ZERO (the zero point if there is only one), the subtrahend of a zero point, and
// `fragments`: converts the words of one k step to the two registers of product t.

template <class T>
struct Int4 {
  static constexpr int BITS = 4;
  static constexpr uint32_t ZERO = 8;
  static __device__ __forceinline__ uint32_t less(uint32_t zero) {
    return (LargePair<T>::BITS | zero | zero << 16) ^ SIGNS;
  }
  static __device__ __forceinline__ void fragments(const uint32_t* words, int t, uint32_t less, uint32_t (&b)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t large = (words[0] >> (8 * t + 4 * h) & 0x000f000fu) | LargePair<T>::BITS;
      b[h] = fma_pair<T>(large, LargePair<T>::ONES, less);
    }
  }
};

template <class T>
struct Int8;
template <>
struct Int8<fp16> {
  static constexpr int BITS = 8;
  static constexpr uint32_t ZERO = 128;
  static __device__ __forceinline__ uint32_t less(uint32_t zero) { return Int4<fp16>::less(zero); }
  static __device__ __forceinline__ void fragments(const uint32_t* words, int t, uint32_t less, uint32_t (&b)[2]) {
    b[0] = fma_pair<fp16>(__byte_perm(words[t], 0x64646464u, 0x4140u), LargePair<fp16>::ONES, less);
    b[1] = fma_pair<fp16>(__byte_perm(words[t], 0x64646464u, 0x4342u), LargePair<fp16>::ONES, less);
  }
};
// bf16 has too few bits for 8-bit codes in a large number; fp32 has enough: 2^23 + n. The upper half of the fp32 of an integer
// below 256 is its exact bf16.
template <>
struct Int8<bf16> {
  static constexpr int BITS = 8;
  static constexpr uint32_t ZERO = 128;
  static __device__ __forceinline__ uint32_t less(uint32_t zero) { return 0x4b000000u | zero; }
  static __device__ __forceinline__ void fragments(const uint32_t* words, int t, uint32_t less, uint32_t (&b)[2]) {
    const float taken = __uint_as_float(less);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float first = __uint_as_float(__byte_perm(words[t], 0x4b000000u, 0x7440u + 2 * h)) - taken;
      const float second = __uint_as_float(__byte_perm(words[t], 0x4b000000u, 0x7441u + 2 * h)) - taken;
      b[h] = __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632u);
    }
  }
};

// e4m3 without NaN: the host rejects NaN.
template <class T>
struct Fp8 {
  static constexpr int BITS = 8;
  static constexpr uint32_t ZERO = 0;
  static constexpr bool IS_FP16 = LargePair<T>::ONES == LargePair<fp16>::ONES;
  static constexpr int SHIFT = IS_FP16 ? 1 : 4;                          // mantissas of 10 and 7 bits
  static constexpr uint32_t POWER = IS_FP16 ? 0x5c005c00u : 0x7b807b80u;  // 2^8, 2^120
  static __device__ __forceinline__ uint32_t less(uint32_t) { return SIGNS; }
  static __device__ __forceinline__ void fragments(const uint32_t* words, int t, uint32_t less, uint32_t (&b)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t upper = __byte_perm(words[t], 0u, h == 0 ? 0x1404u : 0x3424u);
      const uint32_t moved = (upper & SIGNS) | ((upper & 0x7f007f00u) >> SHIFT);
      b[h] = fma_pair<T>(moved, POWER, less);  // plus -0.0, which changes no number
    }
  }
};

// e2m1.
template <class T>
struct Fp4 {
  static constexpr int BITS = 4;
  static constexpr uint32_t ZERO = 0;
  static constexpr int SHIFT = Fp8<T>::IS_FP16 ? 9 : 6;
  static constexpr uint32_t POWER = Fp8<T>::IS_FP16 ? 0x74007400u : 0x7e807e80u;  // 2^14, 2^126
  static __device__ __forceinline__ uint32_t less(uint32_t) { return SIGNS; }
  static __device__ __forceinline__ void fragments(const uint32_t* words, int t, uint32_t less, uint32_t (&b)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t code = words[0] >> (8 * t + 4 * h);
      const uint32_t moved = (code << 12 & SIGNS) | (code & 0x00070007u) << SHIFT;
      b[h] = fma_pair<T>(moved, POWER, less);
    }
  }
};

}  // namespace quintet
