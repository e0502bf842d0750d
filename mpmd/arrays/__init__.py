"""Groups of devices, and arrays that live in some of them. Imports no other room."""
