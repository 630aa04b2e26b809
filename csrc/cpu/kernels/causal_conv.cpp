// Causal convolution over the last few tokens, for each channel separately.
//
// A thread owns a row and a range of channels. It walks the tokens with the last inputs of one vector of channels in registers.
// Bytes: 4 to 8 per element (each input read once, each output written once), 2 FLOPs a tap. Limiter: cache bandwidth. Reduction
// order: the bias, then inputs from oldest to newest, fused. Independent of batch size.
#include "simd.hpp"
#include "states.hpp"

namespace qt::QT_ISA {
namespace {

QT_INLINE f32v silu(f32v x) { return x / (all(1.0f) + exponential(-x)); }

// `count` channels from `channel` on, for all tokens of the row. Taps = 0: the number of taps is a runtime value.
template <class Element, int Taps>
void convolve(const CausalConvCall& c, const StateRow& row, index_t channel, index_t count) {
  const index_t taps = Taps ? Taps : c.taps, old = taps - 1;
  f32v weight[Taps ? Taps : kMaxTaps], input[Taps ? Taps : kMaxTaps];  // input[j] is multiplied by weight[j]
  for (index_t j = 0; j < taps; ++j) weight[j] = load(c.weight + j * c.channels + channel, count);
  const Element* from = row.from ? (const Element*)(row.from + c.offset) + channel : nullptr;
  for (index_t j = 0; j < old; ++j) input[j] = from ? load(from + j * c.channels, count) : all(0.0f);
  const f32v bias = c.bias ? load(c.bias + channel, count) : all(0.0f);
  const Element* x = (const Element*)c.x.numbers + row.token * c.x.stride + channel;
  Element* y = (Element*)c.y.numbers + row.token * c.y.stride + channel;
  for (index_t t = 0; t < row.count; ++t, x += c.x.stride, y += c.y.stride) {
    input[old] = load(x, count);
    f32v sum = bias;
    for (index_t j = 0; j < taps; ++j) sum = fma(weight[j], input[j], sum);
    store(y, c.silu ? silu(rounded_to<Element>(sum)) : sum, count);
    for (index_t j = 0; j < old; ++j) input[j] = input[j + 1];
  }
  Element* to = (Element*)(row.to + c.offset) + channel;
  for (index_t j = 0; j < old; ++j) store(to + j * c.channels, input[j], count);
}

// Prefetches a run of memory. The runs of a piece are many and short, so the hardware prefetcher would start anew on each.
QT_INLINE void fetch(const void* from, index_t bytes) {
  for (index_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char*)from + at);
}

// Prefetches the state and the weights of a piece.
template <class Element>
QT_INLINE void fetch_piece(const CausalConvCall& c, const StateRow& row, index_t first, index_t columns) {
  for (index_t j = 0; j < c.taps; ++j) {
    if (row.from && j + 1 < c.taps)
      fetch((const Element*)(row.from + c.offset) + j * c.channels + first, columns * index_t(sizeof(Element)));
    fetch(c.weight + j * c.channels + first, columns * index_t(sizeof(float)));
  }
}

template <class Element>
void convolve_pieces(const void* call, index_t begin, index_t end) {
  const CausalConvCall& c = *static_cast<const CausalConvCall*>(call);
  const auto run = c.taps == 4 ? convolve<Element, 4> : c.taps == 3 ? convolve<Element, 3> : convolve<Element, 0>;
  for (index_t piece = begin; piece < end; ++piece) {
    const index_t first = piece % c.units * kConvColumns, left = c.channels - first;
    const index_t columns = left < kConvColumns ? left : kConvColumns;
    fetch_piece<Element>(c, c.rows[piece / c.units], first, columns);
    for (index_t i = 0; i < columns; i += kLanes) run(c, c.rows[piece / c.units], first + i, columns - i);
  }
}

}  // namespace

extern const CausalConvKernels causal_conv;
const CausalConvKernels causal_conv = {{convolve_pieces<bf16>, convolve_pieces<fp16>, convolve_pieces<float>}};

}  // namespace qt::QT_ISA
