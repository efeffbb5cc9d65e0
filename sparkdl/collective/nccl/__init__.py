"""NCCL between ranks that have one GPU each, in addition to the communicator of these ranks.

Begin with :mod:`~sparkdl.collective.nccl.opening`, which finds the library, makes the ranks agree and opens a
``group``. ``hierarchy`` is for several hosts: NCCL inside each host, process sets across hosts. Takes arrays in GPU
memory; does not depend on torch. Runs on ranks.
"""
