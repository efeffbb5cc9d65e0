// Advice about NCCL's errors.
#ifndef SPARKDL_NCCL_HINTS_H_
#define SPARKDL_NCCL_HINTS_H_

#include <string_view>

#include "sparkdl/nccl/symbols.h"

namespace sparkdl {

// Advice for a result whose last error, according to ncclGetLastError, has this text; empty if
// there is none.
std::string_view NcclHintFor(NcclResult result, std::string_view last_error);

}  // namespace sparkdl

#endif  // SPARKDL_NCCL_HINTS_H_
