// 16-bit formats in which float32 can travel between hosts.
#ifndef SPARKDL_TCP_WIRE_FORMAT_H_
#define SPARKDL_TCP_WIRE_FORMAT_H_

#include <cstddef>

#include "sparkdl/dtype.h"
#include "sparkdl/operation.h"
#include "sparkdl/pieces.h"
#include "sparkdl/reduce/reduce.h"

namespace sparkdl {

// Rounds float32 to a 16-bit type, to nearest even, and converts it back. Rounding again changes
// nothing.
class WireFormat {
 public:
  // Null for float32, which travels unchanged, and for dtypes that are not 16-bit floats.
  static const WireFormat* Find(Dtype wire);

  // Size of one packed number.
  size_t bytes() const { return kernels_->element_bytes; }

  void Pack(void* packed, const void* values, size_t count) const {
    kernels_->finalize(packed, values, count, {});
  }
  void Unpack(void* values, const void* packed, size_t count) const {
    kernels_->reduce_to_accumulators(values, &packed, 1, count);
  }

  // Packs and unpacks float32 in place, which rounds it.
  void Round(const Pieces& values) const;

 private:
  explicit WireFormat(Dtype wire) : kernels_(FindReduceKernels(wire, ReduceOp::kSum)) {}

  const ReduceKernels* kernels_;
};

}  // namespace sparkdl

#endif  // SPARKDL_TCP_WIRE_FORMAT_H_
