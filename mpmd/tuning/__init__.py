"""From a step and its choices to the schedule, microbatches and cut that are fastest and fit the memory."""
