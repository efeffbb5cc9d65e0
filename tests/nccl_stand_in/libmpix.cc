// Stands for the answer of an MPI library that takes arrays in GPU memory.
extern "C" int MPIX_Query_cuda_support() { return 1; }
