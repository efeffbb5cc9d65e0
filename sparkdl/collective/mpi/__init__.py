"""Communicators over an MPI library, for clusters that have one.

Begin with :mod:`~sparkdl.collective.mpi.communicator`, then ``operations``: the ranks agree on the plan of an operation
before they carry it out. ``library`` is the only module that imports the third-party package ``mpi4py``, on first use;
the others only name its types. Runs on ranks.
"""
