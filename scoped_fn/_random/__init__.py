"""Random numbers from keys: what is drawn, and how the random operations of a graph come to draw from keys."""
