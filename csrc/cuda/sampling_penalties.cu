// Repetition, presence and frequency penalties, in place on rows of fp32 logits; defined by
// quintet.executor.sampling.penalties. Counts are recomputed in each step from the token table.
//
// Ownership: a block owns 8192 adjacent ids of one row. It reads all tokens of the row, counts its own ids in shared memory,
// and updates their logits. One thread updates each logit once: repetition, then count * frequency with one rounding, then
// presence. Bytes: 4 per token and block, from L2 for all blocks but the first. Limiter: reads of the tokens, and latency.
// Counts are integers, so their order does not matter. A row's logits depend on its tokens only, not on the batch size.
#include "device.cuh"

namespace quintet {

constexpr int PENALTY_THREADS = 256;
constexpr int PENALTY_IDS = 8192;  // per block; must match quintet.executor.backends.cuda.ops.penalties

// Parameters of one row, in the layout of quintet.executor.backends.cuda.ops.penalties.
struct Penalized {
  int row;         // of the logits
  int slot;        // of the token table
  int length;      // number of tokens
  int num_prompt;  // number of prompt tokens among them
  float repetition;
  float presence;
  float frequency;
  int num_embedded;  // leading prompt positions with embeddings instead of tokens
};
static_assert(sizeof(Penalized) == 32, "eight words a row");

}  // namespace quintet

using namespace quintet;

QT_KERNEL(PENALTY_THREADS, penalize,
          (float* logits, long long stride, int vocab_size, const int* token_ids, long long token_stride,
           const Penalized* penalized)) {
  constexpr int OCCURS = 1 << 30;  // set for tokens of the prompt; lower bits: count in the output
  __shared__ int counts[PENALTY_IDS];
  const Penalized mine = penalized[blockIdx.y];
  if (mine.slot < 0) return;
  const int begin = int(blockIdx.x) * PENALTY_IDS;
  const unsigned size = unsigned(vocab_size - begin < PENALTY_IDS ? vocab_size - begin : PENALTY_IDS);
  const int thread = int(threadIdx.x);
  const int* tokens = token_ids + mine.slot * token_stride;

  for (unsigned i = thread; i < size; i += PENALTY_THREADS) counts[i] = 0;
  __syncthreads();
  if (mine.repetition != 1.0f) {
    for (int i = mine.num_embedded + thread; i < mine.num_prompt; i += PENALTY_THREADS) {
      const unsigned id = unsigned(tokens[i] - begin);
      if (id < size) counts[id] = OCCURS;  // threads with the same id write the same value
    }
  }
  __syncthreads();
  for (int i = mine.num_prompt + thread; i < mine.length; i += PENALTY_THREADS) {
    const unsigned id = unsigned(tokens[i] - begin);
    if (id < size) atomicAdd(&counts[id], 1);
  }
  __syncthreads();

  float* row = logits + mine.row * stride + begin;
  for (unsigned i = thread; i < size; i += PENALTY_THREADS) {
    const int count = counts[i];
    if (count == 0) continue;
    float x = row[i];
    if (mine.repetition != 1.0f) x = x > 0.0f ? x / mine.repetition : x * mine.repetition;
    const int num_output = count & (OCCURS - 1);
    if (num_output > 0) x = fmaf(-mine.frequency, float(num_output), x) - mine.presence;
    row[i] = x;
  }
}
