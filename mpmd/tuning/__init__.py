"""Finds the schedule, microbatches and cut that make a step fastest within the memory."""
