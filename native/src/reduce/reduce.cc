#include "sparkdl/reduce/reduce.h"

#include <string_view>

namespace sparkdl {

namespace baseline {
const ReduceKernels* Find(Dtype dtype, ReduceOp op);
}
#if defined(SPARKDL_X86_KERNELS)
namespace avx2 {
const ReduceKernels* Find(Dtype dtype, ReduceOp op);
}
namespace avx512 {
const ReduceKernels* Find(Dtype dtype, ReduceOp op);
}
#endif

namespace {

using FindFunction = const ReduceKernels* (*)(Dtype, ReduceOp);

struct InstructionSet {
  const char* name;
  FindFunction find;
};

bool IsSupported(std::string_view name) {
#if defined(SPARKDL_X86_KERNELS)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
                        __builtin_cpu_supports("fma");
  if (name == "avx2") return has_avx2;
  if (name == "avx512") {
    return has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return name == "baseline";
}

constexpr InstructionSet kWidestFirst[] = {
#if defined(SPARKDL_X86_KERNELS)
    {"avx512", &avx512::Find},
    {"avx2", &avx2::Find},
#endif
    {"baseline", &baseline::Find},
};

const InstructionSet& Widest() {
  static const InstructionSet& chosen = []() -> const InstructionSet& {
    for (const InstructionSet& set : kWidestFirst) {
      if (IsSupported(set.name)) return set;
    }
    return kWidestFirst[0];
  }();
  return chosen;
}

}  // namespace

const ReduceKernels* FindReduceKernels(Dtype dtype, ReduceOp op) {
  return Widest().find(dtype, op);
}

const ReduceKernels* FindReduceKernelsFor(const char* instruction_set, Dtype dtype, ReduceOp op) {
  for (const InstructionSet& set : kWidestFirst) {
    if (std::string_view(set.name) == instruction_set && IsSupported(set.name)) {
      return set.find(dtype, op);
    }
  }
  return nullptr;
}

}  // namespace sparkdl
