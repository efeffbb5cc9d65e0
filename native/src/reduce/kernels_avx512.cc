#define SPARKDL_KERNEL_NAMESPACE avx512
#include "reduce/kernels.h"
