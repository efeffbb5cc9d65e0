#include "bindings/nccl_class.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/errors.h"
#include "bindings/handle_class.h"
#include "bindings/text.h"
#include "sparkdl/nccl/communicator.h"

namespace sparkdl::bindings {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

template <typename T>
T ValueOrRaise(Result<T> result) {
  RaiseIfError(result.status());
  return std::move(result).value();
}

template <typename Call>
auto WithoutGil(const Call& call) {
  const nb::gil_scoped_release release;
  return call();
}

class NcclLibraryObject {
 public:
  NcclLibraryObject(const std::vector<std::string>& nccl, const std::vector<std::string>& cuda)
      : library_(ValueOrRaise(NcclLibrary::Load(nccl, cuda))) {}

  const std::shared_ptr<const NcclLibrary>& get() const { return library_; }
  std::string version() const { return FormatNcclVersion(library_->version()); }

  nb::bytes UniqueId() const {
    const NcclUniqueId id = ValueOrRaise(library_->NewUniqueId());
    return nb::bytes(id.bytes, sizeof(id.bytes));
  }

  std::pair<std::string, std::string> IdOfGpu(int gpu) const {
    const NcclLibrary::GpuId id = ValueOrRaise(library_->IdOfGpu(gpu));
    return {id.uuid, id.bus_id};
  }

 private:
  std::shared_ptr<const NcclLibrary> library_;
};

class NcclCommunicatorObject {
 public:
  NcclCommunicatorObject(const NcclLibraryObject& library, int gpu, const nb::bytes& unique_id,
                         int rank, int world_size, const std::string& name, double timeout_s) {
    NcclUniqueId id = {};
    if (unique_id.size() != sizeof(id.bytes)) {
      RaiseIfError(Status(StatusCode::kInvalidArgument,
                          "unique_id must have " + std::to_string(sizeof(id.bytes)) +
                              " bytes, got " + std::to_string(unique_id.size())));
    }
    std::memcpy(id.bytes, unique_id.c_str(), sizeof(id.bytes));
    NcclOptions options{
        .rank = rank, .world_size = world_size, .name = name, .timeout_s = timeout_s};
    core_ = ValueOrRaise(
        WithoutGil([&] { return NcclCommunicator::Begin(library.get(), gpu, id, options); }));
  }

  explicit NcclCommunicatorObject(std::unique_ptr<NcclCommunicator> core)
      : core_(std::move(core)) {}

  bool WaitReady(double timeout_s) {
    return ValueOrRaise(WithoutGil([&] { return core_->WaitReady(timeout_s, &HasSignal); }));
  }

  std::unique_ptr<NcclCommunicatorObject> Split(std::optional<int> color, int key, int rank,
                                                int world_size, const std::string& name,
                                                double timeout_s) {
    NcclOptions options{
        .rank = rank, .world_size = world_size, .name = name, .timeout_s = timeout_s};
    auto core = ValueOrRaise(WithoutGil(
        [&] { return core_->BeginSplit(color.value_or(kNcclNoColor), key, options, &HasSignal); }));
    if (core == nullptr) return nullptr;
    return std::make_unique<NcclCommunicatorObject>(std::move(core));
  }

  uint64_t Run(const std::vector<NcclOperation>& operations, uintptr_t stream, double timeout_s) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): Python has streams as integers
    auto* cuda_stream = reinterpret_cast<CudaStream>(stream);
    return ValueOrRaise(
        WithoutGil([&] { return core_->Run(operations, cuda_stream, timeout_s, &HasSignal); }));
  }

  void Wait(uint64_t number, double timeout_s) {
    RaiseIfError(WithoutGil([&] { return core_->Wait(number, timeout_s, &HasSignal); }));
  }

  bool IsDone(uint64_t number) { return ValueOrRaise(core_->IsDone(number)); }
  bool busy() const { return core_->busy(); }

  void Abort(const std::string& reason) { core_->Abort(Status(StatusCode::kAborted, reason)); }

  void Close() {
    RaiseIfError(WithoutGil([&] { return core_->Close(&HasSignal); }));
  }

  nb::object failure() const {
    const auto text = core_->failure();
    if (!text.has_value()) return nb::none();
    return ToPythonText(*text);
  }

 private:
  std::unique_ptr<NcclCommunicator> core_;
};

