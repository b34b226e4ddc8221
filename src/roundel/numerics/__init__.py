"""Pure numpy: numbers in, numbers out. Nothing here knows what a graph is."""
