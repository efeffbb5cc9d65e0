"""Pipeline parallelism: models cut into stages, which work on microbatches one after the other.

Runs on the *rank*. Begin with :mod:`.cut`, which keeps a rank's stages of a model; :mod:`.pipeline` runs a schedule
over them.
"""
