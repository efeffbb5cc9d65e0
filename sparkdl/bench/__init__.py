"""``sparkdl bench``: measures sparkdl against other libraries on this machine, in one run and in new processes.

Runs on the *driver*, without Spark except for whole fits. Begin with ``contest``, which lets contenders take turns;
``contenders`` holds what each of them does on its ranks.
"""
