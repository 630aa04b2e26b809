// Norms, activations, gates, sums and gathers, in fp32 arithmetic over bf16, fp16 or fp32 rows.
//
// A thread owns one row at a time. Bytes: each input read once and each output written once, 4 to 6 bytes an element. Norms read
// the row two or three times, from the L1 cache. FLOPs: about 2 to 20 an element. Limiter: cache or memory bandwidth; for
// activations the exponential and the division. Results are rounded to the row format at the same places as the reference (torch,
// transformers).
//
// Reduction order (norms only): four vectors of fp32 sums, element i in lane i mod lanes of vector (i / lanes) mod 4, ascending.
// Then the vectors (0 + 1) + (2 + 3), then lanes by halves. Independent of batch size.
#include "pointwise.hpp"

#include "activations.hpp"
#include "simd.hpp"

namespace qt::QT_ISA {
namespace {

// tanh z = (1 - e) / (1 + e) with e = e^-2|z|. Near 0, where this cancels, the Taylor series to z^7 (relative remainder below
// 6e-8).
QT_INLINE f32v hyperbolic_tangent(f32v z) {
  const f32v square = z * z, magnitude = max(z, -z), e = exponential(magnitude * all(-2.0f));
  const f32v far = (all(1.0f) - e) / (all(1.0f) + e);
  f32v near = fma(square, all(-17.0f / 315), all(2.0f / 15));
  near = fma(near, square, all(-1.0f / 3));
  near = fma(near * square, z, z);
  return magnitude < 0.2f ? near : (z < 0.0f ? -far : far);
}

// --- rows ---

// The sum of term(i, count) over a row, in the reduction order above; term returns zeros from lane `count` on.
template <class Term>
QT_INLINE float sum_over(index_t width, Term term) {
  f32v sums[4] = {};
  index_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) sums[j] += term(i + j * kLanes, index_t(kLanes));
  for (int j = 0; i < width; i += kLanes, ++j) sums[j] += term(i, width - i);
  return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Calls each(i, count) for the vectors of a row, `count` elements from i on.
template <class Each>
QT_INLINE void for_vectors(index_t width, Each each) {
  for (index_t i = 0; i < width; i += kLanes) each(i, width - i);
}

template <class Element>
QT_INLINE const Element* row_of(const void* rows, index_t row, index_t stride) {
  return static_cast<const Element*>(rows) + row * stride;
}

template <class Element>
QT_INLINE Element* row_of(void* rows, index_t row, index_t stride) {
  return static_cast<Element*>(rows) + row * stride;
}

// Weight or bias of a norm's group; null: none.
template <class Element>
QT_INLINE const Element* weights_of(const void* weights, index_t group, const PointwiseCall& c) {
  return weights ? static_cast<const Element*>(weights) + group * c.weight_step : nullptr;
}

// Two rounding conventions. Llama: the normalized row is rounded, multiplied by the weight, and rounded again. Gemma and OLMo 2
// (rounds_once): multiplied by (offset + weight) in fp32, and rounded once.
template <class Element>
QT_INLINE void rms_norm_of(const PointwiseCall& c, const Element* x, const Element* weight, Element* y) {
  const float squares = sum_over(c.width, [=](index_t i, index_t count) {
    const f32v value = load(x + i, count);
    return value * value;
  });
  const f32v scale = all(1.0f / __builtin_sqrtf(squares / float(c.width) + c.eps));
  const f32v offset = all(c.offset);
  if (!weight)
    for_vectors(c.width, [=](index_t i, index_t count) { store(y + i, load(x + i, count) * scale, count); });
  else if (!c.rounds_once)
    for_vectors(c.width, [=](index_t i, index_t count) {
      store(y + i, rounded_to<Element>(load(x + i, count) * scale) * load(weight + i, count), count);
    });
  else
    for_vectors(c.width, [=](index_t i, index_t count) {
      store(y + i, load(x + i, count) * scale * (offset + load(weight + i, count)), count);
    });
}

template <class Element>
void rms_norm(const void* call, index_t begin, index_t end) {
  const PointwiseCall& c = *static_cast<const PointwiseCall*>(call);
  for (index_t row = begin; row < end; ++row) {
    const Element* x = row_of<Element>(c.x, row, c.x_stride);
    Element* y = row_of<Element>(c.y, row, c.y_stride);
    for (index_t group = 0; group < c.groups; ++group)
      rms_norm_of(c, x + group * c.width, weights_of<Element>(c.weight, group, c), y + group * c.width);
  }
}

// The variance is computed from the centred row, without cancellation. Rounded once.
template <class Element>
QT_INLINE void layer_norm_of(const PointwiseCall& c, const Element* x, const Element* weight, const Element* bias,
                             Element* y) {
  const float sum = sum_over(c.width, [=](index_t i, index_t count) { return load(x + i, count); });
  const f32v mean = all(sum / float(c.width));
  i32v lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  const float squares = sum_over(c.width, [=](index_t i, index_t count) {
    const f32v value = load(x + i, count) - mean;
    return count >= kLanes ? value * value : (lane < std::int32_t(count) ? value * value : all(0.0f));
  });
  const f32v scale = all(1.0f / __builtin_sqrtf(squares / float(c.width) + c.eps));
  for_vectors(c.width, [=](index_t i, index_t count) {
    f32v value = (load(x + i, count) - mean) * scale;
    if (weight) value = value * load(weight + i, count);
    if (bias) value = value + load(bias + i, count);
    store(y + i, value, count);
  });
}

template <class Element>
void layer_norm(const void* call, index_t begin, index_t end) {
  const PointwiseCall& c = *static_cast<const PointwiseCall*>(call);
  for (index_t row = begin; row < end; ++row) {
    const Element* x = row_of<Element>(c.x, row, c.x_stride);
    Element* y = row_of<Element>(c.y, row, c.y_stride);
    for (index_t group = 0; group < c.groups; ++group)
      layer_norm_of(c, x + group * c.width, weights_of<Element>(c.weight, group, c),
                    weights_of<Element>(c.bias, group, c), y + group * c.width);
  }
}

template <class Element>
void add(const void* call, index_t begin, index_t end) {
  const PointwiseCall& c = *static_cast<const PointwiseCall*>(call);
  for (index_t row = begin; row < end; ++row) {
    const Element* x = row_of<Element>(c.x, row, c.x_stride);
    const Element* second = row_of<Element>(c.second, row, c.second_stride);
    Element* y = row_of<Element>(c.y, row, c.y_stride);
    for_vectors(c.width,
                [=](index_t i, index_t count) { store(y + i, load(x + i, count) + load(second + i, count), count); });
  }
}

// second: as wide as x, or one number for each row.
template <class Element>
void multiply(const void* call, index_t begin, index_t end) {
  const PointwiseCall& c = *static_cast<const PointwiseCall*>(call);
  for (index_t row = begin; row < end; ++row) {
    const Element* x = row_of<Element>(c.x, row, c.x_stride);
    const Element* second = row_of<Element>(c.second, row, c.second_stride);
    Element* y = row_of<Element>(c.y, row, c.y_stride);
    if (c.second_width == 1) {
      const f32v factor = all(load(second, 1)[0]);
      for_vectors(c.width, [=](index_t i, index_t count) { store(y + i, load(x + i, count) * factor, count); });
    } else {
      for_vectors(c.width,
                  [=](index_t i, index_t count) { store(y + i, load(x + i, count) * load(second + i, count), count); });
    }
  }
}

template <class Element>
void add_positions(const void* call, index_t begin, index_t end) {
  const PointwiseCall& c = *static_cast<const PointwiseCall*>(call);
  for (index_t row = begin; row < end; ++row) {
    const Element* x = row_of<Element>(c.x, row, c.x_stride);
    const Element* second = row_of<Element>(c.second, c.positions[row] + c.first_position, c.second_stride);
    Element* y = row_of<Element>(c.y, row, c.y_stride);
    for_vectors(c.width,
                [=](index_t i, index_t count) { store(y + i, load(x + i, count) + load(second + i, count), count); });
  }
}

template <class Element>
void scale(const void* call, index_t begin, index_t end) {
  const PointwiseCall& c = *static_cast<const PointwiseCall*>(call);
  const f32v factor = all(c.factor);
  for (index_t row = begin; row < end; ++row) {
    const Element* x = row_of<Element>(c.x, row, c.x_stride);
    Element* y = row_of<Element>(c.y, row, c.y_stride);
    for_vectors(c.width, [=](index_t i, index_t count) { store(y + i, load(x + i, count) * factor, count); });
  }
}

// Clamp to [-bound, bound]; NaN stays NaN.
template <class Element>
void clip(const void* call, index_t begin, index_t end) {
  const PointwiseCall& c = *static_cast<const PointwiseCall*>(call);
  const f32v bound = all(c.factor);
  for (index_t row = begin; row < end; ++row) {
    const Element* x = row_of<Element>(c.x, row, c.x_stride);
    Element* y = row_of<Element>(c.y, row, c.y_stride);
    for_vectors(c.width, [=](index_t i, index_t count) {
      const f32v value = load(x + i, count), above = value > bound ? bound : value;
      store(y + i, above < -bound ? -bound : above, count);
    });
  }
}

// tanh(x / bound) * bound, rounded after each of the three operations, like Gemma 2's logit soft cap.
template <class Element>
void softcap(const void* call, index_t begin, index_t end) {
  const PointwiseCall& c = *static_cast<const PointwiseCall*>(call);
  const f32v bound = all(c.factor);
  for (index_t row = begin; row < end; ++row) {
    const Element* x = row_of<Element>(c.x, row, c.x_stride);
    Element* y = row_of<Element>(c.y, row, c.y_stride);
    for_vectors(c.width, [=](index_t i, index_t count) {
      const f32v share = rounded_to<Element>(load(x + i, count) / bound);
      store(y + i, rounded_to<Element>(hyperbolic_tangent(share)) * bound, count);
    });
  }
}

// e^z - 1 - z for z <= 0. Near 0, where this cancels, the Taylor series to z^9 (relative remainder below 2e-7).
QT_INLINE f32v exponential_beyond_line(f32v z) {
  f32v near = fma(z, all(1.0f / 362880), all(1.0f / 40320));
  near = fma(near, z, all(1.0f / 5040));
  near = fma(near, z, all(1.0f / 720));
  near = fma(near, z, all(1.0f / 120));
  near = fma(near, z, all(1.0f / 24));
  near = fma(near, z, all(1.0f / 6));
  near = fma(near, z, all(1.0f / 2));
  return z > -1.0f ? near * z * z : exponential(z) - (all(1.0f) + z);
}

// xIELU: p x^2 + l x for x > 0; n (e^min(x, m) - 1 - x) + l x otherwise. p = softplus of the first parameter, n = softplus of the
// second + l (Huang and Schlag, "Deriving activation functions using integration", 2024). Rounded once.
template <class Element>
void xielu(const void* call, index_t begin, index_t end) {
  const PointwiseCall& c = *static_cast<const PointwiseCall*>(call);
  const float* numbers = static_cast<const float*>(c.second);
  const f32v above = all(numbers[0]), line = all(numbers[2]), below = all(numbers[1] + numbers[2]), most = all(numbers[3]);
  for (index_t row = begin; row < end; ++row) {
    const Element* x = row_of<Element>(c.x, row, c.x_stride);
    Element* y = row_of<Element>(c.y, row, c.y_stride);
    for_vectors(c.width, [=](index_t i, index_t count) {
      const f32v value = load(x + i, count), capped = value < most ? value : most;
      const f32v bent = exponential_beyond_line(capped) + (capped - value);
      store(y + i, fma(value, line, value > 0.0f ? above * value * value : below * bent), count);
    });
  }
}

template <class Element, class Source>
void embedding(const void* call, index_t begin, index_t end) {
  const PointwiseCall& c = *static_cast<const PointwiseCall*>(call);
  for (index_t row = begin; row < end; ++row) {
    const Source* x = row_of<Source>(c.x, c.ids[row], c.x_stride);
    Element* y = row_of<Element>(c.y, row, c.y_stride);
    if constexpr (std::is_same_v<Element, Source>)
      std::memcpy(y, x, c.width * sizeof(Element));
    else
      for_vectors(c.width, [=](index_t i, index_t count) { store(y + i, load(x + i, count), count); });
  }
}

template <class Element, Activation kind>
void activation(const void* call, index_t begin, index_t end) {
  const PointwiseCall& c = *static_cast<const PointwiseCall*>(call);
  for (index_t row = begin; row < end; ++row) {
    const Element* x = row_of<Element>(c.x, row, c.x_stride);
    Element* y = row_of<Element>(c.y, row, c.y_stride);
    for_vectors(c.width, [=](index_t i, index_t count) { store(y + i, activate(kind, load(x + i, count)), count); });
  }
}

// The activation is rounded before the multiplication, like the reference.
template <class Element, Activation kind>
void activation_and_mul(const void* call, index_t begin, index_t end) {
  const PointwiseCall& c = *static_cast<const PointwiseCall*>(call);
  for (index_t row = begin; row < end; ++row) {
    const Element *gate = row_of<Element>(c.x, row, c.x_stride), *up = gate + c.width;
    Element* y = row_of<Element>(c.y, row, c.y_stride);
    for_vectors(c.width, [=](index_t i, index_t count) {
      store(y + i, rounded_to<Element>(activate(kind, load(gate + i, count))) * load(up + i, count), count);
    });
  }
}

}  // namespace

#define QT_EACH_DTYPE(kernel) {kernel<bf16>, kernel<fp16>, kernel<float>}
#define QT_EACH_DTYPE_AND(kernel, what) {kernel<bf16, what>, kernel<fp16, what>, kernel<float, what>}
#define QT_EACH_ACTIVATION(kernel)                    \
  {{nullptr, nullptr, nullptr},                       \
   QT_EACH_DTYPE_AND(kernel, Activation::silu),       \
   QT_EACH_DTYPE_AND(kernel, Activation::gelu_tanh),  \
   QT_EACH_DTYPE_AND(kernel, Activation::gelu),       \
   QT_EACH_DTYPE_AND(kernel, Activation::relu),       \
   QT_EACH_DTYPE_AND(kernel, Activation::relu2),      \
   QT_EACH_DTYPE_AND(kernel, Activation::quick_gelu), \
   QT_EACH_DTYPE_AND(kernel, Activation::sigmoid)}

extern const PointwiseKernels pointwise;
const PointwiseKernels pointwise = {
    .rms_norm = QT_EACH_DTYPE(rms_norm),
    .layer_norm = QT_EACH_DTYPE(layer_norm),
    .add = QT_EACH_DTYPE(add),
    .add_positions = QT_EACH_DTYPE(add_positions),
    .multiply = QT_EACH_DTYPE(multiply),
    .scale = QT_EACH_DTYPE(scale),
    .clip = QT_EACH_DTYPE(clip),
    .softcap = QT_EACH_DTYPE(softcap),
    .xielu = QT_EACH_DTYPE(xielu),
    .embedding = {{embedding<bf16, bf16>, embedding<bf16, fp16>, embedding<bf16, float>},
                  {embedding<fp16, bf16>, embedding<fp16, fp16>, embedding<fp16, float>},
                  {embedding<float, bf16>, embedding<float, fp16>, embedding<float, float>}},
    .activation = QT_EACH_ACTIVATION(activation),
    .activation_and_mul = QT_EACH_ACTIVATION(activation_and_mul),
};

}  // namespace qt::QT_ISA
