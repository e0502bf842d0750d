"""Words, numbers and pictures about a compiled or measured step; changes nothing."""
