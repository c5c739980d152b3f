// Tree attention for CPUs: T rows over a cached prefix and over their own ancestors, in one pass
// per key/value head; `reference.py` defines the operation.
//
// XLA runs it as a dozen operations, and each batched product of a few rows takes more time in
// set-up than in arithmetic. Here the queries that share a key/value head are computed in
// tiles: the scores of all keys, one register of keys at a time, their softmax, the sum of values.
//
// A key's score sums over the head's width in order, and sums over keys run in the order of keys:
// positions of the prefix, then tree rows. A masked key whose value is finite adds exactly zero. So
// a row has the same bits whether an ancestor is in the tree or already in the cache, and whatever
// other rows and slots there are.

#ifndef SPECJAX_KERNELS_CPU_ATTEND_H_
#define SPECJAX_KERNELS_CPU_ATTEND_H_

#include <cmath>
#include <vector>

#include "common.h"

namespace specjax {

constexpr float kMasked = -1e30f;  // as in the reference
constexpr int64_t kTile = 24;      // queries whose scores are held at a time

// Strides of queries or of outputs, between slots, heads and rows.
struct Strides {
  int64_t slot, head, row;
};

// Keys and values [B K rows H] of a part of the tree.
struct Rows {
  const float *k, *v;
  int64_t rows;
};

struct Attention {
  const float* q;
  float* out;
  Strides of_q, of_out;
  Rows before, own;  // earlier rows of the tree, and the last
  const float *k_pages, *v_pages;
  const int32_t *prefix, *table;
  const uint32_t* bits;
  int64_t batch, heads, kv_heads, rows, width, pages, size, stretches, words;
  bool own_bits;  // of each slot, and not one tree for all

  int64_t tree() const { return before.rows + own.rows; }

  int64_t group() const { return heads / kv_heads; }
  int64_t multiplications() const {
    int64_t keys = 0;
    for (int64_t b = 0; b < batch; ++b) keys += prefix_of(b) + tree();
    return 2 * keys * heads * rows * width;
  }
  int64_t prefix_of(int64_t b) const {
    return std::clamp<int64_t>(prefix[b], 0, stretches * size);
  }
  const float* page(const float* of, int64_t b, int64_t stretch, int64_t kv) const {
    const int64_t index = std::clamp<int64_t>(table[b * stretches + stretch], 0, pages - 1);
    return of + (index * kv_heads + kv) * size * width;
  }
  const uint32_t* seen_by(int64_t b, int64_t row) const {
    return bits + ((own_bits ? b : 0) * rows + row) * words;
  }
};

// e^x for x <= 0: Cody and Waite's reduction and a polynomial, one ulp or so; exactly 0 below
// e^-86, and NaN stays NaN.
inline Lane exp_of(Lane x) {
  const Lane low = spread(-86.0f), magic = spread(12582912.0f);
  const Lane at = x > low ? x : low;
  const Lane whole = fused(at, spread(1.44269504f), magic) - magic;
  const Lane most = fused(whole, spread(-0.693359375f), at);
  const Lane r = fused(whole, spread(2.12194440e-4f), most);
  Lane sum = spread(1.0f / 720);
  for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    sum = fused(sum, r, spread(c));
  }
  const IntLane scale = (__builtin_convertvector(whole, IntLane) + 127) << 23;
  Lane power;
  std::memcpy(&power, &scale, sizeof(power));
  const Lane found = fused(sum, power, x - x);
  return x < low ? Lane{} : found;
}

// Transposes keys [count][stride] to turned [kLanes][kLanes], a lane for each key; further lanes
// hold the last key.
inline void transpose(const float* keys, int64_t count, int64_t stride, float* turned) {
  const auto row = [&](int64_t key) { return keys + std::min(key, count - 1) * stride; };
#if defined(__AVX512F__)
  // Four columns at a time: each load reads four keys, which saves half of the shuffles.
  for (int64_t h = 0; h < kLanes; h += 4) {
    __m512 four[4];
    for (int64_t i = 0; i < 4; ++i) {
      four[i] = _mm512_castps128_ps512(_mm_loadu_ps(row(i) + h));
      four[i] = _mm512_mask_broadcast_f32x4(four[i], 0x00f0, _mm_loadu_ps(row(i + 4) + h));
      four[i] = _mm512_mask_broadcast_f32x4(four[i], 0x0f00, _mm_loadu_ps(row(i + 8) + h));
      four[i] = _mm512_mask_broadcast_f32x4(four[i], 0xf000, _mm_loadu_ps(row(i + 12) + h));
    }
    for (int64_t half = 0; half < 2; ++half) {
      const auto beside = [&](__m512 x, __m512 y) {
        return _mm512_castps_pd(half ? _mm512_unpackhi_ps(x, y) : _mm512_unpacklo_ps(x, y));
      };
      const __m512d first = beside(four[0], four[1]), last = beside(four[2], four[3]);
      float* to = turned + (h + 2 * half) * kLanes;
      _mm512_storeu_ps(to, _mm512_castpd_ps(_mm512_unpacklo_pd(first, last)));
      _mm512_storeu_ps(to + kLanes, _mm512_castpd_ps(_mm512_unpackhi_pd(first, last)));
    }
  }
#else
  for (int64_t h = 0; h < kLanes; ++h) {
    for (int64_t key = 0; key < kLanes; ++key) turned[h * kLanes + key] = row(key)[h];
  }
#endif
}

