"""Is the truncation good? Covered mass, evidence, comparisons with enumeration."""
