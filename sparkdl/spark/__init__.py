"""What is Spark's own: the session, its jobs, and what their failures mean.

Runs on the *driver*. Begin with :mod:`~sparkdl.spark.jobs`, which names the jobs that a block runs. This package knows
no data and no ranks; pyspark is imported inside the functions that use it.
"""
