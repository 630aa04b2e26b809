// Asynchronous copies of a work item's tiles from the paged cache to shared memory, with block table lookup and fp8 conversion.
#pragma once
#include "device.cuh"

#include "attention.cuh"

namespace quintet {

// Ring of buffers in shared memory. Unit 2 t holds the keys of a work item's tile t, unit 2 t + 1 its values. Positions outside
// [begin, end) and elements past the head's end are zero, because 0 times uninitialized memory may be NaN.
//
// A row of a tile is padded by 16 bytes, so that the 8 rows of one matrix load are in different banks. An fp8 tile stays packed
// in the ring. The thread that copied 16 bytes converts them into one of two buffers, so only the converted tile needs a
// barrier.
template <class T, class KV, int DIM, int THREADS>
struct Ring {
  static constexpr bool WIDENS = sizeof(KV) != sizeof(T);
  static constexpr int ROW = DIM * int(sizeof(T)) + 16;
  static constexpr int SOURCE_ROW = WIDENS ? DIM : ROW;
  static constexpr int UNIT = TILE * SOURCE_ROW;
  static constexpr int WIDE = WIDENS ? 2 * TILE * ROW : 0;
  static constexpr int CHUNKS = DIM * int(sizeof(KV)) / 16;  // of 16 bytes in a row
  static_assert(TILE * CHUNKS % THREADS == 0, "every thread copies equally many chunks");
  static_assert(ROW % 128 == 16 || ROW % 128 == 80, "8 consecutive rows begin in 8 different groups of 4 banks");

  // Row and column of this thread's i-th 16 bytes in a unit. If the chunks of a row divide the threads, all its chunks have one
  // column.
  static __device__ __forceinline__ int row_of(int i) {
    if constexpr (THREADS % CHUNKS == 0) return int(threadIdx.x) / CHUNKS + i * (THREADS / CHUNKS);
    return (i * THREADS + int(threadIdx.x)) / CHUNKS;
  }
  static __device__ __forceinline__ int column_of(int i) {
    if constexpr (THREADS % CHUNKS == 0) return int(threadIdx.x) % CHUNKS;
    return (i * THREADS + int(threadIdx.x)) % CHUNKS;
  }

  const Attention& a;
  const WorkItem& item;  // in shared memory
  unsigned char* memory;
  int next = 0, into = 0, from = 0;  // unit to copy next, its stage, stage to use next

  __device__ __forceinline__ Ring(const Attention& a, const WorkItem& item, unsigned char* memory)
      : a(a), item(item), memory(memory) {}

  // Starts the copy of the next unit; past the last unit, commits an empty group, so that groups can be counted. A thread loads
  // all block numbers before its first copy: the compiler moves no load over a copy, so the loads wait for memory only once.
  // Zero-filled copies use the address of another position, to avoid a branch.
  __device__ __forceinline__ void copy() {
    const int begin = item.begin, end = item.end;
    const int first = (begin / TILE + next / 2) * TILE;
    if (first < end) {
      constexpr int COPIES = TILE * CHUNKS / THREADS;
      const int* blocks = item.blocks;
      const int row_bytes = a.head_dim * int(sizeof(KV)), head_bytes = a.block_size * row_bytes;
      const long long block_bytes = a.block_stride * int(sizeof(KV));
      const unsigned char* plane = a.kv + (long long)item.head * head_bytes;
      if (next % 2 != 0) plane += a.plane * int(sizeof(KV));
      unsigned char* unit = memory + WIDE + into * UNIT;
      int number[COPIES], place[COPIES];
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        const int position = max(begin, min(first + row_of(i), end - 1));
        const int block = int(__umulhi(unsigned(position), item.inverse_size));
        place[i] = position - block * a.block_size;
        number[i] = blocks[block];
      }
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        const int position = first + row_of(i), column = column_of(i);
        const bool valid = position >= begin && position < end && column * 16 < row_bytes;
        const unsigned char* source = plane + column * 16 + (long long)place[i] * row_bytes;
        copy_async_16(unit + row_of(i) * SOURCE_ROW + column * 16, source + number[i] * block_bytes, valid);
      }
    }
    copy_async_commit();
    ++next;
    into = into + 1 == a.stages ? 0 : into + 1;
  }

  __device__ __forceinline__ void fill() {
#pragma unroll 1
    for (int i = 0; i + 1 < a.stages; ++i) copy();
  }

  // Waits for the next unit, passes a barrier, starts the next copy into the released stage, and returns the unit's rows of T.
  __device__ __forceinline__ const unsigned char* take() {
    switch (a.stages) {
      case 2: copy_async_wait<0>(); break;
      case 3: copy_async_wait<1>(); break;
      case 4: copy_async_wait<2>(); break;
      case 5: copy_async_wait<3>(); break;
      case 6: copy_async_wait<4>(); break;
      case 7: copy_async_wait<5>(); break;
      default: copy_async_wait<6>(); break;
    }
    const unsigned char* unit = memory + WIDE + from * UNIT;
    if constexpr (WIDENS) {
      unsigned char* buffer = memory + (next - a.stages + 1) % 2 * TILE * ROW;
#pragma unroll
      for (int i = 0; i < TILE * CHUNKS / THREADS; ++i) {
        const int row = row_of(i), column = column_of(i);
        uint4 packed = *reinterpret_cast<const uint4*>(unit + row * SOURCE_ROW + column * 16);
        uint4 low, high;
        low.x = widen_fp8_pair<T>(uint16_t(packed.x & 0xffffu));
        low.y = widen_fp8_pair<T>(uint16_t(packed.x >> 16));
        low.z = widen_fp8_pair<T>(uint16_t(packed.y & 0xffffu));
        low.w = widen_fp8_pair<T>(uint16_t(packed.y >> 16));
        high.x = widen_fp8_pair<T>(uint16_t(packed.z & 0xffffu));
        high.y = widen_fp8_pair<T>(uint16_t(packed.z >> 16));
        high.z = widen_fp8_pair<T>(uint16_t(packed.w & 0xffffu));
        high.w = widen_fp8_pair<T>(uint16_t(packed.w >> 16));
        uint4* to = reinterpret_cast<uint4*>(buffer + row * ROW + column * 32);
        to[0] = low;
        to[1] = high;
      }
      unit = buffer;
    }
    __syncthreads();
    copy();
    from = from + 1 == a.stages ? 0 : from + 1;
    return unit;
  }
};

}  // namespace quintet
