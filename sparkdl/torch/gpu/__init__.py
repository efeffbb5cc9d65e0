"""The collectives of the c10d backend for tensors that lie on GPUs.

:mod:`~sparkdl.torch.gpu.accelerator` chooses among NCCL (``nccl_tensors``), NCCL inside each of several hosts
(``hierarchical``), and host memory (``staged``) for ranks that share a GPU, which NCCL refuses. Runs on the *rank*.
"""
