// What the collectives should give, computed plainly: in double, integers in 64 bits.
#ifndef SPARKDL_TESTS_REFERENCE_H_
#define SPARKDL_TESTS_REFERENCE_H_

#include <cstddef>
#include <vector>

#include "sparkdl/dtype.h"
#include "sparkdl/operation.h"

namespace sparkdl::tests {

using Bytes = std::vector<std::byte>;

// As ==, which a sanitizer makes slow, byte by byte.
bool AreSame(const Bytes& a, const Bytes& b);

// Writes a number as an element of a floating type, rounded to nearest even.
void StoreFloat(Dtype dtype, double value, std::byte* element);

// Elements number first, first + 1, ... of a rank. Small whole numbers, negative ones too where the
// type has them: sums and products of a few are exact in float32. Bools are mixed so that neither
// "or" nor "and" over the ranks is the same everywhere.
Bytes Elements(Dtype dtype, int rank, size_t first, size_t count);

// What a reduction multiplies by, before and afterwards. Powers of two before it keep it exact.
struct Scales {
  double before = 1.0;
  double after = 1.0;
};

// The elements of ranks 0..world_size-1 reduced.
Bytes Reduced(Dtype dtype, ReduceOp op, int world_size, size_t first, size_t count,
              const Scales& scales = {});

inline constexpr Dtype kDtypes[] = {
    Dtype::kFloat32, Dtype::kFloat64, Dtype::kBfloat16, Dtype::kFloat16, Dtype::kInt32,
    Dtype::kInt64,   Dtype::kUint8,   Dtype::kInt8,     Dtype::kInt16,   Dtype::kUint16,
    Dtype::kUint32,  Dtype::kUint64,  Dtype::kBool};
inline constexpr ReduceOp kReduceOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin,
                                          ReduceOp::kMax, ReduceOp::kProduct};

inline bool CanReduce(Dtype dtype, ReduceOp op) {
  return dtype != Dtype::kBool || op != ReduceOp::kAvg;
}

}  // namespace sparkdl::tests

#endif  // SPARKDL_TESTS_REFERENCE_H_
