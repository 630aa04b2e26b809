// C ABI of attention and KV writes: operations of a program, and single calls.
#include "attention.hpp"

#include <algorithm>
#include <memory>
#include <vector>

#include "attention_cut.hpp"
#include "blocks.hpp"
#include "paged.hpp"
#include "require.hpp"
#include "thread_memory.hpp"

namespace qt {
namespace {

// One of attention's two works: scores, if they are a separate work, then the rest.
class AttentionOp final : public Op {
 public:
  AttentionOp(std::shared_ptr<AttentionCut> cut, bool scores) : cut_(std::move(cut)), scores_(scores) {}

  // The first of the two works describes the step for both.
  Work prepare(const Step& step, index_t threads) override {
    if (scores_ || !cut_->may_be_apart()) cut_->describe(step, threads);
    return scores_ ? cut_->scores() : cut_->rest();
  }

 private:
  std::shared_ptr<AttentionCut> cut_;
  bool scores_;
};

class KvWriteOp final : public Op {
 public:
  KvWriteOp(const KvWriteCall& call, index_t group) : call_(call), group_(group) {
    const KvWriteKernels& kernels = QT_CHOOSE(kv_write);
    const auto& of_format = call.kv.dtype == Dtype::int8   ? kernels.write_bytes
                            : call.kv.dtype == Dtype::int4 ? kernels.write_fours
                            : call.kv.dtype == Dtype::fp8  ? kernels.write_eighths
                                                           : kernels.write;
    run_ = of_format[call.layer.dtype];
  }

  Work prepare(const Step& step, index_t) override {
    pieces_.clear();
    for (index_t row = 0; row < step.num_rows; ++row) {
      const index_t begin = step.row_starts[row], end = begin + step.row_counts[row];
      for (index_t position = begin; position < end;) {
        const index_t next = std::min(end, (position / kTileKeys + 1) * kTileKeys);
        const std::int32_t* blocks = blocks_of(step, row, group_);
        pieces_.push_back({blocks, step.row_offsets[row] + position - begin, next - position, position});
        position = next;
      }
    }
    if (call_.layer.rotary > 0) call_.rotation = step.rotations[call_.layer.rope];
    call_.pieces = pieces_.data();
    constexpr index_t kCost = 8;  // per element of q, k and v, in multiplications
    Work work{index_t(pieces_.size()), 1, run_, &call_};
    if (work.count > 0)
      work.each_cost = kCost * step.num_tokens *
                       ((call_.layer.heads + call_.kv.kv_heads) * call_.kv.key_dim + call_.kv.kv_heads * call_.kv.value_dim) /
                       work.count;
    return work;
  }

