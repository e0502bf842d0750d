"""From a compiled or measured step to words, numbers and pictures about it; changes nothing."""
