// Layers with a state: short convolutions, Mamba 1 and 2, the gated delta rule. A row of the step reads its state from the
// first block of its table. It writes the state to the second block, which may be the same one. No row writes a block that
// another row reads. The first row of a request begins with zeros; padding has no tokens and accesses no state.
//
// Ownership: see each kernel. The tokens of a row are scanned in sequence, so results depend neither on the division of a
// request into steps nor on the batch size. The reduction order over a state depends on its size only. Limiter in prefill:
// latency, some hundred instructions per token. Limiter in decode: memory bandwidth, since the state is read once and written
// once. References: executor/backends/cpu/ops/states.py. Products and sums round as in torch, except sums over a state, and the
// last bit of exponentials.
#include "device.cuh"
#include "pointwise.cuh"

namespace quintet {
namespace {

constexpr int THREADS = 128, WARPS = THREADS / WARP_SIZE;
constexpr int TILE = 8;            // tokens per copy of inputs to shared memory
constexpr int WARP_COLUMNS = 8;    // columns of a head per warp; four lanes share the state of a column
constexpr int PARTS = WARP_SIZE / WARP_COLUMNS;
constexpr int COLUMNS = WARPS * WARP_COLUMNS;

__device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

// As in torch: the identity above 20.
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// Values per token, `stride` numbers from one token to the next.
template <class T>
struct Tokens {
  const T* first;
  long long stride;
  __device__ __forceinline__ float get(int token, int i) const { return to_float(first[token * stride + i]); }
};

struct Rows {
  const int *slots, *starts, *counts, *offsets, *table;
  int table_columns;
};

// State addresses of a row. `source` is null at the start of a request.
template <class S>
struct Row {
  int first, count;
  const S* source;
  S* target;