 private:
  KvWriteCall call_;
  index_t group_;  // cache group
  void (*run_)(const void*, index_t, index_t);
  std::vector<KvWritePiece> pieces_;
};

// Checks the preconditions of the kernels.
void check(const AttentionLayer& layer) {
  QT_REQUIRE(takes(Dtype(layer.kv_dtype), layer.kv_heads, layer.key_width, layer.value_width, layer.block_size,
                   layer.values_in_keys),
             "%lld heads of %lld and %lld numbers in blocks of %lld", (long long)layer.kv_heads, (long long)layer.key_width,
             (long long)layer.value_width, (long long)layer.block_size);
  QT_REQUIRE(layer.heads > 0 && layer.heads % layer.kv_heads == 0, "%lld query heads share %lld KV heads",
             (long long)layer.heads, (long long)layer.kv_heads);
  QT_REQUIRE(layer.dtype >= 0 && layer.dtype <= int(Dtype::fp32) &&
                 (layer.kv_dtype == layer.dtype || layer.kv_dtype == int(Dtype::int8) || layer.kv_dtype == int(Dtype::int4) ||
                  layer.kv_dtype == int(Dtype::fp8)),
             "activations of format %d, a cache of %d", layer.dtype, layer.kv_dtype);
  QT_REQUIRE(layer.kv_dtype == int(Dtype::fp8) || (!layer.key_scales && !layer.value_scales),
             "scales of keys or values for a cache of format %d", layer.kv_dtype);
  for (const float* scales : {layer.key_scales, layer.value_scales})
    for (index_t head = 0; scales && head < layer.kv_heads; ++head)
      QT_REQUIRE(scales[head] > 0.0f, "scale %g of keys or values of head %lld", double(scales[head]), (long long)head);
  QT_REQUIRE(layer.window >= 0 && layer.chunk >= 0 && (layer.window == 0 || layer.chunk == 0), "window %lld, chunk %lld",
             (long long)layer.window, (long long)layer.chunk);
  QT_REQUIRE(layer.rotary >= 0 && layer.rotary % 2 == 0 && layer.rotary_first >= 0 && layer.rope >= 0 &&
                 layer.rotary_first + layer.rotary <= layer.key_width,
             "%lld rotary dimensions from %lld on of %lld, by rotation %lld", (long long)layer.rotary,
             (long long)layer.rotary_first, (long long)layer.key_width, (long long)layer.rope);
  QT_REQUIRE(!layer.values_in_keys || layer.value_scales == layer.key_scales, "scales of values at %p, and of their keys at %p",
             (const void*)layer.value_scales, (const void*)layer.key_scales);
  QT_REQUIRE(!layer.values_in_keys || (layer.value_width <= layer.key_width && !layer.k_norm &&
                                       (layer.rotary == 0 || layer.rotary_first >= layer.value_width)),
             "values of %lld numbers that keys of %lld, rotated from %lld on, begin with", (long long)layer.value_width,
             (long long)layer.key_width, (long long)layer.rotary_first);
  QT_REQUIRE(layer.growth == 0.0f || layer.period > 0, "growth %g by %lld positions after %lld",
             double(layer.growth), (long long)layer.period, (long long)layer.shift);
}

// Returns the cache of a layer at a place; the place's blocks may be larger than the layer needs.
PagedKv paged_at(const KvPlace& place, const AttentionLayer& layer) {
  PagedKv kv = paged(Dtype(layer.kv_dtype), layer.kv_heads, layer.key_width, layer.value_width, layer.block_size,
                     layer.values_in_keys);
  QT_REQUIRE(place.block_bytes >= kv.block_bytes && place.block_bytes % 64 == 0,
             "blocks of %lld bytes for keys and values of %lld", (long long)place.block_bytes, (long long)kv.block_bytes);
  QT_REQUIRE(place.sharer >= 0 && place.sharer < place.sharers, "process %lld of %lld that share blocks",
             (long long)place.sharer, (long long)place.sharers);
  kv.memory = place.memory;
  kv.block_bytes = place.block_bytes;
  return kv;
}

AttentionCut attention_of(Program& program, const AttentionLayer& layer, const void* q, index_t q_stride, const KvPlace* kv,
                         void* out, index_t out_stride, index_t max_tokens) {
  program.reserve(kPartialsBytes);
  return AttentionCut(attention_call(layer, q, q_stride, kv, out, out_stride), kv->group, max_tokens, &program);
}

KvWriteOp kv_write_of(const AttentionLayer& layer, const void* q, index_t q_stride, const void* k, index_t k_stride,
                      const void* v, index_t v_stride, const KvPlace* kv, void* q_out, index_t out_stride) {
  check(layer);
  KvWriteCall call{};
  call.kv = paged_at(*kv, layer);
  call.layer = layer;
  call.sharers = kv->sharers;
  call.sharer = kv->sharer;
  call.q = q;
  call.k = k;
  call.v = v;
  call.q_out = q_out;
  call.q_stride = q_stride;
  call.k_stride = k_stride;
  call.v_stride = v_stride;
  call.out_stride = out_stride;
  QT_REQUIRE(q_stride >= layer.heads * layer.key_width && out_stride >= layer.heads * call.kv.key_dim &&
                 k_stride >= layer.kv_heads * layer.key_width && v_stride >= layer.kv_heads * layer.value_width,
             "strides %lld, %lld, %lld, %lld", (long long)q_stride, (long long)k_stride, (long long)v_stride,
             (long long)out_stride);
  return KvWriteOp(call, kv->group);
}

}  // namespace

AttentionCall attention_call(const AttentionLayer& layer, const void* q, index_t q_stride, const KvPlace* kv, void* out,
                             index_t out_stride) {
  check(layer);
  AttentionCall call{};
  call.kv = paged_at(*kv, layer);
  call.layer = layer;
  call.q = q;
  call.out = out;
  call.q_stride = q_stride;
  call.out_stride = out_stride;
  call.group = layer.heads / layer.kv_heads;
  call.scratch = thread_memory;
  QT_REQUIRE(q_stride >= layer.heads * call.kv.key_dim && out_stride >= layer.heads * layer.value_width, "strides %lld, %lld",
             (long long)q_stride, (long long)out_stride);
  return call;
}

}  // namespace qt

