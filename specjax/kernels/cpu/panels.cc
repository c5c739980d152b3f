// The XLA FFI handler of `product.h`.

#include "product.h"

namespace specjax {
namespace {

ffi::Error panels_product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x,
                          ffi::Buffer<ffi::F32> panels, ffi::ResultBuffer<ffi::F32> y) {
  const auto in = x.dimensions(), weight = panels.dimensions(), out = y->dimensions();
  if (in.size() < 1 || out.size() != in.size() || weight.size() != 3 || weight[1] != in.back() ||
      weight[2] != kWidth || out.back() != weight[0] * kWidth) {
    return ffi::Error::InvalidArgument(
        "expected x [.., K], panels [N / 16, K, 16] and y [.., N]; see "
        "specjax.kernels.dispatch.product");
  }
  const int64_t n = out.back();
  if (y->element_count() == 0) return ffi::Error::Success();
  const Product of{x.typed_data(), panels.typed_data(), y->typed_data(),
                   static_cast<int64_t>(y->element_count()) / n, in.back(), n};
  ThreadGroup threads(pool, of.multiplications());
  multiply(of, threads);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace specjax

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_panels, specjax::panels_product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
