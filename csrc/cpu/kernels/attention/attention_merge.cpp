// Merges the partition states of tensor-parallel attention from shared memory. The order is that of one process
// (attention_partitions.hpp), so the results are bit-identical to it.
//
// A thread owns some heads of a token. Bytes: 4 (value_dim + 2) for each partition and head, written by other cores just before.
// Limiter: cache-line transfers between cores. Independent of batch size.
#include "attention_merge.hpp"

#include "attention_partitions.hpp"

namespace qt::QT_ISA {
namespace {

template <class Element>
void merge_heads(const MergeCall& call, const MergeToken& token, const MergeHeads& heads) {
  const index_t value_dim = call.own.kv.value_dim;
  Group<float> group;
  group.token = token.token;
  group.tokens = 1;
  group.heads = group.rows = heads.count;
  group.total = (float*)call.own.scratch(heads.count * (value_dim + 2) * index_t(sizeof(float)));
  const Partial total = partial_at(group.total, group.rows, value_dim);
  for (index_t i = 0; i < token.partitions; ++i) {
    float* const memory = (float*)token.partials + (i * call.units + heads.unit) * call.partial_floats;
    const Partial unit = partial_at(memory, heads.unit_heads, value_dim);
    const Partial part{unit.sums + heads.inside * value_dim, unit.most + heads.inside, unit.normalizer + heads.inside};
    if (i == 0)
      copy(group.rows, value_dim, part, total);
    else
      merge(group.rows, value_dim, part, total);
  }
  finish<Element>(call.own, group, heads.first, 0, value_dim);
}

template <class Element>
void merge_pieces(const void* description, index_t begin, index_t end) {
  const MergeCall& call = *(const MergeCall*)description;
  for (index_t i = begin; i < end; ++i)
    merge_heads<Element>(call, call.tokens[i / call.num_heads], call.heads[i % call.num_heads]);
}

}  // namespace

const MergeKernels attention_merge = {{merge_pieces<bf16>, merge_pieces<fp16>, merge_pieces<float>}};

}  // namespace qt::QT_ISA
