"""What a compiled step is and costs, in words and numbers. Looks on; changes nothing."""
