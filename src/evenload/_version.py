"""The version, alone, so that the build backend reads it without importing anything."""

__version__ = "0.1.0"
