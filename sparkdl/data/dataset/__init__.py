"""A dataset of Parquet files as the feed sees it: columns and row groups.

Runs on driver and ranks, without Spark and Petastorm. Begin with :mod:`~sparkdl.data.dataset.dataset`; the footers of
the files are read in :mod:`~sparkdl.data.dataset.footers`.
"""
