"""Runs plans on torch.distributed: on devices, and on none of them at all."""
