"""Estimators that build their networks from the content of the columns. Run on the *driver*.

Each learns scales, categories and classes from the rows of the fit, builds a network of :mod:`sparkdl.networks`, and
trains it with a :class:`sparkdl.estimators.TorchEstimator`. Begin with ``estimator``, which all of them but the
language model share, and ``tabular``, the simplest one.
"""
