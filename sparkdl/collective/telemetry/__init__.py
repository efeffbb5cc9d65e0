"""What communicators measure and tell of themselves: monitors, reports, timelines, stalls.

Begin with :mod:`~sparkdl.collective.telemetry.observation`, the methods that every communicator has for it;
``monitor`` is what they read, ``report`` and ``timeline`` what they make of it. ``stalls`` says what a rank waits
in, and for whom. Runs on ranks.
"""
