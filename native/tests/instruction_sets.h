// The reduction loops of all instruction sets that this machine has.
#ifndef SPARKDL_TESTS_INSTRUCTION_SETS_H_
#define SPARKDL_TESTS_INSTRUCTION_SETS_H_

#include <vector>

#include "sparkdl/reduce/reduce.h"

namespace sparkdl::tests {

inline std::vector<const ReduceKernels*> KernelsOfAllSets(Dtype dtype, ReduceOp op) {
  std::vector<const ReduceKernels*> all;
  for (const char* set : {"baseline", "avx2", "avx512"}) {
    const ReduceKernels* kernels = FindReduceKernelsFor(set, dtype, op);
    if (kernels != nullptr) all.push_back(kernels);
  }
  return all;
}

}  // namespace sparkdl::tests

#endif  // SPARKDL_TESTS_INSTRUCTION_SETS_H_
