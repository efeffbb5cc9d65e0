// Reducing arrays element by element, by the widest vector instructions of this machine.
#ifndef SPARKDL_REDUCE_REDUCE_H_
#define SPARKDL_REDUCE_REDUCE_H_

#include <cstddef>
#include <cstdint>

#include "sparkdl/dtype.h"
#include "sparkdl/operation.h"

namespace sparkdl {

// What becomes of an accumulator before it is rounded to an element.
struct Finish {
  uint64_t divisor = 1;  // what an average divides by; the other reductions ignore it
  double factor = 1.0;   // multiplied as scale does
};

// The loops for one dtype and one reduction. Pointers need no alignment. A destination may be one
// of the sources, not overlap one partly.
//
// bfloat16 and float16 accumulate in float32; the average of integers of up to 32 bits accumulates
// in twice the bits or more, so that it cannot wrap; everything else accumulates in its own type.
// The sum and the product of bools are their "or" and "and". Partial results between hosts travel
// as accumulators and are rounded once, to nearest even.
struct ReduceKernels {
  size_t element_bytes;
  size_t accumulator_bytes;
  // Elements accumulate in their own type and are not divided as integers.
  bool is_light;

  // destination[i] = sources[0][i] op sources[1][i] op ..., in this order, finished.
  void (*reduce)(void* destination, const void* const* sources, size_t num_sources, size_t count,
                 const Finish& finish);
  // The same, left as unfinished accumulators.
  void (*reduce_to_accumulators)(void* accumulators, const void* const* sources, size_t num_sources,
                                 size_t count);
  // accumulators[i] = partial[i] op accumulators[i]
  void (*combine)(void* accumulators, const void* partial, size_t count);
  // Finishes, rounds, stores.
  void (*finalize)(void* destination, const void* accumulators, size_t count, const Finish& finish);
  // destination[i] = source[i] * factor. Integers are multiplied as float64 and rounded toward
  // zero.
  void (*scale)(void* destination, const void* source, size_t count, double factor);
};

class WireFormat;

// How one operation reduces.
struct Reduction {
  const ReduceKernels& kernels;
  Finish finish;
  // How its accumulators, which are float32, travel between hosts; null if they do as they are.
  const WireFormat* wire = nullptr;

  // Whether two arrays in memory take no longer to reduce than to read and write.
  bool IsAsFastAsMemory() const { return kernels.is_light && finish.factor == 1.0; }
};

// Null for the average of bools, which is none.
const ReduceKernels* FindReduceKernels(Dtype dtype, ReduceOp op);

// Name of the instruction set in use: "avx512", "avx2" or "baseline".
const char* ReduceInstructionSet();

// For tests: the kernels of one instruction set; null if this machine lacks it.
const ReduceKernels* FindReduceKernelsFor(const char* instruction_set, Dtype dtype, ReduceOp op);

}  // namespace sparkdl

#endif  // SPARKDL_REDUCE_REDUCE_H_
