"""The DSpark draft and the gate that turns it off when it does not pay."""
