// Decoder layers for CPUs, one after the other in one call: norms, projections, rotation, tree
// attention, gated feed-forward; `specjax/models/layers.py` defines the operations.
//
// A layer of a small model is some dozen operations of a few microseconds each. XLA starts them one
// by one, and for a few rows that takes longer than the arithmetic. Here one group of threads
// computes all stages of all layers (`ThreadGroup`).
//
// The order of every sum of a row depends on the row's own length alone, so its bits depend neither
// on other rows nor on the threads.

#include <cmath>
#include <vector>

#include "attend.h"
#include "product.h"

namespace specjax {
namespace {

// y = x / sqrt(mean(x^2) + eps) * scale; width is a multiple of kWidth.
void norm(const float* x, const float* scale, int64_t width, float eps, float* y) {
  Lane squares{};
  for (int64_t i = 0; i < width; i += kLanes) squares = fused(load(x + i), load(x + i), squares);
  float sum = 0;
  for (int64_t i = 0; i < kLanes; ++i) sum += squares[i];
  const float by = 1 / std::sqrt(sum / width + eps);
  for (int64_t i = 0; i < width; i += kLanes) store(y + i, load(x + i) * by * load(scale + i));
}

// y = x * cos + rotated * sin; rotated is x with its halves swapped and the new first one negated.
void rotate(const float* x, const float* cos, const float* sin, int64_t width, float* y) {
  const int64_t half = width / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    y[i] = fused(a, cos[i], -(b * sin[i]));
    y[half + i] = fused(b, cos[half + i], a * sin[half + i]);
  }
}

// silu(gate) * up
Lane gated(Lane gate, Lane up) {
  const Lane away = gate < 0 ? gate : -gate, e = exp_of(away);
  const Lane top = gate < 0 ? e : spread(1.0f);
  return gate * (top / (1 + e)) * up;
}

struct Layer {
  const float *k_pages, *v_pages, *k_before, *v_before;
  const float *input_norm, *qkv, *qkv_bias, *qk_norm, *o, *post_norm, *gate_up, *down;
  float *k, *v;
};

struct Shape {
  int64_t batch, rows, width, heads, kv_heads, head, hidden;  // width of states, of a head, ..
  int64_t pages, size, stretches, words, before;
  bool own_bits;
  float eps;

  int64_t all() const { return batch * rows; }
  int64_t q_width() const { return heads * head; }
  // Multiplications of a layer's products.
  int64_t multiplications() const {
    return all() * (width * (qkv_width() + q_width() + 2 * hidden) + hidden * width);
  }
  int64_t qkv_width() const { return (heads + 2 * kv_heads) * head; }
};

constexpr int64_t kKept = 1024;  // rows for which a thread keeps its buffers from call to call

// Buffers between the stages.
struct Buffers {
  std::vector<float> normed, qkv, attended, gate_up, gated;

  void fit(const Shape& shape) {
    const auto resize = [&](std::vector<float>& of, int64_t width) {
      const size_t needed = shape.all() * width;
      if (of.size() < needed) of.resize(needed);
    };
    resize(normed, shape.width), resize(qkv, shape.qkv_width());
    resize(attended, shape.q_width());
    resize(gate_up, 2 * shape.hidden), resize(gated, shape.hidden);
  }
};

class Forward {
 public:
  Forward(const Shape& shape, const float* cos, const float* sin, const int32_t* prefix,
          const uint32_t* bits, const int32_t* table, float* x, Buffers& buffers,
          ThreadGroup& threads)
      : shape_(shape), cos_(cos), sin_(sin), prefix_(prefix), bits_(bits), table_(table), x_(x),
        buffers_(buffers), threads_(threads) {}

