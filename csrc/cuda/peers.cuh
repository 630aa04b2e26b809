// Exchange between blocks of kernels on several devices, over device memory that all peers can access.
//
// Each rank has a mailbox; all ranks know all addresses:
//
//     | flags [CHANNELS][MAX_RANKS] | channel 0: half 0, half 1 | channel 1: half 0, half 1 | …
//
// A block is a channel. It exchanges data only with the blocks of the same index on the other ranks. It writes its data to a
// half of its own rank's mailbox and sets a flag in the mailboxes of all ranks. Then it waits for the flags of all ranks and
// reads their data. Exchanges alternate between the halves. A flag is the channel's exchange count, so it is never reset. The
// count is in device memory, since a launch may be replayed from a graph.
//
// One barrier per exchange suffices. A rank rewrites a half two exchanges later; in between it has met all other ranks. Each of
// them arrived at that barrier after it had read the half. This also holds across launches of different sizes, because each
// channel has its own halves.
//
// All ranks launch the same kernels with the same grids in the same order, with at most CHANNELS blocks that run concurrently
// on every device. A wait beyond the host's limit ends and notifies the host. Results are then invalid, and later waits return
// immediately.
#pragma once

namespace quintet {

constexpr int MAX_RANKS = 8;
constexpr int CHANNELS = 64;
constexpr int HALF_BYTES = 32 << 10;
constexpr int FLAGS_BYTES = CHANNELS * MAX_RANKS * int(sizeof(unsigned));

// This block's channel among N ranks.
template <int N>
class Channel {
  static_assert(2 <= N && N <= MAX_RANKS, "a flag for each rank");

 public:
  // mailboxes: [N] addresses, in rank order; counts: [1 + CHANNELS], timeout flag, then exchanges so far; alarm: copy of the
  // timeout flag for the host.
  __device__ __forceinline__ Channel(const long long* mailboxes, int rank, unsigned* counts, unsigned* alarm,
                                     long long timeout_ns)
      : table_(mailboxes), rank_(rank), counts_(counts), alarm_(alarm), timeout_ns_(timeout_ns), count_(counts[1 + blockIdx.x]) {
#pragma unroll
    for (int i = 0; i < N; ++i) mailboxes_[i] = reinterpret_cast<unsigned char*>(mailboxes[i]);
  }

  // Begins an exchange; returns the destination of this rank's data, HALF_BYTES.
  __device__ __forceinline__ unsigned char* begin() {
    ++count_;
    return half(reinterpret_cast<unsigned char*>(table_[rank_]));
  }

  // Barrier: waits until the data of all ranks have arrived. All threads of the block call it after their writes.
  __device__ __forceinline__ void meet() {
    __syncthreads();
    if (threadIdx.x < WARP_SIZE) {
      const int other = threadIdx.x;
      if (other < N) store_release_system(flag(other, rank_), count_);
      __syncwarp();  // all flags are set before a lane waits
      if (other < N) wait_for(flag(rank_, other));
    }
    __syncthreads();
  }

  // Data of a rank. `rank` must be a compile-time constant; otherwise the addresses are in local memory.
  __device__ __forceinline__ const unsigned char* part(int rank) const { return half(mailboxes_[rank]); }

  // Stores the count after the last exchange of a launch. The launch must have at least one exchange.
  __device__ __forceinline__ void end() {
    if (threadIdx.x == 0) counts_[1 + blockIdx.x] = count_;
  }

 private:
  __device__ __forceinline__ unsigned char* half(unsigned char* mailbox) const {
    return mailbox + FLAGS_BYTES + (2 * blockIdx.x + (count_ & 1u)) * HALF_BYTES;
  }

  // Flag in a rank's mailbox, set by rank `of`.
  __device__ __forceinline__ unsigned* flag(int rank, int of) const {
    return reinterpret_cast<unsigned*>(table_[rank]) + blockIdx.x * MAX_RANKS + of;
  }

  // Counts wrap around; ranks differ by at most one exchange.
  __device__ __forceinline__ bool is_there(const unsigned* flag) const { return int(load_acquire_system(flag) - count_) >= 0; }

  __device__ __forceinline__ void wait_for(const unsigned* flag) {
    if (is_there(flag)) return;
    const long long begun = device_time_ns();
    while (!is_there(flag)) {
      if (load_acquire_system(counts_) != 0u) return;
      if (device_time_ns() - begun > timeout_ns_) {
        store_release_system(counts_, 1u);
        store_release_system(alarm_, 1u);
        return;
      }
      look_away();
    }
  }

  const long long* const table_;
  unsigned char* mailboxes_[N];
  const int rank_;
  unsigned* counts_;
  unsigned* alarm_;
  const long long timeout_ns_;
  unsigned count_;
};

}  // namespace quintet
