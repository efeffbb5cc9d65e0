"""The Params of the estimators: a table of names, types, defaults, checks and documentation. Runs on the *driver*.

Begin with :mod:`~sparkdl.estimators.params.table`, which says what an entry is. The entries are in ``inputs``,
``training`` and ``running``; ``estimator`` combines them and checks what depends on several; ``base`` holds what all
classes with Params share.
"""
