"""What driver, barrier tasks and ranks tell each other: the spec of a launch, messages, and how ranks ended.

Both ends of each protocol are in one file. Begin with :mod:`~sparkdl.launch.wire.channel`, the authenticated
connection between the tasks and the driver.
"""