// What all operations have: where, how much, of what.
NcclOperation MakeOperation(NcclKind kind, uintptr_t input, uintptr_t output, size_t count,
                            std::string_view dtype) {
  NcclOperation operation;
  operation.kind = kind;
  operation.input = reinterpret_cast<const void*>(input);  // NOLINT(performance-no-int-to-ptr)
  operation.output = reinterpret_cast<void*>(output);      // NOLINT(performance-no-int-to-ptr)
  operation.count = count;
  operation.type = ValueOrRaise(NcclTypeOf(dtype)).number;
  return operation;
}

NcclOperation MakeReduction(NcclKind kind, uintptr_t input, uintptr_t output, size_t count,
                            std::string_view dtype, std::string_view op, const nb::bytes& factor) {
  NcclOperation operation = MakeOperation(kind, input, output, count, dtype);
  operation.reduction = ValueOrRaise(NcclReductionOf(op));
  operation.factor = std::string(factor.c_str(), factor.size());
  const size_t bytes = ValueOrRaise(NcclTypeOf(dtype)).bytes;
  if (!operation.factor.empty() && (op != "sum" || operation.factor.size() != bytes)) {
    RaiseIfError(Status(StatusCode::kInvalidArgument,
                        "factor must be one " + std::string(dtype) + " (" + std::to_string(bytes) +
                            " bytes) of a sum, got " + std::to_string(factor.size()) +
                            " bytes with op='" + std::string(op) + "'"));
  }
  return operation;
}

void DefineOperation(nb::module_& module) {
  using Op = NcclOperation;
  nb::class_<Op>(module, "NcclOperation",
                 "An operation of NCCL on memory of the GPU, given by its address.\n\n"
                 "input may equal output; for reduce_scatter and allgather it may be this rank's "
                 "block of the other. factor, for sums, is one element as bytes that every rank's "
                 "input is multiplied by.")
      .def_static(
          "allreduce",
          [](uintptr_t input, uintptr_t output, size_t count, std::string_view dtype,
             std::string_view op, const nb::bytes& factor) {
            return MakeReduction(NcclKind::kAllReduce, input, output, count, dtype, op, factor);
          },
          "input"_a, "output"_a, "count"_a, "dtype"_a, "op"_a = "sum", "factor"_a = nb::bytes(""),
          "Reduce count elements over all ranks; all get the result.")
      .def_static(
          "reduce_scatter",
          [](uintptr_t input, uintptr_t output, size_t count, std::string_view dtype,
             std::string_view op, const nb::bytes& factor) {
            return MakeReduction(NcclKind::kReduceScatter, input, output, count, dtype, op, factor);
          },
          "input"_a, "output"_a, "count"_a, "dtype"_a, "op"_a = "sum", "factor"_a = nb::bytes(""),
          "Reduce world_size blocks of count elements over all ranks; rank r gets block r.")
      .def_static(
          "reduce",
          [](uintptr_t input, uintptr_t output, size_t count, std::string_view dtype, int root,
             std::string_view op, const nb::bytes& factor) {
            Op operation =
                MakeReduction(NcclKind::kReduce, input, output, count, dtype, op, factor);
            operation.rank = root;
            return operation;
          },
          "input"_a, "output"_a, "count"_a, "dtype"_a, "root"_a, "op"_a = "sum",
          "factor"_a = nb::bytes(""),
          "Reduce count elements over all ranks; the root gets the "
          "result.")
      .def_static(
          "allgather",
          [](uintptr_t input, uintptr_t output, size_t count, std::string_view dtype) {
            return MakeOperation(NcclKind::kAllGather, input, output, count, dtype);
          },
          "input"_a, "output"_a, "count"_a, "dtype"_a,
          "Gather every rank's block of count elements, in order of ranks.")
      .def_static(
          "broadcast",
          [](uintptr_t input, uintptr_t output, size_t count, std::string_view dtype, int root) {
            Op operation = MakeOperation(NcclKind::kBroadcast, input, output, count, dtype);
            operation.rank = root;
            return operation;
          },
          "input"_a, "output"_a, "count"_a, "dtype"_a, "root"_a,
          "Give every rank the root's count elements.")
      .def_static(
          "send",
          [](uintptr_t input, size_t count, std::string_view dtype, int to) {
            Op operation = MakeOperation(NcclKind::kSend, input, 0, count, dtype);
            operation.rank = to;
            return operation;
          },
          "input"_a, "count"_a, "dtype"_a, "to"_a, "Send to a rank, which must receive as much.")
      .def_static(
          "recv",
          [](uintptr_t output, size_t count, std::string_view dtype, int source) {
            Op operation = MakeOperation(NcclKind::kRecv, 0, output, count, dtype);
            operation.rank = source;
            return operation;
          },
          "output"_a, "count"_a, "dtype"_a, "source"_a, "Receive what a rank sends.")
      .def("__repr__", [](const Op& operation) { return "<" + Describe(operation) + ">"; });
}

