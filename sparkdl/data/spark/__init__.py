"""From a DataFrame to Parquet files in the Store. Runs on the *driver*, and as Spark tasks on executors.

Begin with :mod:`~sparkdl.data.spark.materialization`, which writes a DataFrame once per content. What is the same
content says :mod:`~sparkdl.data.spark.plan`, and which files need no copy :mod:`~sparkdl.data.spark.in_place`; the
tasks that write are in :mod:`~sparkdl.data.spark.writing`.
"""
