"""The protocols between driver, barrier tasks and ranks: the spec of a launch, messages, health and failures of ranks.

Both ends of each protocol are in one file. Begin with :mod:`~sparkdl.launch.wire.channel`, the authenticated
connection between the tasks and the driver.
"""