// Scores of R queries and of P times kLanes keys.
template <int R, int P>
void score_rows(const float* q, const float* turned, int64_t width, float* to, int64_t stride) {
  Lane sums[R][P] = {};
  for (int64_t h = 0; h < width; ++h) {
    Lane lanes[P];
    for (int p = 0; p < P; ++p) keep(lanes[p] = load(turned + (p * width + h) * kLanes));
    for (int r = 0; r < R; ++r) {
      const Lane of = spread(q[r * width + h]);
      for (int p = 0; p < P; ++p) sums[r][p] = fused(of, lanes[p], sums[r][p]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) store(to + r * stride + p * kLanes, sums[r][p]);
  }
}

// out[r] += the keys' weights x values, and total[r] += the weights, in the order of the keys.
template <int R, int L>
void weigh_rows(const float* weights, int64_t stride, const float* values, int64_t count,
                int64_t width, float* out, float* total) {
  Lane sums[R][L], totals[R];  // a total in every lane: beside the products it costs nothing
  for (int r = 0; r < R; ++r) {
    totals[r] = spread(total[r]);
    for (int l = 0; l < L; ++l) sums[r][l] = load(out + r * width + l * kLanes);
  }
  for (int64_t i = 0; i < count; ++i) {
    Lane lanes[L];
    for (int l = 0; l < L; ++l) keep(lanes[l] = load(values + i * width + l * kLanes));
    for (int r = 0; r < R; ++r) {
      const Lane weight = spread(weights[r * stride + i]);
      totals[r] += weight;
      for (int l = 0; l < L; ++l) sums[r][l] = fused(weight, lanes[l], sums[r][l]);
    }
  }
  for (int r = 0; r < R; ++r) {
    total[r] = totals[r][0];
    for (int l = 0; l < L; ++l) store(out + r * width + l * kLanes, sums[r][l]);
  }
}

// A tile of queries of one key/value head of one slot; tiles reuse its buffers.
class Tile {
 public:
  explicit Tile(const Attention& of)
      : of_(of), q_(kTile * of.width), out_(kTile * of.width), turned_(2 * of.width * kLanes) {}

  void move_to(int64_t b, int64_t kv) {
    b_ = b, kv_ = kv, prefix_ = of_.prefix_of(b), keys_ = prefix_ + of_.tree();
    stride_ = keys_ + kLanes;  // the last of them may reach past the end
    const size_t needed = kTile * stride_;
    if (scores_.size() < needed) scores_.resize(needed);
  }

  void run(int64_t first, int64_t count) {
    first_ = first, count_ = count;
    const int64_t width = of_.width;
    const float scale = 1 / std::sqrt(static_cast<float>(width));
    for (int64_t i = 0; i < count; ++i) {
      const float* q = of_.q + at(of_.of_q, i);
      for (int64_t h = 0; h < width; ++h) q_[i * width + h] = q[h] * scale;
    }
    each_run([&](const float* keys, const float*, int64_t index, int64_t held) {
      score(keys, index, held);
    });
    mask();
    soften();
    std::fill_n(out_.begin(), count * width, 0.0f);
    std::fill_n(total_, count, 0.0f);
    each_run([&](const float*, const float* values, int64_t index, int64_t held) {
      weigh(values, index, held);
    });
    for (int64_t i = 0; i < count; ++i) {
      float* out = of_.out + at(of_.of_out, i);
      for (int64_t h = 0; h < width; ++h) out[h] = out_[i * width + h] / total_[i];
    }
  }

 private:
  // The offset of the tile's i-th query; queries are ordered by head, then by row.
  int64_t at(const Strides& by, int64_t i) const {
    const int64_t query = first_ + i, head = kv_ * of_.group() + query / of_.rows;
    return b_ * by.slot + head * by.head + query % of_.rows * by.row;
  }

  // Calls visit(keys, values, index of the first key, number of keys) for each contiguous run.
  template <typename Visit>
  void each_run(const Visit& visit) {
    for (int64_t at = 0; at < prefix_; at += of_.size) {
      const int64_t stretch = at / of_.size;
      visit(of_.page(of_.k_pages, b_, stretch, kv_), of_.page(of_.v_pages, b_, stretch, kv_), at,
            std::min(of_.size, prefix_ - at));
    }
    int64_t index = prefix_;
    for (const Rows& part : {of_.before, of_.own}) {
      const int64_t first = (b_ * of_.kv_heads + kv_) * part.rows * of_.width;
      if (part.rows) visit(part.k + first, part.v + first, index, part.rows);
      index += part.rows;
    }
  }

  void score(const float* keys, int64_t index, int64_t held) {
    for (int64_t i = 0; i < held;) {
      const bool two = held - i > kLanes;  // fewer queries than that leave the multipliers waiting
      two ? score_keys<2>(keys, index, i, held) : score_keys<1>(keys, index, i, held);
      i += two ? 2 * kLanes : kLanes;
    }
  }

  template <int P>
  void score_keys(const float* keys, int64_t index, int64_t i, int64_t held) {
    const int64_t width = of_.width;
    for (int64_t p = 0; p < P; ++p) {
      const int64_t key = i + p * kLanes;
      for (int64_t h = 0; h < width; h += kLanes) {
        transpose(keys + key * width + h, held - key, width,
                  turned_.data() + (p * width + h) * kLanes);
      }
    }
    for (int64_t r = 0; r < count_;) {
      const float* q = q_.data() + r * width;
      float* to = scores_.data() + r * stride_ + index + i;
      const int64_t left = count_ - r;
      if (left >= 6) {
        score_rows<6, P>(q, turned_.data(), width, to, stride_), r += 6;
      } else if (left >= 3) {
        score_rows<3, P>(q, turned_.data(), width, to, stride_), r += 3;
      } else {
        score_rows<1, P>(q, turned_.data(), width, to, stride_), r += 1;
      }
    }
  }

  void mask() {
    for (int64_t r = 0; r < count_; ++r) {
      float* scores = scores_.data() + r * stride_ + prefix_;
      const uint32_t* words = of_.seen_by(b_, (first_ + r) % of_.rows);
      for (int64_t j = 0; j < of_.tree(); j += 32) {
        const uint32_t word = words[j / 32];
        if (word == ~uint32_t{0}) continue;
        for (int64_t bit = 0; bit < std::min<int64_t>(32, of_.tree() - j); ++bit) {
          if (!(word >> bit & 1)) scores[j + bit] = kMasked;
        }
      }
      std::fill_n(scores + of_.tree(), kLanes, kMasked);
    }
  }

  void soften() {
    for (int64_t r = 0; r < count_; ++r) {
      float* scores = scores_.data() + r * stride_;
      Lane most = spread(kMasked);
      for (int64_t i = 0; i < keys_; i += kLanes) {
        const Lane here = load(scores + i);
        most = here > most ? here : most;
      }
      float peak = most[0];
      for (int64_t i = 1; i < kLanes; ++i) peak = std::max(peak, most[i]);
      for (int64_t i = 0; i < keys_; i += kLanes) {
        store(scores + i, exp_of(load(scores + i) - peak));
      }
    }
  }

  void weigh(const float* values, int64_t index, int64_t held) {
    const int64_t width = of_.width;
    for (int64_t r = 0; r < count_;) {
      const int64_t tall = count_ - r >= 4 ? 4 : count_ - r >= 3 ? 3 : 1;
      for (int64_t h = 0; h < width;) {
        const bool wide = width - h >= 2 * kLanes;
        // Every lane of a row has the same weights; their sum is counted once.
        float beside[4], *total = h ? beside : total_ + r;
        if (h) std::fill(beside, beside + 4, 0.0f);
        const float* weights = scores_.data() + r * stride_ + index;
        float* out = out_.data() + r * width + h;
        const auto of = [&](auto weigh) {
          weigh(weights, stride_, values + h, held, width, out, total);
        };
        if (tall == 4) {
          wide ? of(weigh_rows<4, 2>) : of(weigh_rows<4, 1>);
        } else if (tall == 3) {
          wide ? of(weigh_rows<3, 2>) : of(weigh_rows<3, 1>);
        } else {
          wide ? of(weigh_rows<1, 2>) : of(weigh_rows<1, 1>);
        }
        h += wide ? 2 * kLanes : kLanes;
      }
      r += tall;
    }
  }

  const Attention& of_;
  int64_t b_, kv_, prefix_, keys_, stride_, first_, count_;
  std::vector<float> q_, out_, scores_, turned_;
  float total_[kTile];
};

inline void attend(const Attention& of, ThreadGroup& threads) {
  const int64_t all = of.group() * of.rows, tiles = (all + kTile - 1) / kTile;
  const int64_t items = of.batch * of.kv_heads * tiles;
  threads.run(items, of.multiplications(), [&](int64_t first, int64_t last) {
    Tile tile(of);
    for (int64_t i = first; i < last; ++i) {
      const int64_t head = i / tiles, t = i % tiles, from = all * t / tiles;
      tile.move_to(head / of.kv_heads, head % of.kv_heads);
      tile.run(from, all * (t + 1) / tiles - from);
    }
  });
}

}  // namespace specjax

#endif  // SPECJAX_KERNELS_CPU_ATTEND_H_
