#include "bindings/torch_tensor.h"

#include <string>
#include <unordered_map>

#include "bindings/errors.h"

namespace sparkdl::bindings {

// DLPackExchangeAPI of DLPack 1.3, which __dlpack_c_exchange_api__ of a tensor type points to.
struct ExchangeApi {
  uint32_t major;
  uint32_t minor;
  const ExchangeApi* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*view_of_object)(void* object, TensorView::View* view);
  void* current_stream;
};

namespace {

constexpr uint32_t kMajor = 1;

// Number of types that are remembered. Programs have few, unless a function creates a class in each
// call.
constexpr size_t kMaxKnown = 64;

// Function table of torch tensors of this type; null if it is not such a type, or this torch has no
// table.
const ExchangeApi* Find(nb::handle type) {
  const nb::object torch = nb::module_::import_("sys").attr("modules").attr("get")("torch");
  if (torch.is_none()) return nullptr;
  // Tensors of other libraries may be immutable, which a view does not say, and some of torch's
  // other classes only stand for tensors elsewhere.
  const nb::object tensor = nb::getattr(torch, "Tensor", nb::none());
  const nb::object layers = nb::getattr(torch, "nn", nb::none());
  const nb::object parameter = nb::getattr(layers, "Parameter", nb::none());
  if (!type.is(tensor) && !type.is(parameter)) return nullptr;
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  const auto* api =
      static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (api != nullptr && api->major != kMajor) api = api->previous;
  return api;
}

const ExchangeApi* ApiOf(nb::handle type) {
  // Guarded by the GIL. A type is never released, because another one could otherwise take its
  // address.
  static auto& known = *new std::unordered_map<PyObject*, const ExchangeApi*>();
  const auto found = known.find(type.ptr());
  if (found != known.end()) return found->second;
  const ExchangeApi* const api = Find(type);
  PyErr_Clear();
  if (known.size() < kMaxKnown) known.emplace(type.inc_ref().ptr(), api);
  return api;
}

bool IsTrue(PyObject* value) {
  if (value == nullptr) throw nb::python_error();
  const bool is_true = value == Py_True;
  Py_DECREF(value);
  return is_true;
}

}  // namespace

std::optional<TensorView> TensorView::Of(const char* name, nb::handle object) {
  const ExchangeApi* const api = ApiOf(object.type());
  if (api == nullptr) return std::nullopt;
  static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  TensorView tensor;
  PyObject* const self = object.ptr();
  if (IsTrue(PyObject_GetAttr(self, requires_grad))) {
    RaiseInvalid(std::string(name) + " is a tensor that requires a gradient; pass tensor.detach()");
  }
  if (IsTrue(PyObject_VectorcallMethod(is_neg, &self, 1, nullptr))) {
    RaiseInvalid(std::string(name) +
                 " is a tensor that is yet to be negated; pass tensor.resolve_neg()");
  }
  if (api->view_of_object(self, &tensor.view_) == 0) return tensor;
  PyErr_Clear();
  return std::nullopt;
}

}  // namespace sparkdl::bindings
