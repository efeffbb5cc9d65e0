"""``sparkdl bench``: this machine measured against other libraries, in one run and in fresh processes."""
