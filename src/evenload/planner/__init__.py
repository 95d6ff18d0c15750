"""The layout and recomputation that are fastest under a memory limit."""
