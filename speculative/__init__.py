"""DSpark drafts: trained on what their targets write, evaluated as served, calibrated."""
