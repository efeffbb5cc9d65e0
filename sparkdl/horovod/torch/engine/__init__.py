"""Runs the requests of a process set in the same order on all its ranks.

Runs on the *rank*. Begin with ``engine``. Uses communicators but no tensors: a request itself defines what it does
when it runs.
"""
