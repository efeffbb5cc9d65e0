"""The collectives of the c10d backend for tensors that lie on GPUs.

Begin with :mod:`~sparkdl.torch.gpu.accelerator`, which chooses: NCCL (``nccl_tensors``), NCCL inside each of several
hosts (``hierarchical``), or a way through host memory (``staged``) for ranks that share a GPU, which NCCL refuses.
Runs on ranks.
"""
