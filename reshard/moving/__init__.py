"""From arrays in one layout to the same arrays in another, within a bound of memory."""
