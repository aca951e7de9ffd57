"""Who computes what in the next step: requests, their blocks, and the line to the device."""
