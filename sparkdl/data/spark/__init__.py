"""Writes a DataFrame as Parquet files to the Store. Runs on the *driver*, and as Spark tasks on executors.

Begin with :mod:`~sparkdl.data.spark.materialization`, which writes the same content only once.
:mod:`~sparkdl.data.spark.rows_key` decides when a fit gets the rows of an earlier one,
:mod:`~sparkdl.data.spark.plans` what a DataFrame reads, and
:mod:`~sparkdl.data.spark.in_place` which files need no copy; the tasks that write are in
:mod:`~sparkdl.data.spark.writing`. Spark's session, its jobs and their failures are in :mod:`sparkdl.spark`.
"""
