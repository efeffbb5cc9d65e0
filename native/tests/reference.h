// Expected results of the collectives, computed in a plain way: in double, integers in 64 bits.
#ifndef SPARKDL_TESTS_REFERENCE_H_
#define SPARKDL_TESTS_REFERENCE_H_

#include <cstddef>
#include <vector>

#include "sparkdl/dtype.h"
#include "sparkdl/operation.h"

namespace sparkdl::tests {

using Bytes = std::vector<std::byte>;

// Like ==, but not byte by byte, which a sanitizer makes slow.
bool AreSame(const Bytes& a, const Bytes& b);

// Writes a number as an element of a floating-point type, rounded to nearest even.
void StoreFloat(Dtype dtype, double value, std::byte* element);

// Elements number first, first + 1, ... of a rank: small integers, also negative ones if the type
// has them, so that sums and products of a few are exact in float32. Bools are mixed so that
// neither their "or" nor their "and" over the ranks is the same everywhere.
Bytes Elements(Dtype dtype, int rank, size_t first, size_t count);

// Factors of a reduction, before and after it. A power of two before it keeps it exact.
struct Scales {
  double before = 1.0;
  double after = 1.0;
};

// The reduction of the elements of ranks 0 to world_size - 1.
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
