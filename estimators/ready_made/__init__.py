"""Estimators that make their own networks of what they find in the columns. Run on the *driver*.

Each learns from the rows that a fit reads anyway (scales, categories, classes), builds a network of
:mod:`sparkdl.networks`, and has a :class:`sparkdl.estimators.TorchEstimator` train it.
"""
