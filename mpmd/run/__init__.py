"""Carries out the instructions of a step, and moves values between groups and processes."""
