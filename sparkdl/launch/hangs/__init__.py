"""Detection of hanging ranks: ``watch`` decides which rank hangs, ``hang_error`` shows the stacks of all ranks.

Runs on the *driver*. Begin with ``watch``.
"""
