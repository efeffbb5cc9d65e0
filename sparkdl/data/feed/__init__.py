"""The feed: a rank's rows as batches, in an order that a seed determines, resumable at any position.

Runs on the *rank*; the *driver* counts rows and steps with ``shards``. Begin with :mod:`~sparkdl.data.feed.feed`. Which
rows a rank reads: ``shards`` (divides the row groups, in the order of an epoch), ``epoch_plan`` (divides the rows of an
epoch that are still unread) and ``state`` (what a feed resumes from). How it reads them: ``sources`` (finds the
dataset), ``epoch_reader`` (decodes row groups), ``shard_reader`` (in threads, ahead of their use), ``cache`` (keeps
decoded row groups and footers) and ``batches`` (shuffles rows, and cuts batches). On top of a feed: ``planned_feed``
(batches planned for another number of ranks).
"""
