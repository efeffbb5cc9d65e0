"""The requests that an engine runs: what each collective does with its tensors when its turn has come.

Runs on the *rank*, on the thread that drives the engine. Tensors in CPU memory that are contiguous are communicated
where they lie; others through a copy.
"""
