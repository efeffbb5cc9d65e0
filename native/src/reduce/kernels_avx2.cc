#define SPARKDL_KERNEL_NAMESPACE avx2
#include "reduce/kernels.h"
