"""Runs the requests of a process set in the same order on all its ranks.

Uses communicators but no tensors: a request itself defines what it does when it runs.
"""
