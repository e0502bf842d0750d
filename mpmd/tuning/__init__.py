"""Finds the schedule, the number of microbatches and the cut with which a step is fastest and fits the memory."""
