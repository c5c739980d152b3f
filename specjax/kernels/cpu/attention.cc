// The XLA FFI handler of `attend.h`.

#include "attend.h"

namespace specjax {
namespace {

ffi::Error tree_attention(ffi::ThreadPool pool, Floats q, Floats k_tree, Floats v_tree,
                          Floats k_pages, Floats v_pages, Ints prefix, ffi::Buffer<ffi::U32> bits,
                          Ints table, ffi::ResultBuffer<ffi::F32> out) {
  const auto of_q = q.dimensions(), of_tree = k_tree.dimensions(), pages = k_pages.dimensions(),
             of_bits = bits.dimensions(), of_table = table.dimensions();
  const bool ranks = of_q.size() == 4 && of_tree.size() == 4 && pages.size() == 4 &&
                     of_bits.size() == 3 && of_table.size() == 2;
  const auto same = [](auto a, auto b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  };
  if (!ranks || !same(v_tree.dimensions(), of_tree) || !same(v_pages.dimensions(), pages) ||
      !same(out->dimensions(), of_q) || of_q[3] % kWidth || of_q[1] % pages[1] ||
      of_tree[0] != of_q[0] || of_tree[1] != pages[1] || of_tree[3] != of_q[3] ||
      pages[3] != of_q[3] || prefix.element_count() != static_cast<size_t>(of_q[0]) ||
      of_table[0] != of_q[0] || (of_bits[0] != 1 && of_bits[0] != of_q[0]) ||
      of_bits[1] != of_q[2] || of_bits[2] * 32 < of_tree[2]) {
    return ffi::Error::InvalidArgument(
        "expected q [B N T H], keys and values of the tree [B K T2 H], pages [P K S H], prefixes "
        "[B], bits [1 or B, T, W] and a table [B X]; see specjax.kernels.cpu");
  }
  if (out->element_count() == 0) return ffi::Error::Success();
  const int64_t batch = of_q[0], heads = of_q[1], rows = of_q[2], width = of_q[3];
  const Strides strides{heads * rows * width, rows * width, width};
  const Attention of{.q = q.typed_data(),
                     .out = out->typed_data(),
                     .of_q = strides,
                     .of_out = strides,
                     .before = {nullptr, nullptr, 0},
                     .own = {k_tree.typed_data(), v_tree.typed_data(), of_tree[2]},
                     .k_pages = k_pages.typed_data(),
                     .v_pages = v_pages.typed_data(),
                     .prefix = prefix.typed_data(),
                     .table = table.typed_data(),
                     .bits = bits.typed_data(),
                     .batch = batch,
                     .heads = heads,
                     .kv_heads = pages[1],
                     .rows = rows,
                     .width = width,
                     .pages = pages[0],
                     .size = pages[2],
                     .stretches = of_table[1],
                     .words = of_bits[2],
                     .own_bits = of_bits[0] > 1};
  ThreadGroup threads(pool, of.multiplications());
  attend(of, threads);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace specjax

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_attention, specjax::tree_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()   // q
                                  .Arg<ffi::Buffer<ffi::F32>>()   // k_tree
                                  .Arg<ffi::Buffer<ffi::F32>>()   // v_tree
                                  .Arg<ffi::Buffer<ffi::F32>>()   // k_pages
                                  .Arg<ffi::Buffer<ffi::F32>>()   // v_pages
                                  .Arg<ffi::Buffer<ffi::S32>>()   // prefix
                                  .Arg<ffi::Buffer<ffi::U32>>()   // bits
                                  .Arg<ffi::Buffer<ffi::S32>>()   // table
                                  .Ret<ffi::Buffer<ffi::F32>>());
