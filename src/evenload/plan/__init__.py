"""Who holds which layer, what is recomputed, in which order it runs."""