  void run(const Layer& layer) {
    const int64_t all = shape_.all();
    norms(layer.input_norm);
    product(buffers_.normed, layer.qkv, shape_.width, shape_.qkv_width(), buffers_.qkv.data());
    heads(layer);
    attention(layer);
    product(buffers_.attended, layer.o, shape_.q_width(), shape_.width, x_, true);
    norms(layer.post_norm);
    product(buffers_.normed, layer.gate_up, shape_.width, 2 * shape_.hidden,
            buffers_.gate_up.data());
    const int64_t hidden = shape_.hidden;
    threads_.run(all, all * hidden * 8, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        const float* gate = buffers_.gate_up.data() + r * 2 * hidden;
        float* to = buffers_.gated.data() + r * hidden;
        for (int64_t i = 0; i < hidden; i += kLanes) {
          store(to + i, gated(load(gate + i), load(gate + hidden + i)));
        }
      }
    });
    product(buffers_.gated, layer.down, hidden, shape_.width, x_, true);
  }

 private:
  void norms(const float* scale) {
    const int64_t width = shape_.width;
    threads_.run(shape_.all(), shape_.all() * width * 2, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        norm(x_ + r * width, scale, width, shape_.eps, buffers_.normed.data() + r * width);
      }
    });
  }

  void product(const std::vector<float>& x, const float* panels, int64_t k, int64_t n, float* y,
               bool adds = false) {
    multiply({x.data(), panels, y, shape_.all(), k, n, adds}, threads_);
  }

  // Queries are rotated in place; keys and values are written to their rows, head by head.
  void heads(const Layer& layer) {
    const int64_t head = shape_.head, rows = shape_.rows, width = shape_.qkv_width();
    const int64_t turned = shape_.heads + shape_.kv_heads;
    threads_.run(shape_.all(), shape_.all() * width * 6, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        float* row = buffers_.qkv.data() + r * width;
        if (layer.qkv_bias) {
          for (int64_t i = 0; i < width; i += kLanes) {
            store(row + i, load(row + i) + load(layer.qkv_bias + i));
          }
        }
        const int64_t slot = r / rows, at = r % rows;
        const auto place = [&](float* of, int64_t kv) {
          return of + ((slot * shape_.kv_heads + kv) * rows + at) * head;
        };
        for (int64_t m = 0; m < turned; ++m) {
          float* mine = row + m * head;
          if (layer.qk_norm) norm(mine, layer.qk_norm + m * head, head, shape_.eps, mine);
          float* to = m < shape_.heads ? mine : place(layer.k, m - shape_.heads);
          rotate(mine, cos_ + r * head, sin_ + r * head, head, to);
        }
        for (int64_t kv = 0; kv < shape_.kv_heads; ++kv) {
          const float* values = row + (turned + kv) * head;
          float* key = place(layer.k, kv);
          Lane none{};  // stays 0 but where something is infinite or NaN
          for (int64_t i = 0; i < head; i += kLanes) {
            const Lane k = load(key + i), v = load(values + i);
            none += (k - k) + (v - v);
          }
          bool finite = true;
          for (int64_t i = 0; i < kLanes; ++i) finite &= none[i] == 0;
          if (finite) {
            std::copy_n(values, head, place(layer.v, kv));
          } else {  // as `with_marked_keys` of `specjax/memory.py`
            std::fill_n(key, head, std::nanf(""));
            std::fill_n(place(layer.v, kv), head, 0.0f);
          }
        }
      }
    });
  }

  void attention(const Layer& layer) {
    const int64_t head = shape_.head, rows = shape_.rows;
    attend({.q = buffers_.qkv.data(),
            .out = buffers_.attended.data(),
            .of_q = {rows * shape_.qkv_width(), head, shape_.qkv_width()},
            .of_out = {rows * shape_.q_width(), head, shape_.q_width()},
            .before = {layer.k_before, layer.v_before, shape_.before},
            .own = {layer.k, layer.v, rows},
            .k_pages = layer.k_pages,
            .v_pages = layer.v_pages,
            .prefix = prefix_,
            .table = table_,
            .bits = bits_,
            .batch = shape_.batch,
            .heads = shape_.heads,
            .kv_heads = shape_.kv_heads,
            .rows = rows,
            .width = head,
            .pages = shape_.pages,
            .size = shape_.size,
            .stretches = shape_.stretches,
            .words = shape_.words,
            .own_bits = shape_.own_bits},
           threads_);
  }

  const Shape& shape_;
  const float *cos_, *sin_;
  const int32_t* prefix_;
  const uint32_t* bits_;
  const int32_t* table_;
  float* x_;
  Buffers& buffers_;
  ThreadGroup& threads_;
};

// Reads the layers' arrays one by one, and records the first whose size is not as expected.
class Taker {
 public:
  Taker(ffi::RemainingArgs args, ffi::RemainingRets rets) : args_(args), rets_(rets) {}

  const float* weight(int64_t size) {
    const auto found = args_.get<Floats>(arg_++);
    if (!found.has_value() || static_cast<int64_t>(found->element_count()) != size) return fail();
    return found->typed_data();
  }

  float* result(int64_t size) {
    auto found = rets_.get<Floats>(ret_++);
    if (!found.has_value() || static_cast<int64_t>((*found)->element_count()) != size) {
      return fail();
    }
    return (*found)->typed_data();
  }

  bool fits() const { return fits_; }
  bool all_taken() const { return arg_ == args_.size() && ret_ == rets_.size(); }

 private:
  float* fail() {
    fits_ = false;
    return nullptr;
  }

  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  size_t arg_ = 0, ret_ = 0;
  bool fits_ = true;
};

