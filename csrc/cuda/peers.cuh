// How blocks of kernels on several devices exchange what they have: over memory of each device that all others can reach.
//
// Each rank has a mailbox, of which it knows all ranks' addresses:
//
//     | flags [CHANNELS][MAX_RANKS] | channel 0: half 0, half 1 | channel 1: half 0, half 1 | …
//
// A block is a channel, and meets no block but those of the other ranks that have its number. What it exchanges it writes into a
// half of its own rank's mailbox; then it sets a flag in all ranks' mailboxes, waits until all have set its own, and reads
// theirs. Halves take turns. A flag is the count of the channel's exchanges, so it is never taken back; the count lies in the
// device's memory, since a launch may be replayed from a graph.
//
// One meeting is enough: a rank that writes a half again, two exchanges later, has met all others in between. Each came to
// that meeting after its own reading of the half. That holds from launch to launch too, whatever their sizes are, because a
// channel's halves are its own.
//
// All ranks launch the same kernels of the same grids in the same order, of at most CHANNELS blocks, which run at once on every
// device. A wait that lasts longer than the host allows ends, with a word for the host: what was computed is then worthless, and
// no wait after it lasts.
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
  // mailboxes: [N] addresses, in the order of the ranks; counts: [1 + CHANNELS], whether a wait was too long, then exchanges so
  // far; alarm: the first of these again, for the host.
  __device__ __forceinline__ Channel(const long long* mailboxes, int rank, unsigned* counts, unsigned* alarm,
                                     long long timeout_ns)
      : table_(mailboxes), rank_(rank), counts_(counts), alarm_(alarm), timeout_ns_(timeout_ns), count_(counts[1 + blockIdx.x]) {
#pragma unroll
    for (int i = 0; i < N; ++i) mailboxes_[i] = reinterpret_cast<unsigned char*>(mailboxes[i]);
  }

  // Begin an exchange; return where this rank's part of it goes, HALF_BYTES.
  __device__ __forceinline__ unsigned char* begin() {
    ++count_;
    return half(reinterpret_cast<unsigned char*>(table_[rank_]));
  }

  // Wait until all ranks' parts have arrived: every thread of the block, after writing its own.
  __device__ __forceinline__ void meet() {
    __syncthreads();
    if (threadIdx.x < WARP_SIZE) {
      const int other = threadIdx.x;
      if (other < N) store_release_system(flag(other, rank_), count_);
      __syncwarp();  // all flags are set before one waits
      if (other < N) wait_for(flag(rank_, other));
    }
    __syncthreads();
  }

  // A rank's part of the exchange: `rank` is a constant, or mailboxes go to local memory.
  __device__ __forceinline__ const unsigned char* part(int rank) const { return half(mailboxes_[rank]); }

  // Behind the last exchange of a launch, of which there was one.
  __device__ __forceinline__ void end() {
    if (threadIdx.x == 0) counts_[1 + blockIdx.x] = count_;
  }

 private:
  __device__ __forceinline__ unsigned char* half(unsigned char* mailbox) const {
    return mailbox + FLAGS_BYTES + (2 * blockIdx.x + (count_ & 1u)) * HALF_BYTES;
  }

  // The flag in a rank's mailbox that another rank sets.
  __device__ __forceinline__ unsigned* flag(int rank, int of) const {
    return reinterpret_cast<unsigned*>(table_[rank]) + blockIdx.x * MAX_RANKS + of;
  }

  // Counts wrap; one rank is never more than one exchange ahead of another.
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
