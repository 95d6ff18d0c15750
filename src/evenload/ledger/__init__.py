"""What really happened: every allocation of a training step, in one value and one file format."""
