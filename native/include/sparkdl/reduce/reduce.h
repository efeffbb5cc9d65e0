// Element-wise reduction of arrays with the widest vector instructions of this machine.
#ifndef SPARKDL_REDUCE_REDUCE_H_
#define SPARKDL_REDUCE_REDUCE_H_

#include <cstddef>
#include <cstdint>

#include "sparkdl/dtype.h"
#include "sparkdl/operation.h"

namespace sparkdl {

// Operations on an accumulator before it is rounded to an element.
struct Finish {
  uint64_t divisor = 1;  // divisor of averages; ignored by the other reductions
  double factor = 1.0;   // multiplied as by `scale`
};

// Loops for one dtype and one reduction. Pointers need no alignment. A destination may be identical
// to a source, but must not overlap one partially.
//
// bfloat16 and float16 accumulate in float32. Averages of integers of up to 32 bits accumulate in
// at least twice as many bits, so that they cannot wrap. Everything else accumulates in the element
// type. The sum and the product of bools are their "or" and "and". Partial results travel between
// hosts as accumulators and are rounded once, to nearest even.
struct ReduceKernels {
  size_t element_bytes;
  size_t accumulator_bytes;
  // The accumulator type is the element type, and no integers are divided.
  bool is_light;

  // destination[i] = sources[0][i] op sources[1][i] op ..., in this order, then finished.
  void (*reduce)(void* destination, const void* const* sources, size_t num_sources, size_t count,
                 const Finish& finish);
  // The same, but stores unfinished accumulators.
  void (*reduce_to_accumulators)(void* accumulators, const void* const* sources, size_t num_sources,
                                 size_t count);
  // accumulators[i] = partial[i] op accumulators[i]
  void (*combine)(void* accumulators, const void* partial, size_t count);
  // Finishes accumulators, rounds them and stores them as elements.
  void (*finalize)(void* destination, const void* accumulators, size_t count, const Finish& finish);
  // destination[i] = source[i] * factor. Integers are multiplied as float64 and rounded toward
  // zero.
  void (*scale)(void* destination, const void* source, size_t count, double factor);
};

class WireFormat;

// Parameters of the reduction of one operation.
struct Reduction {
  const ReduceKernels& kernels;
  Finish finish;
  // Format in which the accumulators, which are then float32, travel between hosts; null if
  // unchanged.
  const WireFormat* wire = nullptr;

  // Whether reducing two arrays in memory takes no longer than reading and writing them.
  bool IsAsFastAsMemory() const { return kernels.is_light && finish.factor == 1.0; }
};

// Null for the average of bools, which does not exist.
const ReduceKernels* FindReduceKernels(Dtype dtype, ReduceOp op);

// For tests: the kernels of one instruction set, "avx512", "avx2" or "baseline"; null if this
// machine lacks it.
const ReduceKernels* FindReduceKernelsFor(const char* instruction_set, Dtype dtype, ReduceOp op);

}  // namespace sparkdl

#endif  // SPARKDL_REDUCE_REDUCE_H_
