"""What a step costs on accelerators that are not here: memory, communication and time, before a node is booked."""
