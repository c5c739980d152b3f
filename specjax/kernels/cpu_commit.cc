// New keys and values to their places in the pages, for CPUs; `specjax/cache.py` says where.
//
// XLA has an operation of its own for every sequence and array: of a batch of 64 and 12 layers 1,536
// of them, which took as long as a sixth of a step of plain decoding.

#include "cpu.h"

namespace specjax {
namespace {

using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

ffi::Error commit(ffi::ThreadPool pool, Ints start, Ints table, ffi::RemainingArgs args,
                  ffi::RemainingRets rets) {
  const auto of_table = table.dimensions();
  const auto wrong = [] {
    return ffi::Error::InvalidArgument(
        "expected starts [B], a table [B X], caches [P K S H] that are given back, and rows "
        "[B K R H] for each; see specjax.kernels.cpu");
  };
  if (of_table.size() != 2 || start.element_count() != static_cast<size_t>(of_table[0]) ||
      args.size() != 2 * rets.size()) {
    return wrong();
  }
  const int64_t batch = of_table[0], stretches = of_table[1];
  Team team(pool);
  for (size_t i = 0; i < rets.size(); ++i) {
    const auto held = args.get<Floats>(i), fresh = args.get<Floats>(rets.size() + i);
    auto result = rets.get<Floats>(i);
    if (!held.has_value() || !fresh.has_value() || !result.has_value()) return wrong();
    const auto of_cache = (*result)->dimensions(), of_rows = fresh->dimensions();
    if (of_cache.size() != 4 || of_rows.size() != 4 || of_rows[0] != batch ||
        of_rows[1] != of_cache[1] || of_rows[3] != of_cache[3] ||
        held->element_count() != (*result)->element_count()) {
      return wrong();
    }
    float* cache = (*result)->typed_data();
    if (held->typed_data() != cache) {
      std::copy_n(held->typed_data(), held->element_count(), cache);
    }
    const float* rows = fresh->typed_data();
    const int64_t pages = of_cache[0], heads = of_cache[1], size = of_cache[2],
                  width = of_cache[3], count = of_rows[2];
    team.run(batch, batch * heads * count * width, [&](int64_t first, int64_t last) {
      for (int64_t b = first; b < last; ++b) {
        for (int64_t r = 0; r < count; ++r) {
          const int64_t at = start.typed_data()[b] + r, stretch = at / size;
          if (at < 0 || stretch >= stretches) continue;
          const int64_t page = table.typed_data()[b * stretches + stretch];
          if (page < 0 || page >= pages) continue;
          for (int64_t h = 0; h < heads; ++h) {
            std::copy_n(rows + ((b * heads + h) * count + r) * width, width,
                        cache + ((page * heads + h) * size + at % size) * width);
          }
        }
      }
    });
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace specjax

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_commit, specjax::commit,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()  // start
                                  .Arg<ffi::Buffer<ffi::S32>>()  // table
                                  .RemainingArgs()
                                  .RemainingRets());
