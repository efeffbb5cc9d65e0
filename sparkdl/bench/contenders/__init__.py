"""The code that runs in the processes of the contenders of ``sparkdl bench``; :mod:`sparkdl.bench.contest` starts them.

They are ranks, except in ``fit``, whose processes are drivers. Begin with :mod:`~sparkdl.bench.contenders.rank`, which
is the program of a rank.
"""
