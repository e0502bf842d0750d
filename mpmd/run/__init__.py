"""From instructions and arrays to results: runs each group's list, moves values between groups and processes."""
