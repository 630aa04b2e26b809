// Copies of KV blocks, in all layers at once: within the device's memory (copy-on-write), or between it and a pool in
// page-locked host memory, which the device reads and writes over the bus without a copy engine (swap).
//
// A thread owns the same 16 bytes of every block of one plane (keys or values) of one layer, and copies them pair after
// pair: so copies apply in the order of the pairs even where one's target is a later one's source or target, and no
// thread waits for another. 32 bytes move per thread and pair. Limiter: bandwidth, of memory or of the bus, as long as
// layers x 2 x block bytes are some megabytes; then one pair in flight per thread fills it.
#include "device.cuh"

namespace quintet {
namespace {

__device__ __forceinline__ uint4* plane_of(const long long* layers, int index, long long plane_bytes) {
  return reinterpret_cast<uint4*>(layers[index / 2] + (index % 2) * plane_bytes);
}

}  // namespace
}  // namespace quintet

using namespace quintet;

// sources, targets: the address of each layer's memory, [2, blocks, block_bytes]; pairs: [num_pairs, 2], from and to.
QT_KERNEL(256, copy_blocks,
          (const long long* sources, long long source_plane_bytes, const long long* targets,
           long long target_plane_bytes, const int* pairs, int num_pairs, long long block_bytes)) {
  const int quads = static_cast<int>(block_bytes / 16);  // of a block
  const int quad = blockIdx.x * blockDim.x + threadIdx.x;
  if (quad >= quads) return;
  const uint4* from = plane_of(sources, blockIdx.y, source_plane_bytes) + quad;
  uint4* to = plane_of(targets, blockIdx.y, target_plane_bytes) + quad;
  for (int i = 0; i < num_pairs; i++) {
    to[static_cast<long long>(pairs[2 * i + 1]) * quads] = from[static_cast<long long>(pairs[2 * i]) * quads];
  }
}
