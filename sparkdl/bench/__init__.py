"""``sparkdl bench``: sparkdl measured against other libraries, on this machine, in one run and in fresh processes."""