// Returns the bytes of a block of one layer; 0 if the kernels do not support the shape. Supported: key_width up to 576,
// value_width up to 512, block_size a multiple of 16. kv_dtype: the dtype of the activations, int8, int4 or fp8.
// values_in_keys: 0 or 1, see AttentionLayer; not with int4.
QT_EXPORT index_t qt_kv_block_bytes(int kv_dtype, index_t kv_heads, index_t key_width, index_t value_width,
                                    index_t block_size, index_t values_in_keys) {
  if (!qt::takes(qt::Dtype(kv_dtype), kv_heads, key_width, value_width, block_size, values_in_keys)) return 0;
  return qt::paged(qt::Dtype(kv_dtype), kv_heads, key_width, value_width, block_size, values_in_keys).block_bytes;
}

// Returns the padded width of a query head in q_out of qt_program_rope_kv_write.
QT_EXPORT index_t qt_query_width(index_t key_width) { return qt::padded(key_width); }

QT_EXPORT index_t qt_attention_layer_bytes() { return sizeof(qt::AttentionLayer); }

// Returns the scratch bytes of a program's attention, shared by all layers.
QT_EXPORT index_t qt_attention_scratch_bytes() { return qt::kPartialsBytes; }

// For tests: selects VDPBF16PS (where available) for bf16 attention recorded after this call. 0: no, 1: yes, -1: if it is
// faster.
QT_EXPORT void qt_attend_in_pairs(int wanted) { qt::want_pairs(wanted); }

// Appends: RMS norms of query and key heads, rotary embedding, KV write, queries to q_out.
// q: [T][heads][key_width], k: [T][kv_heads][key_width], v: [T][kv_heads][value_width]; strides in elements between tokens. The
// three may be parts of one row or separate arrays.
// q_out: [T][heads][qt_query_width(key_width)], rows out_stride elements apart, padded with zeros after each head. It must not
// overlap the inputs.
QT_EXPORT void qt_program_rope_kv_write(qt::Program* program, const qt::AttentionLayer* layer, const void* q, index_t q_stride,
                                        const void* k, index_t k_stride, const void* v, index_t v_stride,
                                        const qt::KvPlace* kv, void* q_out, index_t out_stride) {
  program->append(std::make_unique<qt::KvWriteOp>(
      qt::kv_write_of(*layer, q, q_stride, k, k_stride, v, v_stride, kv, q_out, out_stride)));
}

// Runs qt_program_rope_kv_write's operation immediately for one step.
QT_EXPORT void qt_write_kv(const qt::Step* step, const qt::AttentionLayer* layer, const void* q, index_t q_stride, const void* k,
                           index_t k_stride, const void* v, index_t v_stride, const qt::KvPlace* kv, void* q_out,
                           index_t out_stride) {
  qt::KvWriteOp op = qt::kv_write_of(*layer, q, q_stride, k, k_stride, v, v_stride, kv, q_out, out_stride);
  const qt::Work work = op.prepare(*step, qt::pool().threads());
  qt::pool().run(&work, 1);
}

// Appends causal attention of the step's tokens over the cached keys of their rows, which include the step's own keys.
// q: the output of qt_program_rope_kv_write. out: [T][heads][value_width]. q_stride, out_stride: elements between tokens.
// max_tokens: the largest step.
QT_EXPORT void qt_program_attention(qt::Program* program, const qt::AttentionLayer* layer, const void* q, index_t q_stride,
                                    const qt::KvPlace* kv, void* out, index_t out_stride, index_t max_tokens) {
  const auto cut = std::make_shared<qt::AttentionCut>(
      qt::attention_of(*program, *layer, q, q_stride, kv, out, out_stride, max_tokens));
  if (cut->may_be_apart()) program->append(std::make_unique<qt::AttentionOp>(cut, true));
  program->append(std::make_unique<qt::AttentionOp>(cut, false));
}

// Runs attention immediately for one step.
QT_EXPORT void qt_attend(const qt::Step* step, const qt::AttentionLayer* layer, const void* q, index_t q_stride,
                         const qt::KvPlace* kv, void* out, index_t out_stride) {
  qt::Program program;  // only for its scratch
  qt::AttentionCut cut = qt::attention_of(program, *layer, q, q_stride, kv, out, out_stride, 0);
  cut.describe(*step, qt::pool().threads());
  const qt::Work works[] = {cut.scores(), cut.rest()};
  qt::pool().run(works, 2);
}
