"""Tensor parallelism: the weights and the arithmetic of layers divided among the ranks of a group.

Runs on the *rank*. Begin with :mod:`.plan`, which describes the styles; :mod:`.divide` applies a plan to a model, and
:mod:`.layers` has the arithmetic of a divided layer.
"""
