"""Pure passes that decide which stage and which group runs each equation. Nothing is compiled or run here."""
