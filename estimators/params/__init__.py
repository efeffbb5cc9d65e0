"""The Params of the estimators: a table of names, types, defaults, checks and documentation. Runs on the *driver*.

Begin with :mod:`~sparkdl.estimators.params.table`, which defines an entry. The entries are in ``inputs``, ``training``
and ``running``; ``estimator`` combines them and checks conditions on several Params; ``base`` is the base of all
classes with Params.
"""
