"""What a user writes into a model and a step: where stages end, loops over microbatches, values across groups."""