ffi::Error run_layers(ffi::ThreadPool pool, int64_t layers, int64_t heads, int64_t kv_heads,
                      int64_t hidden, int64_t pages, int64_t size, int64_t before, float eps,
                      bool bias, bool qk_norm, Floats x, Floats cos, Floats sin, Ints prefix,
                      ffi::Buffer<ffi::U32> bits, Ints table, ffi::RemainingArgs args,
                      ffi::Result<Floats> out, ffi::RemainingRets rets) {
  const auto of_x = x.dimensions(), of_cos = cos.dimensions(), of_bits = bits.dimensions(),
             of_table = table.dimensions();
  const auto wrong = [] {
    return ffi::Error::InvalidArgument(
        "expected x [B T D], cos and sin [B T H], prefixes [B], bits [1 or B, T, W], a table "
        "[B X], and the arrays of each layer; see specjax.kernels.cpu");
  };
  if (of_x.size() != 3 || of_cos.size() != 3 || of_bits.size() != 3 || of_table.size() != 2) {
    return wrong();
  }
  const Shape shape{.batch = of_x[0],
                    .rows = of_x[1],
                    .width = of_x[2],
                    .heads = heads,
                    .kv_heads = kv_heads,
                    .head = of_cos[2],
                    .hidden = hidden,
                    .pages = pages,
                    .size = size,
                    .stretches = of_table[1],
                    .words = of_bits[2],
                    .before = before,
                    .own_bits = of_bits[0] > 1,
                    .eps = eps};
  const int64_t head = shape.head, width = shape.width;
  const size_t angles = shape.all() * head;
  if (std::min({layers, heads, kv_heads, hidden, pages, size, head, width}) <= 0 ||
      head % kWidth || width % kWidth || hidden % kWidth || heads % kv_heads ||
      out->element_count() != x.element_count() || cos.element_count() != angles ||
      sin.element_count() != angles ||
      prefix.element_count() != static_cast<size_t>(shape.batch) || of_table[0] != shape.batch ||
      (of_bits[0] != 1 && of_bits[0] != shape.batch) || of_bits[1] != shape.rows ||
      shape.words * 32 < before + shape.rows) {
    return wrong();
  }
  const int64_t cached = pages * kv_heads * size * head;
  const int64_t earlier = shape.batch * kv_heads * before * head;
  const int64_t fresh = shape.batch * kv_heads * shape.rows * head;
  Taker taker(args, rets);
  std::vector<Layer> all(layers);
  for (Layer& layer : all) {
    layer.k_pages = taker.weight(cached), layer.v_pages = taker.weight(cached);
    layer.k_before = before ? taker.weight(earlier) : nullptr;
    layer.v_before = before ? taker.weight(earlier) : nullptr;
    layer.input_norm = taker.weight(width);
    layer.qkv = taker.weight(width * shape.qkv_width());
    layer.qkv_bias = bias ? taker.weight(shape.qkv_width()) : nullptr;
    layer.qk_norm = qk_norm ? taker.weight((heads + kv_heads) * head) : nullptr;
    layer.o = taker.weight(shape.q_width() * width);
    layer.post_norm = taker.weight(width);
    layer.gate_up = taker.weight(width * 2 * hidden);
    layer.down = taker.weight(hidden * width);
    layer.k = taker.result(fresh), layer.v = taker.result(fresh);
  }
  if (!taker.fits() || !taker.all_taken()) return wrong();
  if (x.element_count() == 0) return ffi::Error::Success();
  float* to = out->typed_data();
  if (to != x.typed_data()) std::copy_n(x.typed_data(), x.element_count(), to);
  static thread_local Buffers kept;
  Buffers own;
  Buffers& buffers = shape.all() > kKept ? own : kept;
  buffers.fit(shape);
  ThreadGroup threads(pool, layers * shape.multiplications());
  Forward forward(shape, cos.typed_data(), sin.typed_data(), prefix.typed_data(),
                  bits.typed_data(), table.typed_data(), to, buffers, threads);
  for (const Layer& layer : all) forward.run(layer);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace specjax

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_layers, specjax::run_layers,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("layers")
                                  .Attr<int64_t>("heads")
                                  .Attr<int64_t>("kv_heads")
                                  .Attr<int64_t>("hidden")
                                  .Attr<int64_t>("pages")
                                  .Attr<int64_t>("size")
                                  .Attr<int64_t>("before")
                                  .Attr<float>("eps")
                                  .Attr<bool>("bias")
                                  .Attr<bool>("qk_norm")
                                  .Arg<ffi::Buffer<ffi::F32>>()   // x
                                  .Arg<ffi::Buffer<ffi::F32>>()   // cos
                                  .Arg<ffi::Buffer<ffi::F32>>()   // sin
                                  .Arg<ffi::Buffer<ffi::S32>>()   // prefix
                                  .Arg<ffi::Buffer<ffi::U32>>()   // bits
                                  .Arg<ffi::Buffer<ffi::S32>>()   // table
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()   // x
                                  .RemainingRets());
