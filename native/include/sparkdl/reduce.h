// Reducing arrays element by element, by the widest vector instructions of this machine.
#ifndef SPARKDL_REDUCE_H_
#define SPARKDL_REDUCE_H_

#include <cstddef>
#include <cstdint>

#include "sparkdl/dtype.h"
#include "sparkdl/operation.h"

namespace sparkdl {

// The loops for one dtype and one reduction. Pointers need no alignment. A destination may be one
// of the sources, not overlap one partly.
//
// bfloat16 and float16 accumulate in float32; the average of uint8 and int32 accumulates in twice
// the bits or more, so that it cannot wrap; everything else accumulates in its own type. Partial
// results between hosts travel as accumulators and are rounded once, to nearest even.
struct ReduceKernels {
  size_t element_bytes;
  size_t accumulator_bytes;

  // destination[i] = sources[0][i] op sources[1][i] op ..., in this order. divisor is what an
  // average divides by; the other reductions ignore it.
  void (*reduce)(void* destination, const void* const* sources, size_t num_sources, size_t count,
                 uint64_t divisor);
  // The same, left as accumulators and not yet divided.
  void (*reduce_to_accumulators)(void* accumulators, const void* const* sources, size_t num_sources,
                                 size_t count);
  // accumulators[i] = partial[i] op accumulators[i]
  void (*combine)(void* accumulators, const void* partial, size_t count);
  // Divides an average, rounds, stores.
  void (*finalize)(void* destination, const void* accumulators, size_t count, uint64_t divisor);
};

// Null if the dtype cannot be reduced.
const ReduceKernels* FindReduceKernels(Dtype dtype, ReduceOp op);

// Name of the instruction set in use: "avx512", "avx2" or "baseline".
const char* ReduceInstructionSet();

// For tests: the kernels of one instruction set; null if this machine lacks it.
const ReduceKernels* FindReduceKernelsFor(const char* instruction_set, Dtype dtype, ReduceOp op);

}  // namespace sparkdl

#endif  // SPARKDL_REDUCE_H_
