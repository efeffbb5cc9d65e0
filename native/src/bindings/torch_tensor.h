// A torch tensor as it lies, without the DLPack capsule or the NumPy array of it that would take
// longer to make than a small operation.
#ifndef SPARKDL_BINDINGS_TORCH_TENSOR_H_
#define SPARKDL_BINDINGS_TORCH_TENSOR_H_

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace sparkdl::bindings {

namespace nb = nanobind;

// What DLPack's DLTensor says, by the names by which nanobind's arrays tell it; see
// https://dmlc.github.io/dlpack/latest/c_api.html. Valid as long as the tensor.
class TensorView {
 public:
  // None where the object is no torch tensor, this torch cannot tell (before 2.10), or the tensor
  // has no such memory, as a sparse one. Raises ParamError, with the argument's name, where the
  // memory is not all that the tensor is.
  static std::optional<TensorView> Of(const char* name, nb::handle object);

  void* data() const { return static_cast<std::byte*>(view_.data) + view_.byte_offset; }
  size_t ndim() const { return static_cast<size_t>(view_.ndim); }
  size_t shape(size_t axis) const { return static_cast<size_t>(view_.shape[axis]); }
  const int64_t* shape_ptr() const { return view_.shape; }
  int64_t stride(size_t axis) const { return view_.strides[axis]; }
  int device_type() const { return view_.device_type; }
  nb::dlpack::dtype dtype() const { return view_.dtype; }

 private:
  // DLTensor of DLPack 1, whose layout is fixed.
  struct View {
    void* data;
    int32_t device_type;
    int32_t device_id;
    int32_t ndim;
    nb::dlpack::dtype dtype;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
  };

  friend struct ExchangeApi;
  View view_{};
};

}  // namespace sparkdl::bindings

#endif  // SPARKDL_BINDINGS_TORCH_TENSOR_H_
