"""The collectives of the c10d backend for tensors that lie on GPUs.

Begin with :mod:`~sparkdl.torch.gpu.accelerator`: it chooses among NCCL (``nccl``), NCCL inside each of several
hosts (``hierarchical``), and host memory (``staged``) for ranks that share a GPU, which NCCL refuses by default. They
run on a stream beside the caller's (``lanes``). Runs on the *rank*.
"""
