"""What runs in the process of a contender of ``sparkdl bench``, which :mod:`sparkdl.bench.contest` starts.

Begin with :mod:`~sparkdl.bench.contenders.rank`, which a contender's process runs.
"""
