// Copies of KV blocks for all layers: within device memory (copy-on-write), or to and from a pool in page-locked host memory
// (swap). The device accesses host memory over the bus without a copy engine.
//
// Ownership: a thread owns the same 16 bytes of every KV block at one place (`quintet.wire.kv_spec`) and copies them pair by
// pair. So copies apply in the order of the pairs, even if a target is a later source or target. No thread waits for another.
// Bytes: 32 per thread and pair. Limiter: bandwidth of memory or bus, if places x block bytes are some megabytes; one pair in
// flight per thread then saturates it. There is no reduction; results are independent of the batch size.
#include "device.cuh"

using namespace quintet;

// sources, targets: the address of each place's memory, [blocks, block_bytes]; pairs: [num_pairs, 2], source and target.
QT_KERNEL(256, copy_blocks,
          (const long long* sources, const long long* targets, const int* pairs, int num_pairs, long long block_bytes)) {
  const int quads = static_cast<int>(block_bytes / 16);  // of a KV block
  const int quad = blockIdx.x * blockDim.x + threadIdx.x;
  if (quad >= quads) return;
  const uint4* from = reinterpret_cast<const uint4*>(sources[blockIdx.y]) + quad;
  uint4* to = reinterpret_cast<uint4*>(targets[blockIdx.y]) + quad;
  for (int i = 0; i < num_pairs; i++) {
    to[static_cast<long long>(pairs[2 * i + 1]) * quads] = from[static_cast<long long>(pairs[2 * i]) * quads];
  }
}
