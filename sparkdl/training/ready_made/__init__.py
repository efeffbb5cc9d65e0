"""The networks of the ready-made estimators, and what prepares columns for them. On ranks and in predictions.

Needs torch and NumPy alone; :mod:`sparkdl.estimators.ready_made` learns on the driver what they are made with.
"""