void DefineCommunicator(nb::module_& module) {
  using Self = NcclCommunicatorObject;
  nb::class_<Self>(module, "NcclCommunicator",
                   "A communicator of NCCL, one GPU per rank. No call waits for data.")
      .def(nb::init<const NcclLibraryObject&, int, const nb::bytes&, int, int, const std::string&,
                    double>(),
           nb::kw_only(), "library"_a, "gpu"_a, "unique_id"_a, "rank"_a, "world_size"_a, "name"_a,
           "timeout_s"_a,
           "Begin to open it; all ranks do so with one unique_id, and then wait_ready.\n\n"
           "timeout_s is how long close may take, in seconds.")
      .def("wait_ready", &Self::WaitReady, "timeout_s"_a,
           "Wait for the end of opening or splitting; False if that takes longer.")
      .def("split", &Self::Split, "color"_a, "key"_a, nb::kw_only(), "rank"_a, "world_size"_a,
           "name"_a, "timeout_s"_a,
           nb::sig("def split(self, color: int | None, key: int, *, "
                   "rank: int, world_size: int, name: str, timeout_s: "
                   "float) -> NcclCommunicator | None"),
           "Begin to split off the ranks with this color, in the order of their keys.\n\n"
           "All ranks make this call; one without a color gets None.")
      .def("run", &Self::Run, "operations"_a, "stream"_a, "timeout_s"_a,
           "Put operations on a stream (a cudaStream_t as an integer) as one group.\n\n"
           "Returns their common number. They are to be complete within timeout_s seconds, or the "
           "communicator fails.")
      .def("done", &Self::IsDone, "number"_a,
           "Whether this number and all before it are complete on the GPU.")
      .def("wait", &Self::Wait, "number"_a, "timeout_s"_a,
           "Block until done. CommunicatorTimeoutError if that takes longer; it then continues.")
      .def_prop_ro("busy", &Self::busy, "Whether anything is known to be under way.")
      .def("abort", &Self::Abort, "reason"_a,
           "End what is under way on this rank and refuse what follows; returns at once.")
      .def("close", &Self::Close, "Wait for what is under way, then leave. Can be called again.")
      .def_prop_ro("failure", &Self::failure, nb::sig("def failure(self) -> str | None"),
                   "Why it failed; None if it did not.");
}

}  // namespace

void DefineNccl(nb::module_& module) {
  nb::class_<NcclLibraryObject>(module, "NcclLibrary", "NCCL and the CUDA driver, loaded.")
      .def(nb::init<const std::vector<std::string>&, const std::vector<std::string>&>(), "nccl"_a,
           "cuda"_a,
           "Load the first of the names or paths of each that can be opened.\n\n"
           "Raises CommunicatorError with what was tried.")
      .def_prop_ro(
          "path", [](const NcclLibraryObject& self) { return self.get()->path(); },
          "The file that was taken.")
      .def_prop_ro("version", &NcclLibraryObject::version, "Such as '2.27.6'.")
      .def("unique_id", &NcclLibraryObject::UniqueId,
           "An id by which ranks find each other: made by one, given to all.")
      .def("gpu_id", &NcclLibraryObject::IdOfGpu, "gpu"_a,
           "Uuid and bus address of a GPU that this process sees.");
  DefineOperation(module);
  DefineCommunicator(module);
}

}  // namespace sparkdl::bindings
