"""The code that runs in the processes of the contenders of ``sparkdl bench``; :mod:`sparkdl.bench.contest` starts them.

Begin with :mod:`~sparkdl.bench.contenders.rank`, which is the program of such a process.
"""
