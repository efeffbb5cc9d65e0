// Direct access to a torch tensor. Creating a DLPack capsule or a NumPy array would take longer
// than a small operation.
#ifndef SPARKDL_BINDINGS_TORCH_TENSOR_H_
#define SPARKDL_BINDINGS_TORCH_TENSOR_H_

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace sparkdl::bindings {

namespace nb = nanobind;

// The content of DLPack's DLTensor, under the names that nanobind's arrays use; see
// https://dmlc.github.io/dlpack/latest/c_api.html. Valid as long as the tensor exists.
class TensorView {
 public:
  // Empty if the object is not a torch tensor, this torch has no function table (before 2.10), or
  // the tensor has no such memory, as a sparse one. Raises ParamError, which names the argument, if
  // the memory alone is not the value of the tensor: it requires a gradient or is yet to be
  // negated.
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
