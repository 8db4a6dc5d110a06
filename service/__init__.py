"""The gateway that agents talk to, and the process that serves everything on one machine."""
