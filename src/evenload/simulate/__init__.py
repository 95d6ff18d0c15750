"""Actions and segments to times and memory curves: the one composer."""
