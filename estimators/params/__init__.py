"""The Params of the estimators: names, types, defaults, checks. Runs on the *driver*.

Begin with :mod:`~sparkdl.estimators.params.estimator`, which brings the mixins together and makes the spec of a fit;
the mixins are in ``inputs``, ``training`` and ``running``, what all of them share in ``base``.
"""
