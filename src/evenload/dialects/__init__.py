"""Read and write the settings files that people already have."""
