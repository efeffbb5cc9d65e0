// Answers like an MPI library that accepts arrays in GPU memory.
extern "C" int MPIX_Query_cuda_support() { return 1; }
