"""Measurements of communicators: monitors, reports, timelines, stalls.

Begin with :mod:`~sparkdl.collective.telemetry.monitor`: a communicator has a monitor, and makes its ``report`` and its
``timeline`` from it. ``stalls`` lists the operations in
which a rank waits, and the ranks for which it waits. Runs on ranks.
"""
