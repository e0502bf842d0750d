"""What belongs to no room: text, files, waiting, exits, the collector. Needs Python alone; all rooms may ask it."""
