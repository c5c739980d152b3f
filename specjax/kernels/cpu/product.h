// Products of a few rows with a large weight, for CPUs: y = x @ w in float32.
//
// XLA uses a matrix-vector product for one row and a general matrix product for more. The latter
// first copies both factors into a layout of its own: five rows take up to three times as long as
// one, though both read the weight once. Here the weight is stored in that layout, in panels of 16
// columns
//
//     w[K, N]  ->  panels[N / 16][K][16]
//
// so that a tile of rows x panels reads each panel sequentially, with its sums in registers. Until
// arithmetic is the limit, further rows take hardly any time.
//
// Every sum runs over k in order, whatever the tile: a row's bits depend neither on how many rows
// there are nor on the threads.

#ifndef SPECJAX_KERNELS_CPU_PRODUCT_H_
#define SPECJAX_KERNELS_CPU_PRODUCT_H_

#include "common.h"

namespace specjax {

// Sums of a tile, kRows x kPanels x 16 of them, fill most of the registers and not more.
constexpr int kPerPanel = kWidth / kLanes;
#if defined(__AVX512F__)
constexpr int kRows = 6, kPanels = 4;  // 24 of 32
#elif defined(__AVX__)
constexpr int kRows = 6, kPanels = 1;  // 12 of 16
#else
constexpr int kRows = 2, kPanels = 1;  // 8 of 16, or of 32
#endif

// Steps of k from prefetching a line of a panel to using it. With few rows each line is used once,
// and the hardware's own prefetching is too slow for the arithmetic.
constexpr int64_t kAhead = 32;

struct Product {
  const float *x, *panels;
  float* y;
  int64_t rows, k, n;
  bool adds = false;  // to what y holds

  int64_t multiplications() const { return rows * k * n; }
};

template <int R, int P>
void tile(const Product& of, int64_t row, int64_t panel) {
  constexpr int kVectors = P * kPerPanel;
  const float* x = of.x + row * of.k;
  const float* w = of.panels + panel * of.k * kWidth;
  const auto at = [](int v, int64_t stride) {
    return v / kPerPanel * stride + v % kPerPanel * kLanes;
  };
  Lane sums[R][kVectors] = {};
  for (int64_t k = 0; k < of.k; ++k) {
    Lane lanes[kVectors];
    for (int p = 0; p < P; ++p) __builtin_prefetch(w + (p * of.k + k + kAhead) * kWidth);
    for (int v = 0; v < kVectors; ++v) {
      lanes[v] = load(w + k * kWidth + at(v, of.k * kWidth));
      if (R > 1) keep(lanes[v]);
    }
    for (int r = 0; r < R; ++r) {
      const Lane factor = spread(x[r * of.k + k]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = fused(factor, lanes[v], sums[r][v]);
    }
  }
  float* y = of.y + row * of.n + panel * kWidth;
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      float* to = y + r * of.n + at(v, kWidth);
      store(to, of.adds ? load(to) + sums[r][v] : sums[r][v]);
    }
  }
}

template <int P, int R = kRows>
void tile_of(int64_t rows, const Product& of, int64_t row, int64_t panel) {
  if constexpr (R > 1) {
    if (rows < R) return tile_of<P, R - 1>(rows, of, row, panel);
  }
  tile<R, P>(of, row, panel);
}

// All rows by P panels, which are read from memory once and then from the cache.
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

inline void multiply(const Product& of, ThreadGroup& threads) {
  const int64_t panels = of.n / kWidth;
  threads.run(panels, of.multiplications(), [&](int64_t first, int64_t last) {
    const int64_t stripes = (last - first + kPanels - 1) / kPanels;  // of much the same width
    for (int64_t s = 0, panel = first; s < stripes; ++s) {
      const int64_t end = first + (last - first) * (s + 1) / stripes;
      stripe_of(end - panel, of, panel);
      panel = end;
    }
  });
}

}  // namespace specjax

#endif  // SPECJAX_KERNELS_CPU_PRODUCT_H_