  __device__ __forceinline__ Row(const Rows& rows, int row, S* states, long long block_stride)
      : first(rows.offsets[row]), count(rows.counts[row]), source(nullptr), target(nullptr) {
    if (count == 0) return;
    const int* blocks = rows.table + (long long)rows.slots[row] * rows.table_columns;
    if (rows.starts[row] != 0) source = states + blocks[0] * block_stride;
    target = states + blocks[1] * block_stride;
  }
};

// Short convolution. A thread owns a channel of a token: reads `taps` inputs, writes one output. Inputs before the row's first
// token are in the state.
template <class T>
__device__ __forceinline__ void causal_conv(
    const Tokens<T>& x, T* out, const float* weight, const float* bias, T* states, long long block_stride, const Rows& rows,
    const int* token_rows, int channels, int taps, int has_silu) {
  const int token = blockIdx.x, channel = blockIdx.y * THREADS + threadIdx.x, owner = token_rows[token];
  if (channel >= channels) return;
  T* to = out + (long long)token * channels + channel;
  if (owner < 0) {
    *to = from_float<T>(0.0f);
    return;
  }
  const Row<T> row(rows, owner, states, block_stride);
  float sum = bias ? bias[channel] : 0.0f;
  for (int tap = 0; tap < taps; ++tap) {
    const int within = token - row.first - (taps - 1) + tap;
    float input = 0.0f;
    if (within >= 0)
      input = x.get(row.first + within, channel);
    else if (row.source != nullptr)
      input = to_float(row.source[(long long)(taps - 1 + within) * channels + channel]);
    sum = sum + weight[(long long)tap * channels + channel] * input;
  }
  sum = rounded<T>(sum);
  *to = from_float<T>(has_silu ? silu(sum) : sum);
}

// Stores the row's newest inputs as its state. A thread owns a channel of a row. Runs after `causal_conv`, which reads the old
// state. Inputs are moved in ascending order: the source of a move is at the destination or behind it, so no input is
// overwritten before it is read.
template <class T>
__device__ __forceinline__ void keep_inputs(
    const Tokens<T>& x, T* states, long long block_stride, const Rows& rows, int channels, int taps) {
  const int channel = blockIdx.x * THREADS + threadIdx.x;
  const Row<T> row(rows, blockIdx.y, states, block_stride);
  if (channel >= channels || row.count == 0) return;
  for (int line = 0; line < taps - 1; ++line) {
    const int within = row.count - (taps - 1) + line;
    T input = from_float<T>(0.0f);
    if (within >= 0)
      input = x.first[(row.first + within) * x.stride + channel];
    else if (row.source != nullptr)
      input = row.source[(long long)(taps - 1 + within) * channels + channel];
    row.target[(long long)line * channels + channel] = input;
  }
}

// Mamba. A thread owns a channel of a row and its state of `size` numbers; state and factors are in shared memory.
template <class T>
__device__ __forceinline__ void selective_scan(
    float* shared, const Tokens<T>& x, const Tokens<T>& dt, const Tokens<T>& b, const Tokens<T>& c, const Tokens<T>& gate,
    T* out, const float* a, const float* dt_bias, const float* skip, float* states, long long block_stride, const Rows& rows,
    int channels, int size) {
  const Row<float> row(rows, blockIdx.y, states, block_stride);
  if (row.count == 0) return;
  const int thread = threadIdx.x, channel = blockIdx.x * THREADS + thread;
  const bool there = channel < channels;
  float *state = shared + thread, *fading = state + size * THREADS;           // [size][THREADS] each
  float *written = shared + 2 * size * THREADS, *read = written + TILE * size;  // [TILE][size] each
  for (int n = 0; there && n < size; ++n) {
    state[n * THREADS] = row.source ? row.source[(long long)n * channels + channel] : 0.0f;
    fading[n * THREADS] = a[(long long)n * channels + channel];
  }
  const float bias = there ? dt_bias[channel] : 0.0f, direct = there ? skip[channel] : 0.0f;
  for (int begin = 0; begin < row.count; begin += TILE) {
    const int tokens = row.count - begin < TILE ? row.count - begin : TILE, first = row.first + begin;
    __syncthreads();  // all threads have finished the previous tile
    for (int i = thread; i < tokens * size; i += THREADS) {
      written[i] = b.get(first + i / size, i % size);
      read[i] = c.get(first + i / size, i % size);
    }
    __syncthreads();
    for (int t = 0; there && t < tokens; ++t) {
      const float input = x.get(first + t, channel), width = softplus(dt.get(first + t, channel) + bias);
      const float added = width * input;
      float y = 0.0f;
      for (int n = 0; n < size; ++n) {
        const float next = state[n * THREADS] * expf(width * fading[n * THREADS]) + added * written[t * size + n];
        state[n * THREADS] = next;
        y = fmaf(next, read[t * size + n], y);
      }
      y = (y + direct * input) * silu(gate.get(first + t, channel));
      out[(long long)(first + t) * channels + channel] = from_float<T>(y);
    }
  }
  for (int n = 0; there && n < size; ++n) row.target[(long long)n * channels + channel] = state[n * THREADS];
}

// Decay of the state for a token, and factor of its values.
struct Step {
  float decay, factor;
};

// State of a head: a matrix `[size, head_dim]`. A block owns 32 columns of a head of a row, a warp owns eight of them. Lane l
// owns column l % 8 and the numbers l / 8, l / 8 + 4 ... of its state. The state is in shared memory; four numbers of a warp's
// columns form a line of 32. Reduction order of a column: each lane's numbers ascending, then a butterfly over the four lanes.
template <class T>
struct HeadState {
  float* numbers;                  // of this lane, WARP_SIZE apart
  float *written, *read, *inputs;  // [TILE][size], [TILE][size], [TILE][COLUMNS]
  Step* steps;                     // [TILE]
  int size, width, lane, part, column, in_block;

