"""Communicators over an MPI library, where the cluster has one.

Begin with :mod:`~sparkdl.collective.mpi.communicator`, then ``operations``: a plan that all ranks agree on before they
carry it out. ``library`` is the one module that imports the third-party package ``mpi4py``, on first use; the others
only name its types. Runs on ranks.
"""
