// What the collectives should give, computed plainly in double.
#ifndef SPARKDL_TESTS_REFERENCE_H_
#define SPARKDL_TESTS_REFERENCE_H_

#include <cstddef>
#include <vector>

#include "sparkdl/dtype.h"
#include "sparkdl/operation.h"

namespace sparkdl::tests {

using Bytes = std::vector<std::byte>;

// Small whole numbers, negative ones too unless unsigned: sums and products of a few are exact in
// float32.
double ValueAt(Dtype dtype, int rank, size_t index);

// Writes a number as an element, rounded to nearest even; integers wrap.
void Store(Dtype dtype, double value, std::byte* element);

// The numbers ValueAt(dtype, rank, first), ... as elements.
Bytes Elements(Dtype dtype, int rank, size_t first, size_t count);

// Their reduction over ranks 0..world_size-1.
Bytes Reduced(Dtype dtype, ReduceOp op, int world_size, size_t first, size_t count);

inline constexpr Dtype kReducible[] = {Dtype::kFloat32, Dtype::kFloat64, Dtype::kBfloat16,
                                       Dtype::kFloat16, Dtype::kInt32,   Dtype::kInt64,
                                       Dtype::kUint8};
inline constexpr ReduceOp kReduceOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin,
                                          ReduceOp::kMax, ReduceOp::kProduct};

}  // namespace sparkdl::tests

#endif  // SPARKDL_TESTS_REFERENCE_H_
