"""How the requests of a process set come to run in one order on all its ranks.

Knows communicators, no tensors: what a request does when its turn has come is its own affair.
"""
