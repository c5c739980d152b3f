// Products of a few rows with a large weight, for CPUs: y = x @ w in float32.
//
// XLA takes a matrix-vector product for one row and a general matrix product for more, which first
// copies both factors into an order of its own: five rows cost three times as much as one, though
// both read the weight once. Here the weight lies in that order already, in panels of 16 columns
//
//     w[K, N]  ->  panels[N / 16][K][16]
//
// so that a tile of rows x panels walks through memory in as many straight lines as it has panels,
// with its sums in registers: until arithmetic becomes the limit, rows more cost next to nothing.
//
// Every sum runs over k in order, whatever the tile: a row's bits depend neither on how many rows
// there are nor on the threads. Verified rows equal those of plain decoding to the last bit.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kWidth = 16;  // columns of a panel
using Lane = float __attribute__((vector_size(kWidth * sizeof(float))));

// Sums of a tile, kRows x kPanels of them, fill most of the vector registers and not more.
#ifdef __AVX512F__
constexpr int kRows = 6, kPanels = 4;  // 24 of 32 registers
#else
constexpr int kRows = 3, kPanels = 2;  // of half the width or a quarter: 12 of 16, 24 of 32
#endif

// Below so many multiplications waking another thread costs more than it brings.
constexpr int64_t kAlone = 1 << 15;

Lane load(const float* from) {
  Lane lane;
  std::memcpy(&lane, from, sizeof(lane));
  return lane;
}

struct Product {
  const float *x, *panels;
  float* y;
  int64_t rows, k, n;
};

template <int R, int P>
void tile(const Product& of, int64_t row, int64_t panel) {
  const float* x = of.x + row * of.k;
  const float* w = of.panels + panel * of.k * kWidth;
  Lane sums[R][P] = {};
  for (int64_t k = 0; k < of.k; ++k) {
    Lane lanes[P];
    for (int p = 0; p < P; ++p) lanes[p] = load(w + (p * of.k + k) * kWidth);
    for (int r = 0; r < R; ++r) {
      for (int p = 0; p < P; ++p) sums[r][p] += x[r * of.k + k] * lanes[p];
    }
  }
  float* y = of.y + row * of.n + panel * kWidth;
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) std::memcpy(y + r * of.n + p * kWidth, &sums[r][p], sizeof(Lane));
  }
}

template <int P, int R = kRows>
void tile_of(int64_t rows, const Product& of, int64_t row, int64_t panel) {
  if constexpr (R > 1) {
    if (rows < R) return tile_of<P, R - 1>(rows, of, row, panel);
  }
  tile<R, P>(of, row, panel);
}

// All rows by P panels: the panels come from memory once and then from the cache.
template <int P>
void stripe(const Product& of, int64_t panel) {
  const int64_t tiles = (of.rows + kRows - 1) / kRows;  // of much the same height
  for (int64_t t = 0, row = 0; t < tiles; ++t) {
    const int64_t end = of.rows * (t + 1) / tiles;
    tile_of<P>(end - row, of, row, panel);
    row = end;
  }
}

template <int P = kPanels>
void stripe_of(int64_t panels, const Product& of, int64_t panel) {
  if constexpr (P > 1) {
    if (panels < P) return stripe_of<P - 1>(panels, of, panel);
  }
  stripe<P>(of, panel);
}

void columns(const Product& of, int64_t first, int64_t last) {
  for (int64_t panel = first; panel < last; panel += kPanels) {
    stripe_of(std::min<int64_t>(kPanels, last - panel), of, panel);
  }
}

// Threads claim shares of the columns. The caller does all that nobody has claimed, so it waits for
// a thread that works and never for one that has yet to wake up; who comes late finds nothing left
// but the counters, which live as long as anybody holds them.
struct Shares {
  std::atomic<int64_t> claimed{0}, done{0};
};

void multiply(const Product& of, ffi::ThreadPool& pool) {
  const int64_t panels = of.n / kWidth, stripes = (panels + kPanels - 1) / kPanels;
  const int64_t shares = std::min<int64_t>(pool.num_threads(), stripes);
  if (shares < 2 || of.rows * of.k * of.n < kAlone) return columns(of, 0, panels);
  auto counters = std::make_shared<Shares>();
  auto work = [=] {
    for (int64_t i; (i = counters->claimed.fetch_add(1)) < shares;) {
      const auto from = [&](int64_t share) {
        return std::min(panels, stripes * share / shares * kPanels);
      };
      columns(of, from(i), from(i + 1));
      counters->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 1; i < shares; ++i) {
    auto helper = work;
    pool.Schedule(std::move(helper));
  }
  work();
  while (counters->done.load(std::memory_order_acquire) < shares) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

ffi::Error panels_product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x,
                          ffi::Buffer<ffi::F32> panels, ffi::ResultBuffer<ffi::F32> y) {
  const auto in = x.dimensions(), weight = panels.dimensions(), out = y->dimensions();
  if (in.size() < 1 || out.size() != in.size() || weight.size() != 3 || weight[1] != in.back() ||
      weight[2] != kWidth || out.back() != weight[0] * kWidth) {
    return ffi::Error::InvalidArgument(
        "expected x [.., K], panels [N / 16, K, 16] and y [.., N]; see specjax.kernels.panels");
  }
  const int64_t n = out.back();
  if (y->element_count() == 0) return ffi::Error::Success();
  multiply({x.typed_data(), panels.typed_data(), y->typed_data(),
            static_cast<int64_t>(y->element_count()) / n, in.back(), n},
           pool);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_panels, panels_product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
