#define SPARKDL_KERNEL_NAMESPACE baseline
#include "reduce/kernels.h"