  __device__ __forceinline__ HeadState(float* shared, int size, int head_dim)
      : size(size), lane(threadIdx.x % WARP_SIZE), part(lane / WARP_COLUMNS) {
    const int warp = threadIdx.x / WARP_SIZE, lines = divide_up(size, PARTS);
    const int tiles = divide_up(head_dim, COLUMNS);
    in_block = warp * WARP_COLUMNS + lane % WARP_COLUMNS;
    column = int(blockIdx.x) % tiles * COLUMNS + in_block;
    width = head_dim;
    numbers = shared + warp * lines * WARP_SIZE + lane;
    written = shared + WARPS * lines * WARP_SIZE;
    read = written + TILE * size;
    inputs = read + TILE * size;
    steps = reinterpret_cast<Step*>(inputs + TILE * COLUMNS);
  }
  __device__ __forceinline__ bool there() const { return column < width; }

  __device__ __forceinline__ void load(const float* from) {
    for (int n = part, i = 0; n < size; n += PARTS, i += WARP_SIZE)
      numbers[i] = from != nullptr && there() ? from[(long long)n * width + column] : 0.0f;
  }
  __device__ __forceinline__ void store(float* to) const {
    for (int n = part, i = 0; there() && n < size; n += PARTS, i += WARP_SIZE) to[(long long)n * width + column] = numbers[i];
  }
  __device__ __forceinline__ static float over_parts(float sum) {
    for (int step = WARP_COLUMNS; step < WARP_SIZE; step *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    return sum;
  }
  // Copies the inputs of a tile to shared memory; the caller places the barriers.
  __device__ __forceinline__ void bring(
      const Tokens<T>& x, const Tokens<T>& w, const Tokens<T>& r, int first, int tokens, int head, int group) {
    for (int i = threadIdx.x; i < tokens * size; i += THREADS) {
      written[i] = w.get(first + i / size, group * size + i % size);
      read[i] = r.get(first + i / size, group * size + i % size);
    }
    for (int i = threadIdx.x; i < tokens * COLUMNS; i += THREADS) {
      const int at = column - in_block + i % COLUMNS;
      inputs[i] = at < width ? x.get(first + i / COLUMNS, head * width + at) : 0.0f;
    }
  }
};

// Mamba 2.
template <class T>
__device__ __forceinline__ void head_scan(
    float* shared, const Tokens<T>& x, const Tokens<T>& dt, const Tokens<T>& b, const Tokens<T>& c, const Tokens<T>& gate,
    T* out, const float* a, const float* dt_bias, const float* skip, float least, float most, float* states,
    long long block_stride, const Rows& rows, int heads, int groups, int size, int head_dim) {
  const Row<float> row(rows, blockIdx.y, states, block_stride);
  if (row.count == 0) return;
  HeadState<T> state(shared, size, head_dim);
  const int head = int(blockIdx.x) / divide_up(head_dim, COLUMNS);
  const long long matrix = (long long)head * size * head_dim;
  state.load(row.source ? row.source + matrix : nullptr);
  for (int begin = 0; begin < row.count; begin += TILE) {
    const int tokens = row.count - begin < TILE ? row.count - begin : TILE, first = row.first + begin;
    __syncthreads();  // all threads have finished the previous tile
    state.bring(x, b, c, first, tokens, head, head / (heads / groups));
    if (int(threadIdx.x) < tokens) {
      const float d = fminf(fmaxf(softplus(dt.get(first + threadIdx.x, head) + dt_bias[head]), least), most);
      state.steps[threadIdx.x] = {expf(d * a[head]), d};
    }
    __syncthreads();
    for (int t = 0; t < tokens; ++t) {
      const Step step = state.steps[t];
      const float input = state.inputs[t * COLUMNS + state.in_block], added = step.factor * input;
      float y = 0.0f;
      for (int n = state.part, i = 0; n < size; n += PARTS, i += WARP_SIZE) {
        const float next = state.numbers[i] * step.decay + state.written[t * size + n] * added;
        state.numbers[i] = next;
        y = fmaf(next, state.read[t * size + n], y);
      }
      y = HeadState<T>::over_parts(y) + skip[head] * input;
      if (state.part != 0 || !state.there()) continue;
      const int at = head * head_dim + state.column;
      if (gate.first != nullptr) y = y * silu(gate.get(first + t, at));
      out[(long long)(first + t) * heads * head_dim + at] = from_float<T>(y);
    }
  }
  state.store(row.target + matrix);
}

// Gated delta rule; a state has a line for each number of a key. Queries and keys are normalized to unit length.
template <class T>
__device__ __forceinline__ void delta_rule(
    float* shared, const Tokens<T>& q, const Tokens<T>& k, const Tokens<T>& v, const Tokens<T>& alpha, const Tokens<T>& beta,
    T* out, const float* a, const float* dt_bias, float* states, long long block_stride, const Rows& rows, int heads,
    int key_heads, int size, int head_dim) {
  const Row<float> row(rows, blockIdx.y, states, block_stride);
  if (row.count == 0) return;
  HeadState<T> state(shared, size, head_dim);
  const int head = int(blockIdx.x) / divide_up(head_dim, COLUMNS);
  const long long matrix = (long long)head * size * head_dim;
  const float shrink = rsqrtf(float(size));
  state.load(row.source ? row.source + matrix : nullptr);
  for (int begin = 0; begin < row.count; begin += TILE) {
    const int tokens = row.count - begin < TILE ? row.count - begin : TILE, first = row.first + begin;
    __syncthreads();  // all threads have finished the previous tile
    state.bring(v, k, q, first, tokens, head, head / (heads / key_heads));
    if (int(threadIdx.x) < tokens) {
      const float width = softplus(alpha.get(first + threadIdx.x, head) + dt_bias[head]);
      state.steps[threadIdx.x] = {expf(a[head] * width), sigmoid(beta.get(first + threadIdx.x, head))};
    }
    __syncthreads();
    for (int i = threadIdx.x / WARP_SIZE; i < 2 * tokens; i += WARPS) {  // one vector of a token per warp
      float *vector = state.written + i * size, squares = 0.0f;
      if (i >= tokens) vector = state.read + (i - tokens) * size;
      for (int n = state.lane; n < size; n += WARP_SIZE) squares = fmaf(vector[n], vector[n], squares);
      const float scale = rsqrtf(warp_sum(squares) + 1e-6f);
      for (int n = state.lane; n < size; n += WARP_SIZE) vector[n] *= scale;
    }
    __syncthreads();
    for (int t = 0; t < tokens; ++t) {
      const Step step = state.steps[t];
      float said = 0.0f;
      for (int n = state.part, i = 0; n < size; n += PARTS, i += WARP_SIZE)
        said = fmaf(state.numbers[i] * step.decay, state.written[t * size + n], said);
      said = HeadState<T>::over_parts(said);
      const float correction = (state.inputs[t * COLUMNS + state.in_block] - said) * step.factor;
      float y = 0.0f;
      for (int n = state.part, i = 0; n < size; n += PARTS, i += WARP_SIZE) {
        const float next = state.numbers[i] * step.decay + state.written[t * size + n] * correction;
        state.numbers[i] = next;
        y = fmaf(next, state.read[t * size + n], y);
      }
      y = HeadState<T>::over_parts(y) * shrink;
      if (state.part == 0 && state.there())
        out[(long long)(first + t) * heads * head_dim + head * head_dim + state.column] = from_float<T>(y);
    }
  }
  state.store(row.target + matrix);
}

}  // namespace
}  // namespace quintet

using namespace quintet;

// Inputs: [tokens, width], strides in numbers from one token to the next. out: contiguous. states: all blocks, block_stride
// numbers apart. table: [slots, table_columns]; the first two entries are the blocks that a row reads and writes. Parameters
// are float: weight [taps, channels], a [size, channels] or [heads], others [channels] or [heads].
#define QT_ROWS const int *slots, const int *starts, const int *counts, const int *offsets, const int *table, int table_columns
#define QT_THE_ROWS \
  Rows { slots, starts, counts, offsets, table, table_columns }

// Grids: (tokens, channels / 128), (channels / 128, rows), (channels / 128, rows), (heads * head_dim / 32, rows) twice; all
// rounded up, head_dim / 32 for each head. Dynamic shared memory: see executor/backends/cuda/ops/states.py.
#define QT_STATES(SUFFIX, T)                                                                                              \
  QT_KERNEL(THREADS, causal_conv_##SUFFIX,                                                                                \
            (const T* x, long long x_stride, T* out, const float* weight, const float* bias, T* states,                   \
             long long block_stride, QT_ROWS, const int* token_rows, int channels, int taps, int has_silu)) {             \
    causal_conv<T>({x, x_stride}, out, weight, bias, states, block_stride, QT_THE_ROWS, token_rows, channels, taps,       \
                   has_silu);                                                                                             \
  }                                                                                                                       \
  QT_KERNEL(THREADS, keep_inputs_##SUFFIX,                                                                                \
            (const T* x, long long x_stride, T* states, long long block_stride, QT_ROWS, int channels, int taps)) {       \
    keep_inputs<T>({x, x_stride}, states, block_stride, QT_THE_ROWS, channels, taps);                                     \
  }                                                                                                                       \
  QT_KERNEL(THREADS, selective_scan_##SUFFIX,                                                                             \
            (const T* x, long long x_stride, const T* dt, long long dt_stride, const T* b, long long b_stride, const T* c, \
             long long c_stride, const T* gate, long long gate_stride, T* out, const float* a, const float* dt_bias,      \
             const float* skip, float* states, long long block_stride, QT_ROWS, int channels, int size)) {                \
    QT_DYNAMIC_SHARED(shared);                                                                                            \
    selective_scan<T>(reinterpret_cast<float*>(shared), {x, x_stride}, {dt, dt_stride}, {b, b_stride}, {c, c_stride},     \
                      {gate, gate_stride}, out, a, dt_bias, skip, states, block_stride, QT_THE_ROWS, channels, size);     \
  }                                                                                                                       \
  QT_KERNEL(THREADS, head_scan_##SUFFIX,                                                                                  \
            (const T* x, long long x_stride, const T* dt, long long dt_stride, const T* b, long long b_stride, const T* c, \
             long long c_stride, const T* gate, long long gate_stride, T* out, const float* a, const float* dt_bias,      \
             const float* skip, float least, float most, float* states, long long block_stride, QT_ROWS, int heads,       \
             int groups, int size, int head_dim)) {                                                                       \
    QT_DYNAMIC_SHARED(shared);                                                                                            \
    head_scan<T>(reinterpret_cast<float*>(shared), {x, x_stride}, {dt, dt_stride}, {b, b_stride}, {c, c_stride},          \
                 {gate, gate_stride}, out, a, dt_bias, skip, least, most, states, block_stride, QT_THE_ROWS, heads,       \
                 groups, size, head_dim);                                                                                 \
  }                                                                                                                       \
  QT_KERNEL(THREADS, delta_rule_##SUFFIX,                                                                                 \
            (const T* q, long long q_stride, const T* k, long long k_stride, const T* v, long long v_stride,              \
             const T* alpha, long long alpha_stride, const T* beta, long long beta_stride, T* out, const float* a,        \
             const float* dt_bias, float* states, long long block_stride, QT_ROWS, int heads, int key_heads, int size,    \
             int head_dim)) {                                                                                             \
    QT_DYNAMIC_SHARED(shared);                                                                                            \
    delta_rule<T>(reinterpret_cast<float*>(shared), {q, q_stride}, {k, k_stride}, {v, v_stride}, {alpha, alpha_stride},   \
                  {beta, beta_stride}, out, a, dt_bias, states, block_stride, QT_THE_ROWS, heads, key_heads, size,        \
                  head_dim);                                                                                              \
  }

QT_STATES(bf16, bf16)
QT_STATES(fp16, fp16)
QT_STATES(fp32, float)
