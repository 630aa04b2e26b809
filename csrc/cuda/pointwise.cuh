// Common part of pointwise kernels: load and store of V adjacent numbers of a row per thread. V is a pack of 16 bytes, or 1 if
// rows are not multiples of a pack and hence not 16-byte aligned.
#pragma once

namespace quintet {

template <class T, int V>
struct Numbers {
  static_assert(V == Pack<T>::SIZE, "16 bytes at a time, or one number");
  Pack<T> pack;

  __device__ __forceinline__ void load(const T* address) { pack = load_pack(address); }
  __device__ __forceinline__ void store(T* address) const { store_pack(address, pack); }
  __device__ __forceinline__ float get(int i) const { return pack.get(i); }
  __device__ __forceinline__ void round(const float (&x)[V]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (V == 4) {
        pack.words[i] = __float_as_uint(x[i]);
      } else {
        pack.words[i] = pack_pair<T>(x[2 * i], x[2 * i + 1]);
      }
    }
  }
};

template <class T>
struct Numbers<T, 1> {
  T number;

  __device__ __forceinline__ void load(const T* address) { number = *address; }
  __device__ __forceinline__ void store(T* address) const { *address = number; }
  __device__ __forceinline__ float get(int) const { return to_float(number); }
  __device__ __forceinline__ void round(const float (&x)[1]) { number = from_float<T>(x[0]); }
};

// Rounds x to the format T and returns it as a float.
template <class T>
__device__ __forceinline__ float rounded(float x) {
  return to_float(from_float<T>(x));
}

}  // namespace quintet
