"""The feed: a rank's rows as batches, in an order that a seed fixes, from any position again.

Runs on the *rank*. Begin with :mod:`~sparkdl.data.feed.feed`; the way of the rows is ``shards`` (which rows each
rank reads), ``plan`` (the row groups of an epoch, in order), ``epoch_reader`` (reads row groups ahead), ``row_stream``
(rows in order) and ``batches``.
"""
