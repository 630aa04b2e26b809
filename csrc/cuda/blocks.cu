// Copies of KV blocks, all places of a block at once: within the device's memory (copy-on-write), or between it and a pool in
// page-locked host memory, which the device reads and writes over the bus without a copy engine (swap).
//
// A thread owns the same 16 bytes of every block at one place (`quintet.wire.kv_spec`), and copies them pair after
// pair: so copies apply in the order of the pairs even where one's target is a later one's source or target, and no
// thread waits for another. 32 bytes move per thread and pair. Limiter: bandwidth, of memory or of the bus, as long as
// places x block bytes are some megabytes; then one pair in flight per thread fills it.
// Nothing is reduced: no result depends on the batch size.
#include "device.cuh"

using namespace quintet;

// sources, targets: the address of each place's memory, [blocks, block_bytes]; pairs: [num_pairs, 2], from and to.
QT_KERNEL(256, copy_blocks,
          (const long long* sources, const long long* targets, const int* pairs, int num_pairs, long long block_bytes)) {
  const int quads = static_cast<int>(block_bytes / 16);  // of a block
  const int quad = blockIdx.x * blockDim.x + threadIdx.x;
  if (quad >= quads) return;
  const uint4* from = reinterpret_cast<const uint4*>(sources[blockIdx.y]) + quad;
  uint4* to = reinterpret_cast<uint4*>(targets[blockIdx.y]) + quad;
  for (int i = 0; i < num_pairs; i++) {
    to[static_cast<long long>(pairs[2 * i + 1]) * quads] = from[static_cast<long long>(pairs[2 * i]) * quads];
  }
}
