"""Render values as text."""
